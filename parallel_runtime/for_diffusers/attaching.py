"""Making a transformer context parallel, and plain again: `attach`, `detach`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import diffusers
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..plan import Attends, Cross, Plan
from ..specs import Parallelism
from ..worker.engine.attention import ContextAttention
from ..worker.engine.cuts import Cuts
from ..worker.engine.hooking import Block, cut_blocks, hook
from ..worker.engine.kernels import check_backend
from ..worker.engine.mesh import ContextMesh
from ..worker.engine.streams import DIVIDED, Streams
from .adopting import mesh_for
from .plans import plan_of
from .processors import Aware, aware, backend_name

TESTED = "0.42"  # what requirements.txt asks for
log = logging.getLogger(__name__)
# Say that they are aware, but make calls that would stay local, or be cut and must not be; with what to use instead.
_PARTLY_AWARE = {
    "FluxIPAdapterAttnProcessor": "FluxAttnProcessor (no IP-Adapter)",
    "Flux2KVAttnProcessor": "Flux2AttnProcessor (no key-value cache)",
    "Flux2KVParallelSelfAttnProcessor": "Flux2ParallelSelfAttnProcessor (no key-value cache)",
}


class _Setting(NamedTuple):
    """What is set on an attention module while attached, or on its processor."""

    module_name: str
    owner: Any
    attribute: str
    value: Any

    @property
    def holds(self) -> bool:
        return getattr(self.owner, self.attribute, None) is self.value


class _Attachment(ExitStack):
    """What takes back all that was set, and the streams of a transformer that is cut."""

    streams: Streams | None = None


def attach(
    transformer: nn.Module,
    mesh: ContextMesh | DeviceMesh | None,
    parallelism: Parallelism,
    plan: Plan | None = None,
    replicated: Collection[str] = (),
) -> None:
    """Run every later forward of `transformer` over the ranks of `mesh`; all of them must call it, then forward.

    Each rank passes whole inputs and gets the whole output, equal to what one rank computes. `mesh` None: built here,
    for a group that is all of the world. `plan` None: ours for its class. `replicated` streams ("text") stay whole on
    every rank. Where one rank holds the whole sequence, only the attention backend is set. Processors that know no
    backend are replaced by ours where we have one. Raises ValueError, and changes nothing, when it is attached already,
    when plan, mesh and transformer do not fit, or when an attention processor cannot be made parallel.
    """
    if hasattr(transformer, DIVIDED):
        raise ValueError(f"this {type(transformer).__name__} is attached already; detach it first")
    if getattr(transformer, "_parallel_config", None) is not None:
        raise ValueError("diffusers' enable_parallelism was called on this transformer; load it anew and attach it")
    device = next(transformer.parameters()).device
    check_backend(parallelism.attention_backend, device)
    _tell_of_another(diffusers.__version__)
    context_mesh = mesh_for(mesh, parallelism, device)
    attachment = _Attachment()
    if context_mesh.context.size == 1:
        settings = list(_settings(transformer, [], context_mesh, parallelism, Streams(context_mesh.context)))
    else:
        plan = plan or plan_of(transformer)
        plan = replace(plan, replicated=plan.replicated.union(replicated))
        cuts = Cuts(plan, context_mesh.context)
        blocks = cut_blocks(transformer, plan)
        settings = list(_settings(transformer, blocks, context_mesh, parallelism, cuts.streams))
        attachment.streams = cuts.streams
        handles = [transformer.register_forward_pre_hook(_begin(settings, cuts))]
        handles += [handle for block in blocks for handle in hook(block, cuts)]
        handles.append(transformer.register_forward_hook(lambda *_: cuts.clear(), always_call=True))
        for handle in handles:
            attachment.enter_context(handle)
    _apply(settings, attachment)
    setattr(transformer, DIVIDED, attachment)


def detach(transformer: nn.Module) -> None:
    """Make `transformer` plain again, exactly as it was before `attach`; ValueError if it is not attached."""
    attachment = getattr(transformer, DIVIDED, None)
    if attachment is None:
        raise ValueError(f"this {type(transformer).__name__} is not attached")
    attachment.close()
    delattr(transformer, DIVIDED)


@cache
def _tell_of_another(version: str) -> None:
    if not version.startswith(f"{TESTED}."):
        log.warning("[CP] attach was tested with diffusers %s, and %s is installed", TESTED, version)


def _settings(
    transformer: nn.Module, blocks: list[Block], mesh: ContextMesh, parallelism: Parallelism, streams: Streams
) -> Iterator[_Setting]:
    """Those of each attention module; ValueError for a processor that would silently stay local."""
    chosen = {id(module): over for block in blocks for scope, over in block.scopes for module in scope.modules()}
    attentions: dict[Cross, ContextAttention] = {}
    taken: dict[int, Attends] = {}
    for name, module in _attention_modules(transformer):
        over = chosen.get(id(module), "local")
        processor = aware(module.processor)
        if taken.setdefault(id(processor), over) != over:
            raise ValueError(f"{name} shares its processor with attention over other streams; give each its own")
        attention, backend = None, _local_backend(processor, parallelism)
        if over != "local":
            _check_aware(name, processor)
            cross = Cross(queries=over, keys=over) if isinstance(over, tuple) else over
            assert isinstance(cross, Cross)
            made = ContextAttention(mesh, parallelism, streams, cross.queries, cross.keys)
            attention, backend = attentions.setdefault(cross, made), backend_name(parallelism.attention_backend)
        yield _Setting(name, module, "processor", processor)
        yield _Setting(name, processor, "_parallel_config", attention)
        yield _Setting(name, processor, "_attention_backend", backend)


def _attention_modules(transformer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in transformer.named_modules():
        if getattr(module, "processor", None) is not None and callable(module.processor):
            yield name, module


def _check_aware(name: str, processor: Any) -> None:
    kind = type(processor).__name__
    if not hasattr(processor, "_parallel_config") or not hasattr(processor, "_attention_backend"):
        raise ValueError(
            f"{kind} ({name}) is not context-parallel aware and would attend over this rank's tokens only; set another "
            "processor, or mark the module local in the plan if its tokens are whole on every rank"
        )
    if kind in _PARTLY_AWARE:
        raise ValueError(f"{kind} ({name}) also attends to tokens that are not cut; set {_PARTLY_AWARE[kind]} instead")


def _local_backend(processor: Any, parallelism: Parallelism) -> AttentionBackendName | None:
    """The backend that diffusers itself shall use: what was chosen, or what the processor has.

    Processors of ours come to us also here: where a kernel of diffusers' would refuse a mask, `attend` takes another.
    """
    if isinstance(processor, Aware):
        return backend_name(parallelism.attention_backend)
    if parallelism.attention_backend == "auto" or not hasattr(processor, "_attention_backend"):
        return getattr(processor, "_attention_backend", None)
    return AttentionBackendName(parallelism.attention_backend)


def _apply(settings: list[_Setting], attachment: _Attachment) -> None:
    for setting in settings:
        if setting.holds:
            continue
        _, owner, attribute, value = setting
        if attribute in vars(owner):
            attachment.callback(setattr, owner, attribute, vars(owner)[attribute])
        else:
            attachment.callback(vars(owner).pop, attribute, None)
        setattr(owner, attribute, value)


def _begin(settings: list[_Setting], cuts: Cuts) -> Callable[[nn.Module, Any], None]:
    """Each forward starts with no stream seen, and with the processors that attach left."""

    def begin(_: nn.Module, __: Any) -> None:
        cuts.clear()
        for setting in settings:
            if not setting.holds:
                raise ValueError(
                    f"the attention processor of {setting.module_name}, or its backend, was changed after attach; "
                    "detach, change it, then attach again"
                )

    return begin
