"""Attention called without transformer_options: wraps its name in the module, to pass the running override.

A module's name is shared by all networks of a process, so it is wrapped once, and restored after the last of them.
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
_SELECTOR = "optimized_attention_for_device"  # which of them
_ACTIVE: list[Override] = []  # one network at a time runs in a process; what graphs can read
_USERS: Counter[str] = Counter()


def set_active(override: Override | None) -> None:
    """Sets the override that wrapped functions use from now on; None for none."""
    _ACTIVE[:] = [] if override is None else [override]


@contextmanager
def wrap_modules(modules: Sequence[str]) -> Iterator[None]:
    """Wraps the attention functions of these modules within this context."""
    for name in modules:
        _USERS[name] += 1
        if _USERS[name] == 1:
            _wrap(sys.modules[name])
    yield
    set_active(None)
    for name in modules:
        _USERS[name] -= 1
        if not _USERS[name]:
            _unwrap(sys.modules[name])


def _wrap(module: ModuleType) -> None:
    for name in _NAMES:
        if name in vars(module):
            setattr(module, name, _with_override(getattr(module, name)))
    if _SELECTOR in vars(module):
        setattr(module, _SELECTOR, _select_with_override(getattr(module, _SELECTOR)))


def _unwrap(module: ModuleType) -> None:
    for name in (*_NAMES, _SELECTOR):
        if name in vars(module):
            setattr(module, name, getattr(module, name).__wrapped__)


def _select_with_override(function: Callable[..., Callable[..., Tensor]]) -> Callable[..., Callable[..., Tensor]]:
    @functools.wraps(function)
    def select(*args: Any, **kwargs: Any) -> Callable[..., Tensor]:
        return _with_override(function(*args, **kwargs))

    return select


def _with_override(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def call_with_override(*args: Any, **kwargs: Any) -> Tensor:
        if _ACTIVE and not kwargs.get("transformer_options"):
            kwargs["transformer_options"] = {"optimized_attention_override": _ACTIVE[0]}
        return function(*args, **kwargs)

    return call_with_override
