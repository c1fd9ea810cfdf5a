"""Making a transformer context parallel, and plain again: `attach`, `detach`. Takes what a caller of diffusers has:
PyTorch's DeviceMesh, diffusers' ContextParallelConfig."""

import logging
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import diffusers
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..architectures.split_plan import AttentionSpecs, Cross, SplitPlan
from ..engine.attention.context_attention import ContextAttention
from ..engine.attention.dispatch import check_backend
from ..engine.comm.mesh import BATCH_DIMS, MESH_DIMS, ContextMesh, GroupState, build_mesh, comm_device_of, mesh_dim_of
from ..engine.split.hooks import Block, add_hooks, blocks_of_plan
from ..engine.split.splitter import Splitter
from ..engine.split.streams import PARALLELIZED, Streams
from ..request import EngineOptions
from ..specs import Parallelism
from .plans import plan_of
from .processors import Aware, aware, backend_name


def from_context_parallel_config(config: Any) -> Parallelism:
    """Returns the Parallelism that a diffusers ContextParallelConfig (or a ParallelConfig around one) asks for.

    `ulysses_anything` and `ring_anything` are always on here. A mesh in it goes to `attach`."""
    config = getattr(config, "context_parallel_config", config)
    mesh = getattr(config, "mesh", None)
    return Parallelism(
        ring_degree=config.ring_degree or 1,
        ulysses_degree=config.ulysses_degree or 1,
        cfg_degree=1 if mesh is None else _size(mesh, "cfg"),
        options=EngineOptions(rotate_method=config.rotate_method, convert_to_fp32=config.convert_to_fp32),
    )


def mesh_for(mesh: ContextMesh | DeviceMesh | None, parallelism: Parallelism, device: torch.device) -> ContextMesh:
    """Returns `mesh`, or one built or adopted from PyTorch's. Raises ValueError where degrees disagree with it."""
    if mesh is None:
        return build_mesh(parallelism, device)
    if isinstance(mesh, DeviceMesh):
        return adopt_mesh(mesh, parallelism, device).with_shares(parallelism.shares)
    for name in ("ring", "ulysses"):
        size, degree = getattr(mesh, name).size, getattr(parallelism, f"{name}_degree")
        if size != degree:
            raise ValueError(f"{name}_degree is {degree}, but the mesh has {size} ranks along {name!r}")
    return mesh.with_shares(parallelism.shares)


def adopt_mesh(mesh: DeviceMesh, parallelism: Parallelism, device: torch.device | None = None) -> ContextMesh:
    """Returns a ContextMesh of the ranks of the caller's DeviceMesh, which may have other dims (fsdp, data).

    It must have "ring" and "ulysses", ring first, with the sizes that `parallelism` says, and "data" and "cfg" where
    those are parallel too; ValueError otherwise. Collective over the mesh, as `build_mesh`."""
    _check_dims(mesh, parallelism)
    comm_device = comm_device_of(device or torch.device(mesh.device_type))
    group_state = GroupState()
    names = ("ring", "ulysses", *(name for name in BATCH_DIMS if getattr(parallelism, f"{name}_degree") > 1))
    mesh_dims = {name: mesh_dim_of(mesh[name].get_group(), comm_device, group_state) for name in names}
    both = mesh["ring", "ulysses"]
    flat = both._flatten()
    context = mesh_dim_of(flat.get_group(), comm_device, group_state)
    expected = mesh_dims["ring"].index * mesh_dims["ulysses"].size + mesh_dims["ulysses"].index
    if context.index != expected or tuple(both.mesh[mesh_dims["ring"].index].tolist()) != mesh_dims["ulysses"].ranks:
        raise ValueError(f"the mesh must hold its ranks in ascending order along ring and ulysses, got {both}")
    return ContextMesh(**mesh_dims, context=context, device_mesh=flat)


def _size(mesh: DeviceMesh, name: str) -> int:
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(name)) if name in names else 1


