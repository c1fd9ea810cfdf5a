"""A workflow's thumbnail: its name, what goes in, and which GPU has which part of what comes out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from html import escape
from math import sin

from parallel_runtime.explain.plan_words import Part

from .graph import Template
from .scene import Scene

WIDTH, HEIGHT = 640, 400
HUES = (212, 258, 146, 28, 340)
INK = ("#4f8fe8", "#57b673", "#e0a63a", "#c46fd1")  # of the GPUs
FONTS = "DejaVu Sans, sans-serif"  # the same ones wherever a picture is made again
LEFT, TOP, HIGH = 190, 30, 208  # the room for what comes out
WIDE = WIDTH - LEFT - 40
GAP, TITLED = 14, 22


def card(template: Template) -> str:
    """SVG, without any file of its own."""
    hue = HUES[hashlib.sha256(template.name.encode()).digest()[0] % len(HUES)]
    size = min(42, int(560 / (0.56 * len(template.title))))
    scene = Scene.of(template)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="{FONTS}">'
        f'<rect width="100%" height="100%" fill="hsl({hue} 30% 12%)"/>{"".join(_drawn(scene))}'
        f'<text x="40" y="326" font-size="{size}" font-weight="700" fill="#fff">{escape(template.title)}</text>'
        f'<text x="40" y="356" font-size="22" fill="hsl({hue} 40% 78%)">{escape(template.kind)}</text>'
        f'<text x="40" y="383" font-size="17" fill="hsl({hue} 25% 66%)">{escape(template.needs)}</text>'
        f'<text x="{WIDTH - 40}" y="383" font-size="17" text-anchor="end" fill="hsl({hue} 25% 66%)">{scene.size}</text>'
        "</svg>"
    )


def _drawn(scene: Scene) -> Iterator[str]:
    yield from _inputs(scene)
    yield _arrow(LEFT - 34, TOP + HIGH / 2)
    yield from _legend(scene)
    if scene.stages > 1:
        yield from _blocks(scene)
        return
    rows = [(name, lane) for name in scene.passes for lane in scene.lanes]
    video = scene.frames > 1
    gap = TITLED if len(scene.passes) > 1 else GAP
    high = (HIGH - gap * (len(rows) - 1)) / len(rows) if video else HIGH
    wide = WIDE if video else (WIDE - gap * (len(rows) - 1)) / len(rows)
    for index, (name, lane) in enumerate(rows):
        x, y = (LEFT, TOP + index * (high + gap)) if video else (LEFT + index * (wide + gap), TOP)
        yield from _film(scene, lane, x, y, wide, high) if video else _frame(scene, lane, x, y, wide, high)
        yield _words(x, y - 5, name) if name and lane is scene.lanes[0] else ""


def _blocks(scene: Scene) -> Iterator[str]:
    """The network's blocks, which the tokens pass one after the other; each GPU has some of them."""
    count = 6 * scene.stages
    space = WIDE - 40 * (scene.stages - 1)
    for block in range(count):
        stage, across = block // 6, space / count
        x = LEFT + block * across + 40 * stage
        yield _box(x, TOP + 30, across - 5, HIGH - 60, scene.lanes[stage][0].rank)
        yield _arrow(x + across + 10, TOP + HIGH / 2) if block % 6 == 5 and block + 1 < count else ""


def _frame(scene: Scene, lane: tuple[Part, ...], x: float, y: float, wide: float, high: float) -> Iterator[str]:
    """A picture. Its tokens go row by row, so that each GPU has a band of it."""
    shape = scene.width / scene.height if scene.width else 1.0
    across, down = min(wide, high * shape), min(high, wide / shape)
    y += (high - down) / 2
    for part in lane:
        first, last = part.tokens
        yield _box(x, y + first * down, across, (last - first) * down - 3, part.rank)
    yield _ridge(x, y, across, down)


def _film(scene: Scene, lane: tuple[Part, ...], x: float, y: float, wide: float, high: float) -> Iterator[str]:
    """A video. Its tokens go frame by frame, so that each GPU has some of the frames; and of its sound as much."""
    space = high * (0.62 if scene.sound else 1)
    count = 8
    across = wide / count
    down = min(space, 1.5 * across * scene.height / scene.width)
    y += (space - down) / 2
    for frame in range(count):
        rank = next(part.rank for part in lane if part.tokens[0] <= (frame + 0.5) / count <= part.tokens[1])
        yield _box(x + frame * across, y, across - 4, down, rank)
        yield _boat(x + frame * across, y, across - 4, down, frame / count)
    if scene.sound:
        yield from _sound(lane, x, y + down + (high - space) / 2, wide, high - space)


