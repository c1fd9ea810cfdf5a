"""CP VAE: takes a VAE and returns the same VAE with its network in the workers. ComfyUI's own code stays around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.sd
import torch
from comfy_api.latest import io
from torch.overrides import TorchFunctionMode

from ...parallel_runtime.group.shared_output import SharedOutput
from ...parallel_runtime.request import ParallelRequest
from ..describe.host import announce_refusals
from ..describe.vae import NotParallel, describe_vae
from ..remote.comfy_memory import CPU, WeightlessPatcher, WorkerModel
from ..remote.in_workers import InWorkers, in_workers, warn
from ..remote.remote_vae import RemoteVAE, placement_for
from ..server.settings import refresh, request_from
from .cp_config import CATEGORY, CPConfig


class CPVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPVAE",
            display_name="CP VAE",
            category=CATEGORY,
            description="Makes any VAE node run on all GPUs: each decodes or encodes a share of the rows, in a share "
            "of the memory, with the same result.",
            search_aliases=["vae decode", "vae encode", "multi gpu", "parallel vae", "tiled vae", "context parallel"],
            inputs=[
                io.Vae.Input("vae", tooltip="From Load VAE or Load Checkpoint."),
                CPConfig.Input(
                    "cp_config",
                    optional=True,
                    tooltip="Which workers. Unconnected: the ones that a CP sampler has started, else the default "
                    "devices.",
                ),
            ],
            outputs=[io.Vae.Output(tooltip="For every node that takes a VAE.")],
        )

    @classmethod
    @announce_refusals()
    def execute(cls, vae: Any, cp_config: ParallelRequest | None = None) -> io.NodeOutput:
        refresh()
        request = None if cp_config is None else request_from(cp_config)
        placement_for(request)  # raises Refused before the rest of the graph runs
        return io.NodeOutput(parallel_vae(vae, request))


def parallel_vae(vae: comfy.sd.VAE, request: ParallelRequest | None) -> comfy.sd.VAE:
    """Returns `vae` with its network in the workers, or `vae` itself, with a warning in the log, where workers cannot
    have it."""
    vae.throw_exception_if_invalid()
    native = vae.native if isinstance(vae, ParallelVAE) else vae
    try:
        return ParallelVAE(native, RemoteVAE(native, describe_vae(native), request))
    except NotParallel as reason:
        warn(ParallelVAE.does, reason)
        return vae


class ParallelVAE(InWorkers, comfy.sd.VAE):
    """A VAE whose network is in the workers. Its `native` VAE does the calls that they refuse."""

    does = "CP VAE decodes and encodes"

    def __init__(self, native: comfy.sd.VAE, remote: RemoteVAE) -> None:
        super().__init__()
        self.__dict__.update(vars(native))
        self.native = native
        self.first_stage_model = remote
        # It has no weights to move: the lease claims memory for the workers'.
        self.patcher = WeightlessPatcher(WorkerModel(), native.device, CPU, size=1)
        self.memory_used_decode = lambda shape, dtype: native.memory_used_decode(shape, dtype) / remote.workers
        self.memory_used_encode = lambda shape, dtype: native.memory_used_encode(shape, dtype) / remote.workers

    decode, decode_tiled = in_workers(comfy.sd.VAE, "decode"), in_workers(comfy.sd.VAE, "decode_tiled")
    encode, encode_tiled = in_workers(comfy.sd.VAE, "encode"), in_workers(comfy.sd.VAE, "encode_tiled")

    @contextmanager
    def using_workers(self) -> Iterator[None]:
        try:
            with SharedOutputMode(self.first_stage_model):
                yield
        finally:
            self.first_stage_model.end()

    def to_native(self) -> comfy.sd.VAE:
        return self.native

    def get_sd(self) -> dict[str, Any]:
        return self.native.get_sd()


class SharedOutputMode(TorchFunctionMode):
    """Allocates the output of a VAE, for which ComfyUI calls torch.empty, where the workers can write to it."""

    def __init__(self, remote: RemoteVAE) -> None:
        super().__init__()
        self._remote = remote

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._remote.output = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and self._is_output(args, kwargs):
            self._remote.output = SharedOutput(self._remote.output_shape, kwargs["dtype"])
            return self._remote.output.tensor
        return func(*args, **kwargs)

    def _is_output(self, args: Any, kwargs: Any) -> bool:
        shape = self._remote.output_shape
        on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        return bool(shape) and all(shape) and args == (shape,) and on_cpu and "dtype" in kwargs
