"""Describes values in ComfyUI's process (Describer), and makes them again in a worker (Rebuilder). What is in several
places is described and made once. Both sides of each kind of values stand in kinds.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from typing import Any

from torch import Tensor

from ..errors import Refused
from ..jobs import Described
from .code_names import Unsendable, qualified_name
from .kinds import KINDS, Node

PLAIN = bool | int | float | str | None
DescribeLoaded = Callable[[Any, "Parts"], Node]
LoadAdditional = Callable[[Node], Any]


class Describer:
    """Describes values that are sent together. `describe_loaded` describes what ComfyUI has loaded from a file besides
    the MODEL's network."""

    def __init__(self, describe_loaded: DescribeLoaded | None = None) -> None:
        self.describe_loaded = describe_loaded
        self.emptied: set[int] = set()  # the ids of cells whose contents each run makes anew
        self.tensors: dict[str, Tensor] = {}
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # keeps the described values alive, so that no other gets the id of one

    def describe(self, value: Any, what: str) -> Any:
        """Describes `value`. Raises Unsendable, naming `what`, for anything that workers cannot have."""
        numbers, tensors = len(self._numbers), len(self.tensors)
        try:
            return self.node(value, what, ())
        except Unsendable:  # the worker will make none of its parts
            for known, before in ((self._numbers, numbers), (self.tensors, tensors)):
                while len(known) > before:
                    known.popitem()
            raise

    def described(self, values: dict[Any, Any]) -> Described:
        """Returns what this describer has made of several values, in this order, as one dict."""
        return Described({"kind": "dict", "items": [[name, node] for name, node in values.items()]}, self.tensors)

    def node(self, value: Any, what: str, around: tuple[int, ...]) -> Any:
        """`around`: the ids of the values around this one."""
        if isinstance(value, Number) and not isinstance(value, Enum):
            value = getattr(value, "item", lambda: value)()  # numpy's numbers have one
        if isinstance(value, PLAIN) and not isinstance(value, Enum):
            return value
        if id(value) in self._numbers:
            return {"kind": "same", "number": self._numbers[id(value)]}
        if id(value) in around:
            raise Unsendable("unsendable.loop", what=what, thing=qualified_name(value))
        kind = next(name for name, row in KINDS.items() if row.fits(value))
        node = {"kind": kind, **KINDS[kind].describe(value, Parts(self, what, (*around, id(value))))}
        self._alive.append(value)
        return {**node, "number": self._numbers.setdefault(id(value), len(self._numbers))}


@dataclass(frozen=True)
class Parts:
    """Describes the parts of a value that is part of `what`. `around` are the ids of that value and those around it."""

    describer: Describer
    what: str
    around: tuple[int, ...]

    def __call__(self, part: Any) -> Any:
        return self.describer.node(part, self.what, self.around)

    def each(self, parts: Iterable[Any]) -> list[Any]:
        return [self(part) for part in parts]


class Rebuilder:
    """Makes again what one Describer has described. `load_additional` loads models that it has described by a file."""

    def __init__(self, tensors: dict[str, Tensor], load_additional: LoadAdditional | None = None) -> None:
        self.tensors = tensors
        self._load_additional = load_additional
        self._made: dict[int, Any] = {}

    def __call__(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self(part) for part in node]
        if not isinstance(node, dict):
            return node
        if node["kind"] == "same":
            return self._made[node["number"]]
        made = KINDS[node["kind"]].rebuild(node, self)
        if "number" in node:
            self._made[node["number"]] = made
        return made

    def load(self, file: Node) -> Any:
        if self._load_additional is None:
            raise Refused("patch.place", path=file["path"])
        return self._load_additional(file)


def rebuild(described: Described, load_additional: LoadAdditional | None = None) -> Any:
    return Rebuilder(described.tensors, load_additional)(described.tree)