def _sound(lane: tuple[Part, ...], x: float, y: float, wide: float, high: float) -> Iterator[str]:
    bars = 56
    for bar in range(bars):
        rank = next(part.rank for part in lane if part.tokens[0] <= (bar + 0.5) / bars <= part.tokens[1])
        tall = high * (0.15 + 0.4 * abs(sin(bar * 0.7) * sin(bar * 0.19)))
        yield _box(x + bar * wide / bars, y + high / 2 - tall / 2, wide / bars - 3, tall, rank)


def _inputs(scene: Scene) -> Iterator[str]:
    """Prompts, and what else goes in, one below the other."""
    shown = ["prompt"] * scene.prompts + [
        name for name in scene.given if not (name == "picture" and "mask" in scene.given)
    ]
    each = min(66, HIGH / len(shown))
    for index, name in enumerate(shown):
        y = TOP + (HIGH - each * len(shown)) / 2 + index * each
        yield from _given(name, 40, y, 100, each - 14)


def _given(name: str, x: float, y: float, wide: float, high: float) -> Iterator[str]:
    line = 'fill="none" stroke="#cfd6e4" stroke-width="2"'
    yield f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="5" fill="#ffffff14"/>'
    if name == "prompt":
        for row, share in enumerate((0.78, 0.66, 0.4)):
            at = y + high * (row + 1) / 4
            yield f'<path d="M{x + 10} {at}h{wide * share}" {line}/>'
    elif name in ("picture", "mask", "edges"):
        outline = f"M{x + 8} {y + high - 7}l24 {-high * 0.5}l18 {high * 0.3}l14 {-high * 0.2}l20 {high * 0.4}"
        yield f'<path d="{outline}" {line if name == "edges" else line.replace("none", "#ffffff30")}/>'
        if name == "mask":
            yield f'<ellipse cx="{x + wide * 0.6}" cy="{y + high / 2}" rx="20" ry="{high * 0.3}" fill="#fff"/>'
    elif name == "sigmas":
        low = y + high - 8
        yield f'<path d="M{x + 10} {y + 8}C{x + 22} {low} {x + 50} {low} {x + 90} {low}" {line}/>'
    else:
        middle = f'x="{x + wide / 2}" y="{y + high / 2 + 6}" text-anchor="middle"'
        yield f'<text {middle} font-size="17" fill="#cfd6e4">{name}</text>'


def _legend(scene: Scene) -> Iterator[str]:
    """Which colour is which GPU, and how large it is; where a VAE is divided too, how."""
    ranks = [part.rank for lane in scene.lanes for part in lane]
    each = len(ranks) // scene.machines
    x = LEFT
    for rank in ranks:
        machine = f"{'AB'[rank // each]} " if scene.machines > 1 else ""
        yield _box(x, TOP + HIGH + 18, 13, 13, rank)
        yield _words(x + 18, TOP + HIGH + 30, f"{machine}GPU {rank % each}")
        x += 92 if machine else 74
    yield _words(x + 8, TOP + HIGH + 30, f"VAE: {scene.vae}" if scene.vae else "")


def _ridge(x: float, y: float, wide: float, high: float) -> str:
    points = f"M{x} {y + high * 0.8}l{wide * 0.3} {-high * 0.45}l{wide * 0.2} {high * 0.25}"
    return (
        f'<path d="{points}l{wide * 0.18} {-high * 0.2}l{wide * 0.32} {high * 0.4}" fill="none" stroke="#0d1420" '
        f'stroke-opacity="0.5" stroke-width="5"/><circle cx="{x + wide * 0.74}" cy="{y + high * 0.22}" '
        f'r="{high * 0.08}" fill="none" stroke="#0d1420" stroke-opacity="0.5" stroke-width="5"/>'
    )


def _boat(x: float, y: float, wide: float, high: float, time: float) -> str:
    at, sea = x + wide * (0.15 + 0.6 * time), y + high * 0.68
    return (
        f'<path d="M{x + 3} {sea}h{wide - 6}M{at} {sea - 3}h{wide * 0.2}l{-wide * 0.1} {-high * 0.2}z" fill="none" '
        'stroke="#0d1420" stroke-opacity="0.55" stroke-width="2.5"/>'
    )


def _box(x: float, y: float, wide: float, high: float, rank: int) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" rx="3" fill="{INK[rank]}"/>'


def _arrow(x: float, y: float) -> str:
    return f'<path d="M{x - 8} {y}h24m-9 -8l9 8l-9 8" fill="none" stroke="#cfd6e4" stroke-width="3"/>'


def _words(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y}" font-size="15" fill="#cfd6e4">{escape(text)}</text>'
