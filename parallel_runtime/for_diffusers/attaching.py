"""Making a transformer context parallel, and plain again: `attach`, `detach`. Takes what a caller of diffusers has:
PyTorch's DeviceMesh, diffusers' ContextParallelConfig.

diffusers' processors call `dispatch_attention_fn(..., backend=self._attention_backend,
parallel_config=self._parallel_config)`. A processor whose two attributes name our backend and a ContextAttention
reaches us; nothing that diffusers registered itself is changed, and no process-wide setting is touched. Processors that
would stay local, or mask what cannot be split, are replaced by ours: diffusers' own, line by line the same arithmetic,
with `dispatch_attention_fn` in the place of torch's call."""

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import diffusers
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from diffusers.models.transformers.transformer_lumina2 import Lumina2AttnProcessor2_0
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..architectures.split_plan import AttentionSpecs, Cross, SplitPlan
from ..engine.attention.context_attention import ContextAttention
from ..engine.attention.dispatch import attend, check_backend
from ..engine.comm.mesh import BATCH_DIMS, MESH_DIMS, ContextMesh, GroupState, build_mesh, comm_device_of, mesh_dim_of
from ..engine.split.hooks import Block, add_hooks, blocks_of_plan
from ..engine.split.splitter import Splitter
from ..engine.split.streams import PARALLELIZED, Streams
from ..request import AttentionBackend, EngineOptions
from ..specs import Parallelism
from .plans import plan_of

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


def from_context_parallel_config(config: Any) -> Parallelism:
    """Returns the Parallelism that a diffusers ContextParallelConfig (or a ParallelConfig around one) asks for.

    `ulysses_anything` and `ring_anything` are always on here. A mesh in it goes to `attach`."""
    config = getattr(config, "context_parallel_config", config)
    mesh: Any = getattr(config, "mesh", None)
    dims = getattr(mesh, "mesh_dim_names", None) or ()
    return Parallelism(
        ring_degree=config.ring_degree or 1,
        ulysses_degree=config.ulysses_degree or 1,
        cfg_degree=mesh.size(dims.index("cfg")) if "cfg" in dims else 1,
        options=EngineOptions(rotate_method=config.rotate_method, convert_to_fp32=config.convert_to_fp32),
    )


def adopt_mesh(mesh: DeviceMesh, parallelism: Parallelism, device: torch.device | None = None) -> ContextMesh:
    """Returns a ContextMesh of the ranks of the caller's DeviceMesh, which may have other dims (fsdp, data).

    It must have "ring" and "ulysses", ring first, with the sizes that `parallelism` says, and "data" and "cfg" where
    those are parallel too; ValueError otherwise. Collective over the mesh, as `build_mesh`."""
    dims = mesh.mesh_dim_names or ()
    if not {"ring", "ulysses"} <= set(dims) or dims.index("ring") > dims.index("ulysses"):
        raise ValueError(f'the mesh needs a "ring" dim and a "ulysses" dim after it (size 1 if unused), got {dims}')
    for name in MESH_DIMS:
        degree = getattr(parallelism, f"{name}_degree")
        size = mesh.size(dims.index(name)) if name in dims else 1
        if size != degree and not (name in BATCH_DIMS and degree == 1):
            raise ValueError(f"{name}_degree is {degree}, but the mesh has {size} ranks along {name!r}: {mesh}")
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
    if mesh is None:
        mesh = build_mesh(parallelism, device)
    elif isinstance(mesh, DeviceMesh):
        mesh = adopt_mesh(mesh, parallelism, device)
    for name in ("ring", "ulysses"):
        size, degree = getattr(mesh, name).size, getattr(parallelism, f"{name}_degree")
        if size != degree:
            raise ValueError(f"{name}_degree is {degree}, but the mesh has {size} ranks along {name!r}")
    mesh, attachment = mesh.with_shares(parallelism.shares), _Attachment()
    if mesh.context.size == 1:
        settings = list(_settings(transformer, [], mesh, parallelism, Streams(mesh.context)))
    else:
        plan = plan or plan_of(transformer)
        plan = replace(plan, replicated=plan.replicated.union(replicated))
        splitter = Splitter(plan, mesh.context)
        blocks = blocks_of_plan(transformer, plan)
        _check_caches(blocks)
        settings = list(_settings(transformer, blocks, mesh, parallelism, splitter))
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


