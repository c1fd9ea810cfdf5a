"""CP VAE: a VAE in, the same VAE with its network in the workers out. All that ComfyUI does around it stays ComfyUI's
own code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import comfy.sd
import torch
from comfy_api.latest import io
from torch.overrides import TorchFunctionMode

from ..parallel_runtime.host.room import Room
from ..parallel_runtime.specs import ParallelRequest
from .config import CATEGORY, CPConfig, requested
from .describe_vae import Undivided, describe_vae
from .remote_vae import RemoteVAE, placement_for
from .residence import CPU, Hollow, WorkerModel

log = logging.getLogger(__name__)


class CPVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPVAE",
            display_name="CP VAE",
            category=CATEGORY,
            description="A VAE that decodes and encodes on several GPUs, each with a share of the rows and of "
            "the memory, and with the same result. For every node that takes a VAE.",
            search_aliases=["vae decode", "vae encode", "multi gpu", "parallel vae", "tiled vae", "context parallel"],
            inputs=[
                io.Vae.Input("vae", tooltip="From Load VAE or Load Checkpoint."),
                CPConfig.Input(
                    "cp_config",
                    optional=True,
                    tooltip="Which workers. Unconnected: the ones that a CP sampler has started, else every GPU.",
                ),
            ],
            outputs=[io.Vae.Output(tooltip="For every node that takes a VAE.")],
        )

    @classmethod
    def execute(cls, vae: Any, cp_config: ParallelRequest | None = None) -> io.NodeOutput:
        request = None if cp_config is None else requested(cp_config)
        placement_for(request)  # refused here, not in the middle of a graph
        return io.NodeOutput(divided(vae, request))


def divided(vae: comfy.sd.VAE, request: ParallelRequest | None) -> comfy.sd.VAE:
    """`vae` over the workers; itself, with one line in the log, where workers may not have it."""
    vae.throw_exception_if_invalid()
    whole = vae.whole if isinstance(vae, DividedVAE) else vae
    try:
        return DividedVAE(whole, RemoteVAE(whole, describe_vae(whole), request))
    except Undivided as reason:
        _say(reason)
        return vae


def _over_workers(name: str) -> Callable[..., torch.Tensor]:
    """ComfyUI's method of this name, with the workers for the network; that of the VAE as it was, where they refuse."""

    def method(self: DividedVAE, *args: Any, **kwargs: Any) -> torch.Tensor:
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

    return method


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

    decode, decode_tiled = _over_workers("decode"), _over_workers("decode_tiled")
    encode, encode_tiled = _over_workers("encode"), _over_workers("encode_tiled")

    def get_sd(self) -> dict[str, Any]:
        return self.whole.get_sd()


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