def _check_dims(mesh: DeviceMesh, parallelism: Parallelism) -> None:
    names = mesh.mesh_dim_names or ()
    if not {"ring", "ulysses"} <= set(names) or names.index("ring") > names.index("ulysses"):
        raise ValueError(f'the mesh needs a "ring" dim and a "ulysses" dim after it (size 1 if unused), got {names}')
    for name in MESH_DIMS:
        degree = getattr(parallelism, f"{name}_degree")
        size = _size(mesh, name)
        if size != degree and not (name in BATCH_DIMS and degree == 1):
            raise ValueError(f"{name}_degree is {degree}, but the mesh has {size} ranks along {name!r}: {mesh}")


TESTED = "0.42"  # what requirements.txt asks for
log = logging.getLogger(__name__)
# Processors that say they are aware, but make calls that would stay local, or be split and must not be; with what to
# use instead.
_PARTLY_AWARE = {
    "FluxIPAdapterAttnProcessor": "FluxAttnProcessor (no IP-Adapter)",
    "Flux2KVAttnProcessor": "Flux2AttnProcessor (no key-value cache)",
    "Flux2KVParallelSelfAttnProcessor": "Flux2ParallelSelfAttnProcessor (no key-value cache)",
}
# Hooks of diffusers' caches that decide, or measure, by the hidden states that they see.
_COMPARING = ("FBCHeadBlockHook", "SeaCacheLeaderBlockHook")
_CALIBRATING = "MagCacheHeadHook"


class _Setting(NamedTuple):
    """A setting of an attention module, or of its processor, while it is attached."""

    module_name: str
    owner: Any
    attribute: str
    value: Any

    @property
    def holds(self) -> bool:
        return getattr(self.owner, self.attribute, None) is self.value


class _Attachment(ExitStack):
    """Undoes all settings when it is closed. `streams` are those of a split transformer."""

    streams: Streams | None = None


def attach(
    transformer: nn.Module, mesh: ContextMesh | DeviceMesh | None, parallelism: Parallelism,
    plan: SplitPlan | None = None, replicated: Collection[str] = (),
) -> None:  # fmt: skip
    """Run every later forward of `transformer` over the ranks of `mesh`; all of them must call it, then forward.

    Each rank passes full inputs and gets the full output, equal to what one rank computes. `mesh` None: built here,
    for a group that is all of the world. `plan` None: ours for its class. `replicated` streams ("text") stay full on
    every rank. Where one rank has the full sequence, only the attention backend is set. Processors that know no
    backend are replaced by ours where we have one. Raises ValueError, and changes nothing, when it is attached already,
    when plan, mesh and transformer do not fit, when an attention processor cannot be made parallel, or when a cache of
    diffusers' compares hidden states. A forward raises it for a cache that was enabled later."""
    if hasattr(transformer, PARALLELIZED):
        raise ValueError(f"this {type(transformer).__name__} is attached already; detach it first")
    if getattr(transformer, "_parallel_config", None) is not None:
        raise ValueError("diffusers' enable_parallelism was called on this transformer; load it again and attach it")
    device = next(transformer.parameters()).device
    check_backend(parallelism.options.attention_backend, device)
    _warn_of_untested_version(diffusers.__version__)
    context_mesh = mesh_for(mesh, parallelism, device)
    attachment = _Attachment()
    if context_mesh.context.size == 1:
        settings = list(_settings(transformer, [], context_mesh, parallelism, Streams(context_mesh.context)))
    else:
        plan = plan or plan_of(transformer)
        plan = replace(plan, replicated=plan.replicated.union(replicated))
        splitter = Splitter(plan, context_mesh.context)
        blocks = blocks_of_plan(transformer, plan)
        _check_caches(blocks)
        settings = list(_settings(transformer, blocks, context_mesh, parallelism, splitter))
        attachment.streams = splitter
        handles = [transformer.register_forward_pre_hook(partial(_begin, settings, splitter, blocks))]
        handles += [handle for block in blocks for handle in add_hooks(block, splitter)]
        handles.append(transformer.register_forward_hook(lambda *_: splitter.clear(), always_call=True))
        for handle in handles:
            attachment.enter_context(handle)
    _apply(settings, attachment)
    setattr(transformer, PARALLELIZED, attachment)


