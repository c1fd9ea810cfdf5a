"""States of random generators, torch's of the CPU and a device, Python's and numpy's, and those that packs keep: read
here, set elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

STATES: dict[type, tuple[str, str]] = {  # by the kind of a generator: what reads and sets its state
    random.Random: ("getstate", "setstate"), torch.Generator: ("get_state", "set_state")
}  # fmt: skip


def generator_kind(device: torch.device) -> str:
    """Identifies devices whose generators give the same numbers: a GPU's depend on its number of processors."""
    if device.type == "cpu":
        return device.type
    properties = torch.get_device_module(device).get_device_properties(device)
    return f"{properties.name} {getattr(properties, 'multi_processor_count', '')}".strip()


def random_states(device: torch.device) -> dict[str, Tensor]:
    version, words, gauss = random.getstate()
    _, numpy_words, *numpy_rest = numpy.random.get_state()
    states = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor([version, *words]),
        "python normal": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([float(word) for word in (*numpy_words, *numpy_rest)], dtype=torch.float64),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    version, *words = states["python"].tolist()
    random.setstate((version, tuple(words), *(states["python normal"].tolist() or [None])))
    *numpy_words, position, has_gauss, gauss = states["numpy"].tolist()
    numpy.random.set_state(("MT19937", numpy.array(numpy_words).astype("uint32"), int(position), int(has_gauss), gauss))
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def state_of(generator: Any) -> Any:
    return getattr(generator, STATES[type(generator)][0])()


def set_state(generator: Any, state: Any) -> None:
    getattr(generator, STATES[type(generator)][1])(state)


def describe_generator(generator: Any, to: Callable[[Any], Any]) -> dict[str, Any]:
    """Describes a generator, for KINDS; torch's own is the other process's own, whose state each run sends."""
    if generator is torch.default_generator:
        return {}
    return {"device": to(getattr(generator, "device", None)), "state": to(state_of(generator))}


def rebuild_generator(node: dict[str, Any], make: Callable[[Any], Any]) -> Any:
    if "state" not in node:
        return torch.default_generator
    device = make(node["device"])
    made = random.Random() if device is None else torch.Generator(device)
    set_state(made, make(node["state"]))
    return made
