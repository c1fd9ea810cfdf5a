"""Attention that is called without transformer_options: the name in its module leads to the network that runs now.

A module's name is shared by all networks of a process, so it is changed once, and given back after the last of them.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor

Override = Callable[..., Tensor]

_NAMES = ("optimized_attention", "optimized_attention_masked")
_CHOOSES = "optimized_attention_for_device"  # which of them
_RUNNING: list[Override] = []  # one network at a time runs in a process; what graphs can read
_USERS: Counter[str] = Counter()


def lead_to(override: Override | None) -> None:
    """Wrapped names lead to this one from now on; None: nowhere."""
    _RUNNING[:] = [] if override is None else [override]


@contextmanager
def wrapped(modules: Sequence[str]) -> Iterator[None]:
    """The names of these modules are wrapped in here."""
    for name in modules:
        _USERS[name] += 1
        if _USERS[name] == 1:
            _wrap(sys.modules[name])
    yield
    lead_to(None)
    for name in modules:
        _USERS[name] -= 1
        if not _USERS[name]:
            _unwrap(sys.modules[name])


def _wrap(module: ModuleType) -> None:
    for name in _NAMES:
        if name in vars(module):
            setattr(module, name, _passing(getattr(module, name)))
    if _CHOOSES in vars(module):
        setattr(module, _CHOOSES, _choosing(getattr(module, _CHOOSES)))


def _unwrap(module: ModuleType) -> None:
    for name in (*_NAMES, _CHOOSES):
        if name in vars(module):
            setattr(module, name, getattr(module, name).__wrapped__)


def _choosing(function: Callable[..., Callable[..., Tensor]]) -> Callable[..., Callable[..., Tensor]]:
    @functools.wraps(function)
    def choosing(*args: Any, **kwargs: Any) -> Callable[..., Tensor]:
        return _passing(function(*args, **kwargs))

    return choosing


def _passing(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def passing(*args: Any, **kwargs: Any) -> Tensor:
        if _RUNNING and not kwargs.get("transformer_options"):
            kwargs["transformer_options"] = {"optimized_attention_override": _RUNNING[0]}
        return function(*args, **kwargs)

    return passing