@cache
def backend_name(kernel: AttentionBackend) -> AttentionBackendName:
    """Returns the name under which diffusers finds us. Calls without a ContextAttention are local, on `kernel`."""
    # `dispatch_attention_fn` takes members of its enum only, and an enum cannot grow: this is one that is not listed
    # among its members, so that no list of choices in diffusers shows it.
    name = str.__new__(AttentionBackendName, f"context_parallel_{kernel}")
    name._name_ = name._value_ = f"context_parallel_{kernel}"

    def context_parallel(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, _parallel_config: Any = None,
    ) -> Tensor:  # fmt: skip
        if dropout_p or is_causal:
            raise ValueError("dropout and causal attention cannot be split over ranks yet")
        if _parallel_config is None:
            return attend(query, key, value, attn_mask, scale, kernel)
        assert isinstance(_parallel_config, ContextAttention)
        return _parallel_config(query, key, value, attn_mask, scale)

    _AttentionBackendRegistry.register(name)(context_parallel)
    return name


def aware(processor: Any) -> Any:
    """Returns ours for what `processor` does, or `processor` itself where we have none for it."""
    replacement = _REPLACEMENTS.get(type(processor))
    return processor if replacement is None else replacement()


class Aware:
    """Has the attributes that `attach` sets on a processor, and calls the attention that they select."""

    _attention_backend: AttentionBackendName | None = None
    _parallel_config: ContextAttention | None = None

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Takes [B, tokens, H, D] of each; returns [B, tokens, H D]."""
        settings: Any = {"backend": self._attention_backend, "parallel_config": self._parallel_config}
        return dispatch_attention_fn(query, key, value, **options, **settings).flatten(2)


class JointAttention(Aware):
    """Replaces JointAttnProcessor2_0, of SD3, and HunyuanVideo15AttnProcessor2_0: attends over image tokens, and text
    tokens after them where there are any, of which a mask may hide some as keys.

    diffusers also masks the keys of hidden queries, by a mask of all pairs of tokens. Nothing reads those outputs, so a
    mask of keys suffices."""

    def __call__(
        self, attn: Attention, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None, image_rotary_emb: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        query, key, value = _heads(attn, hidden_states, (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k))
        if image_rotary_emb is not None:
            rotate: Any = partial(apply_rotary_emb, freqs_cis=image_rotary_emb, sequence_dim=1)
            query, key = rotate(query), rotate(key)
        if encoder_hidden_states is None:
            return _out(attn, self._attend(query, key, value))
        projections = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        text = _heads(attn, encoder_hidden_states, projections, (attn.norm_added_q, attn.norm_added_k))
        pairs = zip((query, key, value), text, strict=True)
        image_tokens, text_tokens = hidden_states.shape[1], encoder_hidden_states.shape[1]
        mask = None
        if attention_mask is not None:
            mask = nn.functional.pad(attention_mask.bool(), (image_tokens, 0), value=True)[:, None, None, :]
        out = self._attend(*(torch.cat(pair, dim=1) for pair in pairs), attn_mask=mask)
        of_image, of_text = out.split([image_tokens, text_tokens], dim=1)
        return _out(attn, of_image), of_text if attn.context_pre_only else attn.to_add_out(of_text)


class GroupedAttention(Aware):
    """Replaces Lumina2AttnProcessor2_0: self-attention with rotary positions, several query heads to a key head."""

    def __call__(
        self, attn: Attention, hidden_states: Tensor, encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None, image_rotary_emb: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert encoder_hidden_states is hidden_states
        projections = (attn.to_q, attn.to_k, attn.to_v)
        query, key, value = _heads(attn, hidden_states, projections, (attn.norm_q, attn.norm_k))
        if image_rotary_emb is not None:
            rotate: Any = partial(apply_rotary_emb, freqs_cis=image_rotary_emb, use_real=False)
            query, key = rotate(query), rotate(key)
        query, key = query.to(value.dtype), key.to(value.dtype)
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        grouped = key.shape[2] != query.shape[2]
        return _out(attn, self._attend(query, key, value, attn_mask=mask, scale=attn.scale, enable_gqa=grouped))


def _heads(attn: Attention, tokens: Tensor, projections: Iterable[Any], norms: Iterable[Any]) -> list[Tensor]:
    """Returns query, key and value of `tokens`, [B, tokens, heads, head size], normed where there are norms."""
    size = attn.inner_dim // attn.heads
    query, key, value = (project(tokens).unflatten(-1, (-1, size)) for project in projections)
    return [*(x if norm is None else norm(x) for x, norm in zip((query, key), norms, strict=True)), value]


def _out(attn: Attention, tokens: Tensor) -> Tensor:
    projection, dropout = attn.to_out
    return dropout(projection(tokens))


_REPLACEMENTS: dict[type, type] = {
    HunyuanVideo15AttnProcessor2_0: JointAttention,
    JointAttnProcessor2_0: JointAttention,
    Lumina2AttnProcessor2_0: GroupedAttention,
}
