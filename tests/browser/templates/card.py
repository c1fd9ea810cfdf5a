"""A workflow's thumbnail: its name, what it makes, and one frame cut into the parts of four workers."""

from __future__ import annotations

import hashlib
from html import escape

from .graph import Template

WIDTH, HEIGHT = 640, 400
HUES = (212, 258, 146, 28, 340)
CUTS = ((0, 0), (1, 0), (0, 1), (1, 1))


def card(template: Template) -> str:
    """SVG, without any file or font of its own."""
    video = "video" in template.kind
    hue = HUES[hashlib.sha256(template.name.encode()).digest()[0] % len(HUES)]
    size = min(46, int(560 / (0.56 * len(template.title))))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">'
        f'<rect width="100%" height="100%" fill="hsl({hue} 30% 12%)"/>{_film(hue, frames=3 if video else 1)}'
        f'<text x="40" y="318" font-size="{size}" font-weight="700" fill="#fff">{escape(template.title)}</text>'
        f'<text x="40" y="352" font-size="23" fill="hsl({hue} 40% 78%)">{escape(template.kind)}</text>'
        f'<text x="40" y="382" font-size="17" fill="hsl({hue} 25% 62%)">{escape(template.needs)}</text></svg>'
    )


def _film(hue: int, frames: int) -> str:
    """Frames behind one another, each cut in four."""
    wide, high, back = 300, 190, 26
    return "".join(
        f'<rect x="{40 + back * i + dx * (wide / 2 + 4)}" y="{60 - 14 * i + dy * (high / 2 + 4)}" '
        f'width="{wide / 2}" height="{high / 2}" rx="7" fill="hsl({hue + 14 * part} 62% {30 + 9 * part}%)" '
        f'opacity="{1 - 0.28 * i}"/>'
        for i in reversed(range(frames))
        for part, (dx, dy) in enumerate(CUTS)
    )
