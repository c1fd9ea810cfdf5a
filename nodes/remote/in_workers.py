"""A VAE or CLIP of ComfyUI's whose network is in the workers: calls that they refuse are ComfyUI's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ...parallel_runtime.errors import Refused
from ..describe.vae import NotParallel

log = logging.getLogger(__name__)


class InWorkers:
    """`does` says what it does, by the name of the node that made it."""

    does: str

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def to_native(self) -> Any:
        """Returns ComfyUI's own object, for one call."""
        raise NotImplementedError

    def using_workers(self) -> AbstractContextManager[Any]:
        """Returns the context of one call."""
        raise NotImplementedError

    def warn(self, reason: Exception) -> None:
        """Logs each reason once."""
        if str(reason) not in self._logged:
            self._logged.add(str(reason))
            warn(self.does, reason)


def in_workers(owner: type, name: str) -> Callable[..., Any]:
    """Returns ComfyUI's method of this name, which uses the workers' network, or the native one where they refuse."""

    def method(self: InWorkers, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.using_workers():
                return getattr(owner, name)(self, *args, **kwargs)
        except (NotParallel, Refused) as reason:
            self.warn(reason)
        return getattr(self.to_native(), name)(*args, **kwargs)

    return method


def warn(does: str, reason: Exception) -> None:
    log.warning("[CP] %s in ComfyUI's process: %s", does, reason)
