"""Remembers what devices measured, also from one start of ComfyUI to the next: the noise of another measurement must
not change how the same run is split, and with that its rounding."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from typing import Any

from ..planning.run_plan import DeviceProfile, Speed
from ..specs import Placement

log = logging.getLogger(__name__)

NOISE = 1.5  # times as fast: two measurements of the same devices differ by less


class Measured:
    """The first DeviceProfile of each placement, until another one differs by more than noise. `path` is the file that
    keeps them, "" for none."""

    def __init__(self) -> None:
        self.path = ""
        self._known: dict[str, DeviceProfile] = {}

    def settled(self, placement: Placement, measured: DeviceProfile) -> DeviceProfile:
        """Returns the remembered profile if `measured` is like it, else `measured`, which is remembered from now on."""
        name = f"{placement.nnodes} x {','.join(placement.devices)}"
        self._known |= self._read()
        known = self._known.get(name)
        if known is not None and _are_alike(measured, known):
            return known
        self._known[name] = measured
        if self.path:
            try:
                self._write()
            except OSError as error:
                log.warning(
                    "[CP] %s cannot be written (%s): after a restart a run may be split otherwise", self.path, error
                )
        return measured

    def _read(self) -> dict[str, DeviceProfile]:
        """Returns what the file has; nothing where there is none, or one that we have not written."""
        try:
            with open(self.path, encoding="utf-8") as file:
                return {name: _profile(**values) for name, values in json.load(file).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _write(self) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        partial = f"{self.path}.{os.getpid()}"
        with open(partial, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            json.dump({name: asdict(profile) for name, profile in self._known.items()}, file, indent=1)
        os.replace(partial, self.path)


def _are_alike(one: DeviceProfile, other: DeviceProfile) -> bool:
    """Are all rates of one within NOISE of the other's?"""
    both = list(zip(_rates(one), _rates(other), strict=False))
    return len(one.ranks) == len(other.ranks) and all(max(pair) <= NOISE * min(pair) for pair in both)


def _rates(profile: DeviceProfile) -> list[float]:
    each = [rate for speed in profile.ranks for rate in (speed.products, speed.attention)]
    return [profile.bytes_per_second, profile.flops_per_second, profile.host_bytes_per_second, *each]


def _profile(*, ranks: list[dict[str, float]], **rates: Any) -> DeviceProfile:
    return DeviceProfile(ranks=tuple(Speed(**speed) for speed in ranks), **rates)
