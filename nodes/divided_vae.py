"""A VAE whose network is in the workers. All that ComfyUI does around it stays ComfyUI's own code."""

from __future__ import annotations

import logging
from typing import Any

import comfy.sd
import torch
from torch.overrides import TorchFunctionMode

from ..parallel_runtime.host.room import Room
from ..parallel_runtime.specs import ParallelRequest
from .describe_vae import Undivided, describe_vae
from .remote_vae import RemoteVAE
from .residence import CPU, Hollow, WorkerModel

log = logging.getLogger(__name__)


def divided(vae: comfy.sd.VAE, request: ParallelRequest | None) -> comfy.sd.VAE:
    """`vae` over the workers; itself, with one line in the log, where workers may not have it."""
    vae.throw_exception_if_invalid()
    whole = vae.whole if isinstance(vae, DividedVAE) else vae
    try:
        return DividedVAE(whole, RemoteVAE(whole, describe_vae(whole), request))
    except Undivided as reason:
        _say(reason)
        return vae


class DividedVAE(comfy.sd.VAE):
    """`whole` is the VAE as it was; what workers refuse of a call is done by it."""

    def __init__(self, whole: comfy.sd.VAE, remote: RemoteVAE) -> None:
        self.__dict__.update(vars(whole))
        self.whole = whole
        self.first_stage_model = remote
        # The weights that it would move are not its own; the workers' are counted apart.
        self.patcher = Hollow(WorkerModel(), whole.device, CPU, size=1)
        self.memory_used_decode = lambda shape, dtype: whole.memory_used_decode(shape, dtype) / remote.workers
        self.memory_used_encode = lambda shape, dtype: whole.memory_used_encode(shape, dtype) / remote.workers
        self._said: set[str] = set()

    def decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._over_workers("decode", args, kwargs)

    def decode_tiled(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._over_workers("decode_tiled", args, kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._over_workers("encode", args, kwargs)

    def encode_tiled(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._over_workers("encode_tiled", args, kwargs)

    def get_sd(self) -> dict[str, Any]:
        return self.whole.get_sd()

    def _over_workers(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        try:
            with IntoRoom(self.first_stage_model):
                return getattr(comfy.sd.VAE, name)(self, *args, **kwargs)
        except Undivided as reason:
            if str(reason) not in self._said:
                self._said.add(str(reason))
                _say(reason)
        finally:
            self.first_stage_model.settle()
        return getattr(self.whole, name)(*args, **kwargs)


class IntoRoom(TorchFunctionMode):
    """Within it the memory that ComfyUI allocates for a VAE's output is memory that the workers can write to."""

    def __init__(self, remote: RemoteVAE) -> None:
        super().__init__()
        self._remote = remote

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._leave()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and self._is_output(args, kwargs):
            self._leave()
            self._remote.room = Room(self._remote.expected, kwargs["dtype"])
            return self._remote.room.tensor
        return func(*args, **kwargs)

    def _is_output(self, args: Any, kwargs: Any) -> bool:
        expected = self._remote.expected
        on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        return bool(expected) and all(expected) and args == (expected,) and on_cpu and "dtype" in kwargs

    def _leave(self) -> None:
        if self._remote.room is not None:
            self._remote.room.close()
        self._remote.room = None


def _say(reason: Undivided) -> None:
    log.warning("[CP] CP VAE decodes and encodes in ComfyUI's process: %s", reason)
