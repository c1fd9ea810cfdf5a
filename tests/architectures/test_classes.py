"""A plan belongs to exactly the classes that it names: a subclass may be another network, which nobody compared."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import nn

from parallel_runtime.architectures import ARCHITECTURES, architecture_of

KINDS = [kind for network in ARCHITECTURES for kind in network.kinds]


def class_named(kind: str, *bases: type, **body: Any) -> type:
    module, _, name = kind.partition(":")
    return type(name, bases or (nn.Module,), {"__module__": module, **body})


@pytest.mark.parametrize("kind", KINDS)
def test_each_class_has_the_plan_that_names_it(kind: str) -> None:
    (named,) = (network for network in ARCHITECTURES if kind in network.kinds)
    assert architecture_of(class_named(kind)()) is named


@pytest.mark.parametrize(
    "body",
    [
        {"forward": lambda self: None},
        {"forward": functools.partialmethod(lambda self, more: None, 1)},
        {"_forward": property(lambda self: None)},
        {"rope_axes": (1, 2)},
        {},
    ],
    ids=["a forward", "a forward that is no function", "a property", "another number", "nothing of its own"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_subclass_has_none(kind: str, body: dict[str, Any]) -> None:
    other = class_named("comfy.ldm.ming.model:MingImage", class_named(kind), **body)
    assert architecture_of(other()) is None
    grandchild = class_named("comfy.ldm.ming.model:MingImageEdit", other)
    assert architecture_of(grandchild()) is None


def test_a_class_of_the_same_name_elsewhere_has_none() -> None:
    for kind in KINDS:
        assert architecture_of(class_named(f"another.pack:{kind.partition(':')[2]}")()) is None