def detach(transformer: nn.Module) -> None:
    """Make `transformer` plain again, exactly as it was before `attach`; ValueError if it is not attached."""
    attachment = getattr(transformer, PARALLELIZED, None)
    if attachment is None:
        raise ValueError(f"this {type(transformer).__name__} is not attached")
    attachment.close()
    delattr(transformer, PARALLELIZED)


@cache
def _warn_of_untested_version(version: str) -> None:
    if not version.startswith(f"{TESTED}."):
        log.warning("[CP] attach was tested with diffusers %s, and %s is installed", TESTED, version)


def _settings(
    transformer: nn.Module, blocks: list[Block], mesh: ContextMesh, parallelism: Parallelism, streams: Streams
) -> Iterator[_Setting]:
    """Yields the settings of each attention module. Raises ValueError for a processor that would stay local."""
    chosen = {id(module): over for block in blocks for scope, over in block.scopes for module in scope.modules()}
    attentions: dict[Cross, ContextAttention] = {}
    scope_by_processor: dict[int, AttentionSpecs] = {}
    for name, module in transformer.named_modules():
        if not callable(getattr(module, "processor", None)):
            continue
        over = chosen.get(id(module), "local")
        processor = aware(module.processor)
        if scope_by_processor.setdefault(id(processor), over) != over:
            raise ValueError(f"{name} shares its processor with attention over other streams; give each its own")
        attention, backend = None, _local_backend(processor, parallelism)
        if over != "local":
            _check_aware(name, processor)
            cross = Cross(queries=over, keys=over) if isinstance(over, tuple) else over
            assert isinstance(cross, Cross)
            new = ContextAttention(mesh, parallelism, streams, cross.queries, cross.keys)
            attention, backend = attentions.setdefault(cross, new), backend_name(parallelism.options.attention_backend)
        yield _Setting(name, module, "processor", processor)
        yield _Setting(name, processor, "_parallel_config", attention)
        yield _Setting(name, processor, "_attention_backend", backend)


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
    """Returns the backend that diffusers itself shall use: what was chosen, or what the processor has."""
    # Ours for our own processors: where a kernel of diffusers would refuse a mask, `attend` takes another.
    if isinstance(processor, Aware):
        return backend_name(parallelism.options.attention_backend)
    if parallelism.options.attention_backend == "auto" or not hasattr(processor, "_attention_backend"):
        return getattr(processor, "_attention_backend", None)
    return AttentionBackendName(parallelism.options.attention_backend)


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


def _check_caches(blocks: list[Block]) -> None:
    """Raises ValueError for a cache that compares hidden states: ranks would disagree about which blocks run."""
    registries = (getattr(block.module, "_diffusers_hook", None) for block in blocks)
    for one in (one for registry in registries if registry is not None for one in registry.hooks.values()):
        kind = type(one).__name__
        if kind in _COMPARING or (kind == _CALIBRATING and one.config.calibrate):
            raise ValueError(
                f"a cache of diffusers ({kind}) compares hidden states, and each rank would use its own tokens; call "
                "disable_cache() on the transformer"
            )


def _begin(settings: list[_Setting], splitter: Splitter, blocks: list[Block], *_: Any) -> None:
    """Clears the streams before a forward, and checks caches and that attach's settings are unchanged."""
    splitter.clear()
    _check_caches(blocks)
    for setting in settings:
        if not setting.holds:
            raise ValueError(
                f"the attention processor of {setting.module_name}, or its backend, was changed after attach; "
                "detach, change it, then attach again"
            )
