"""A plan's first draft, from three forwards: what changes with the latent, what with the text. Knows no network.

It finds stacks, streams and most arguments. It cannot see the order of streams, which attention is local, or what the
forwards did not bring (masks, references, times of their own).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .subject import load_subject, run

Shapes = dict[str, dict[str, tuple[int, ...]]]  # stack: argument: shape, and "returns"


def draft(path: Path, comfyui: Path) -> str:
    """The sites of a plan as Python, to be completed."""
    subject = load_subject(path, comfyui)
    seen = [_observe(subject.network, call) for call in (subject.call, subject.more_rows, subject.more_text)]
    lines = [f"# {type(subject.network).__module__}:{type(subject.network).__qualname__}"]
    for stack in seen[0]:
        lines += _site(stack, [shapes[stack] for shapes in seen])
    return "\n".join([*lines, "# then: the final layer or gathers=True, the order of streams, within={...}", ""])


def _observe(network: nn.Module, call: dict[str, Any]) -> Shapes:
    seen: Shapes = {}
    handles = []
    for name, stack in network.named_modules():
        if isinstance(stack, nn.ModuleList) and len(stack) and "." not in name:
            handles.append(stack[0].register_forward_hook(_recorder(seen, name), with_kwargs=True))
    run(network, call)
    for handle in handles:
        handle.remove()
    return seen


def _recorder(seen: Shapes, stack: str) -> Any:
    def record(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        names = list(inspect.signature(type(block).forward).parameters)[1:]
        given = {names[n] if n < len(names) else str(n): value for n, value in enumerate(args)} | kwargs
        tensors = {name: shape for name, value in given.items() for shape in _shapes(value)}
        seen[stack] = tensors | {f"returns {n}": shape for n, shape in enumerate(_shapes(out))}

    return record


def _shapes(value: Any) -> Iterator[tuple[int, ...]]:
    if isinstance(value, Tensor):
        yield tuple(value.shape)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _shapes(item)


def _site(stack: str, runs: list[dict[str, tuple[int, ...]]]) -> list[str]:
    given = {name: shape for name, shape in runs[0].items() if not name.startswith("returns ")}
    returned = {shape for name, shape in runs[0].items() if name not in given}
    found = {name: next(((dim, cause) for dim in range(len(shape)) if (cause := _cause(name, dim, runs))), None)
             for name, shape in given.items()}  # fmt: skip
    tokens = {name: follows for name, follows in found.items() if follows and given[name] in returned}
    streams = list(dict.fromkeys(cause for _, cause in tokens.values()))
    words, whole = [], []
    for name, follows in found.items():
        if follows is None or (name not in tokens and follows[1] not in [*streams, "joint"]):
            whole.append(name)  # what follows a stream without tokens here is read as keys
            continue
        dim, cause = follows
        over = streams if cause == "joint" and "joint" not in streams else [cause]
        rest = f", {dim}" if dim != 1 else ""
        words.append(f'"{name}": {"Tokens" if name in tokens else "Along"}({tuple(over)}{rest})')
    return (
        [f'Site("{stack}", {{{", ".join(words)}}}, attends={tuple(streams)}, whole={tuple(whole)}),'] if words else []
    )


def _cause(name: str, dim: int, runs: list[dict[str, tuple[int, ...]]]) -> str:
    """Which stream a dim follows: it grew with the latent, with the text, or with both."""
    base, rows, text = (run.get(name, ()) for run in runs)
    if len(rows) <= dim or len(text) <= dim:
        return ""
    grew = (rows[dim] != base[dim], text[dim] != base[dim])
    return {(True, False): "image", (False, True): "text", (True, True): "joint"}.get(grew, "")
