"""Makes ComfyUI's own network context parallel as its plan says: by rows of the picture where that is a RowPlan, else
by tokens, with hooks at its blocks' inputs and outputs.

All names of a network are the plan's. Imports no ComfyUI."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..accelerators import FALLBACK
from ..architectures.block_patches import INSIDE, needs_full_tokens
from ..architectures.network_modules import preferred_attentions
from ..architectures.row_plan import CascadeRowPlan, ControlRowPlan, RowPlan
from ..architectures.split_plan import HeadFunction, HeadProducer, ModulePlan, SplitPlan
from ..errors import Refused, Unsplittable
from ..specs import Parallelism
from .attention.attention_override import OVERRIDE, AttentionOverride, by_heads, wrap_modules
from .comm.collectives import any_rank, shared_input_scales
from .comm.mesh import ContextMesh
from .rows.row_division import CascadeDivision, ControlRowDivision, RowDivision
from .split.hooks import Args, Block, Kwargs, Replaced, add_hooks, blocks_of_plan, run_on_frames, with_all_tokens
from .split.splitter import Residuals, Splitter
from .split.streams import PARALLELIZED, PipeFusion, TurnEnded, chunk_range

T = TypeVar("T")
Function = Callable[..., Tensor]

MAY_SKIP = "may_skip"  # an attribute of a block, or of its forward, that need not compute it
_OPTIONS = "transformer_options"
_BY_ROWS: dict[type[SplitPlan], Callable[..., Any]] = {
    RowPlan: RowDivision,
    CascadeRowPlan: CascadeDivision,
    ControlRowPlan: ControlRowDivision,
}


def parallelize(network: nn.Module, plan: SplitPlan, mesh: ContextMesh, parallelism: Parallelism) -> None:
    """Runs every later forward of `network` over the context ranks of `mesh`. Collective, as its forwards are.

    Each rank passes full inputs and gets the full output, equal to what one rank computes. Raises ValueError, and
    changes nothing, when it is parallel already or when plan and network do not fit. A forward raises Refused for
    arguments that the plan does not name."""
    if hasattr(network, PARALLELIZED):
        raise ValueError(f"this {type(network).__name__} is parallel already; unparallelize it first")
    division = _BY_ROWS.get(type(plan), _TokenDivision)
    setattr(network, PARALLELIZED, division(network, plan, mesh, parallelism))


def parallelize_control(
    control: nn.Module, plan: SplitPlan, network: nn.Module, mesh: ContextMesh, parallelism: Parallelism
) -> None:
    """Runs every later forward of the ControlNet's network `control` over the context ranks of `mesh`. Collective.

    It returns this rank's part of each residual; full residuals for a latent that `network`, a UNet, computes in full.
    `network`, which is parallel over the same ranks, takes these until `control` is unparallelized."""
    parallelize(control, plan, mesh, parallelism)
    getattr(control, PARALLELIZED).return_residuals_to(getattr(network, PARALLELIZED))


def unparallelize(network: nn.Module) -> None:
    """Undoes `parallelize`; ValueError if `network` is not parallel."""
    if not hasattr(network, PARALLELIZED):
        raise ValueError(f"this {type(network).__name__} is not parallel")
    getattr(network, PARALLELIZED).close()
    delattr(network, PARALLELIZED)


class _TokenDivision(ExitStack):
    """The hooks of one network, which closing it removes, and the state of its forward in progress."""

    def __init__(self, network: nn.Module, plan: SplitPlan, mesh: ContextMesh, parallelism: Parallelism) -> None:
        super().__init__()
        patches = parallelism.options.token_patches
        pipefusion = PipeFusion(patches, plan.main_stream) if patches > 1 else None
        self.streams = Splitter(plan, mesh.context, pipefusion)
        self._plan = plan
        self._ranks = mesh.context
        self._override = AttentionOverride(self.streams, mesh, parallelism)
        self._heads = HeadAttention(self.streams, self._override, mesh)
        self._split_calls: list[int] = []  # before each of the blocks in progress
        if plan.ulysses_only and mesh.ring.size > 1:
            raise Refused("ring.node", widget="ring_degree", ring=mesh.ring.size, attention=plan.ulysses_only)
        self._residual_tokens: int | None = None  # the full length of residuals that are split; None: they are full
        self._residual_consumer: _TokenDivision | None = None
        parameters = inspect.signature(type(network).forward).parameters.values()
        self._takes_options = any(one.name == _OPTIONS or one.kind is one.VAR_KEYWORD for one in parameters)
        with ExitStack() as undo:  # half parallel, it would refuse every other plan
            undo.callback(self.close)
            blocks = blocks_of_plan(network, plan)
            self.enter_context(network.register_forward_pre_hook(self._begin, with_kwargs=True))
            for block in blocks:
                self._hook(block)
            for name in filter(partial(hasattr, network), plan.agreed):
                self._agree(network, name)
            for module, function in preferred_attentions(network).items():
                self._replace(module, _scoped(module.forward, self._override.preferred, function))
            if pipefusion is not None:
                self._replace(network, partial(self._forward_by_patch, pipefusion, network.forward))
            self.enter_context(shared_input_scales(network, mesh.context))
            self.enter_context(network.register_forward_hook(self._end, always_call=True))
            self.enter_context(wrap_modules(plan.no_options, self._override))
            undo.pop_all()

    def return_residuals_to(self, consumer: _TokenDivision) -> None:
        """Tells `consumer` of what length the residuals are that this network returns a part of."""
        self._residual_consumer = consumer
        self.callback(setattr, consumer, "_residual_tokens", None)

    def _replace(self, module: nn.Module, function: Callable[..., Any], name: str = "forward") -> None:
        setattr(module, name, function)
        self.callback(vars(module).pop, name, None)  # it may have been replaced twice

    def _agree(self, network: nn.Module, name: str) -> None:
        method = getattr(network, name)

        def agreed(*args: Any, **kwargs: Any) -> tuple[Any, bool]:
            kept, complete = method(*args, **kwargs)
            lacking = any_rank(kept is None, dim=self._ranks)
            incomplete = any_rank(not complete, dim=self._ranks)
            return (None, False) if lacking else (kept, not incomplete)

        self._replace(network, agreed, name)

    def _hook(self, block: Block) -> None:
        plan = block.module_plan
        if plan.method != "forward":
            members = vars(vars(block.module)["owner"])
            members[plan.method] = block.module
            self.callback(members.pop, plan.method)
        if self.streams.pipefusion is not None and block.scopes:
            self.enter_context(block.module.register_forward_pre_hook(self.streams.pipefusion.enter_block))
        for module, over in block.scopes:
            scope = self._override.scope_index(over)
            if module is block.module:
                self.enter_context(module.register_forward_pre_hook(partial(self._enter, scope)))
                self.enter_context(module.register_forward_hook(self._leave, always_call=True))
            else:
                self._replace(module, _scoped(module.forward, self._override.active_scopes, scope))
        if (frames := plan.frames) is not None:
            self._replace(block.module, partial(run_on_frames, block, frames, self.streams, block.module.forward))
        for name, function in plan.token_functions.items():
            module, stream = block.module.get_submodule(name), self._plan.main_stream
            self._replace(module, with_all_tokens(module.forward, function, stream, self.streams, self._ranks))
        self._divide_functions(block)
        for handle in add_hooks(block, self.streams):
            self.enter_context(handle)
        if plan.split_args and plan.attends_to_split and not plan.token_functions:
            self.enter_context(block.module.register_forward_pre_hook(self._begin_block))
            self.enter_context(block.module.register_forward_hook(partial(self._end_block, plan)))

    def _divide_functions(self, block: Block) -> None:
        for name, spec in block.module_plan.head_functions.items():
            path, _, last = name.rpartition(".")
            if name in block.parameters:
                hook = partial(_with_argument, block, name, partial(self._heads.divided, spec=spec))
                self.enter_context(block.module.register_forward_pre_hook(hook, with_kwargs=True))
                continue
            module = block.module.get_submodule(path)
            if last == "scaled_dot_product_attention":  # torch's
                self._replace(module, self._heads.with_torchs(module.forward, spec))
            else:
                self._replace(module, self._heads.divided(getattr(module, last), spec), last)
        for name, producer in block.module_plan.head_producers.items():
            hook = partial(self._divide_producer, block, name, producer)
            self.enter_context(block.module.register_forward_pre_hook(hook, with_kwargs=True))

    def _divide_producer(
        self, block: Block, name: str, spec: HeadProducer, module: nn.Module, args: Args, kwargs: Kwargs
    ) -> Any:
        arguments = block.arguments_by_name(args, kwargs)
        if arguments.get(name) is None:
            return None
        divided = partial(self._heads.produced, module, spec, arguments[spec.full])
        return _with_argument(block, name, divided, module, args, kwargs)

    def _begin_block(self, *_: Any) -> None:
        self._split_calls.append(self._override.split_calls)

    def _end_block(self, plan: ModulePlan, block: nn.Module, *_: Any) -> None:
        attended = self._split_calls.pop() < self._override.split_calls  # else to this rank's tokens alone
        if not attended and not any(getattr(each, MAY_SKIP, False) for each in (block, block.forward)):
            name = f"{type(block).__name__} ({plan.name})"
            raise Unsplittable(f"the attention of {name} did not run on the workers' split tokens")

    def _begin(self, network: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        self._clear()
        options = dict(kwargs.get(_OPTIONS) or {})
        previous = options.get(OVERRIDE)
        self._override.begin(previous)
        self.streams.full_between_blocks = needs_full_tokens(options)
        self.streams.has_block_patches = any((options.get("patches") or {}).get(kind) for kind in INSIDE)
        options[OVERRIDE] = self._override
        if self._takes_options:
            kwargs[_OPTIONS] = options
        if control := kwargs.get("control"):
            kinds = {kind for kind, residuals in control.items() if residuals}
            # The network adds other kinds where the plan has full tokens.
            self.streams.full_between_blocks |= bool(kinds - set(self._plan.residuals))
            main, tokens = self._plan.main_stream, self._residual_tokens
            given = ((kind, residuals) for kind, residuals in control.items() if residuals is not None)
            kwargs["control"] = {kind: Residuals(each, self.streams, main, tokens) for kind, each in given}
        if self.streams.pipefusion is not None and (self.streams.full_between_blocks or self.streams.has_block_patches):
            raise Refused("patches.nodes", widget="patches")
        return args, kwargs

    def _forward_by_patch(self, pipefusion: PipeFusion, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the network's `forward` once for each token patch; the last call returns the full output."""
        options, out = kwargs.pop("transformer_options"), None
        # An evaluation is known within a step by its prompts, and by the shapes of its arguments.
        arguments = {name: value for name, value in kwargs.items() if name != "control"}
        shapes = tuple(leaf.shape for leaf in tree_leaves((args, arguments)) if isinstance(leaf, Tensor))
        key = (*options.get("cond_or_uncond", ()), *options.get("uuids", ()), shapes)
        for _ in pipefusion.turns(key, self.streams.lengths):
            self.streams.restart()
            self._override.active_scopes.clear()
            with suppress(TurnEnded):
                out = forward(*args, **kwargs, transformer_options=dict(options))
        return out

    def _end(self, network: nn.Module, _: Any, output: Any) -> None:
        unfinished = self._plan.main_stream in self.streams.split_streams and self._residual_consumer is None
        if self._residual_consumer is not None and output is not None:
            self._residual_consumer._residual_tokens = self.streams.length(self._plan.main_stream)
        self._clear()
        if output is not None and unfinished:  # None: it raised
            raise Unsplittable(f"the tokens of {type(network).__name__} were not gathered after its blocks")

    def _clear(self) -> None:
        self.streams.clear()
        self._override.end()
        self._split_calls.clear()

    def _enter(self, scope: int, *_: Any) -> None:
        self._override.active_scopes.append(scope)

    def _leave(self, *_: Any) -> None:
        if self._override.active_scopes:
            self._override.active_scopes.pop()


def _with_argument(
    block: Block, name: str, replacement: Callable[[Any], Any], _: nn.Module, args: Args, kwargs: Kwargs
) -> Any:
    """Replaces one argument of a call of `block`."""
    if name in kwargs:
        return args, {**kwargs, name: replacement(kwargs[name])}
    at = block.parameters.index(name)
    return (*args[:at], replacement(args[at]), *args[at + 1 :]), kwargs


def _scoped(forward: Callable[..., Any], scopes: list[T], scope: T) -> Callable[..., Any]:
    """Returns `forward` with `scope` as the innermost one while it runs."""

    # A hook inside a block, or a partial in this function's place, would make torch.compile compile each block anew.
    def scoped(*args: Any, **kwargs: Any) -> Any:
        scopes.append(scope)
        try:
            return forward(*args, **kwargs)
        finally:
            scopes.pop()

    return scoped


class HeadAttention:
    """Divides attention functions of a network's own, which know no ranks, over those of `mesh`.

    A block is given such a function, has it as a method, or calls torch's. After an all-to-all a rank has every token
    of its heads, as one process has of all heads, so the function is called once and as it is: with the masks, segments
    and kept keys that it closes over. With more ranks than heads, a rank without heads calls it with one head of zeros.
    """

    def __init__(self, streams: Splitter, override: AttentionOverride, mesh: ContextMesh) -> None:
        self._streams, self._override, self._mesh = streams, override, mesh

    def divided(self, function: Function, spec: HeadFunction) -> Function:
        return torch.compiler.disable(partial(self._attend, function, spec))

    def with_torchs(self, forward: Callable[..., Any], spec: HeadFunction) -> Callable[..., Any]:
        """Returns `forward` with every call of torch's attention in it divided."""

        @torch.compiler.disable
        def run(*args: Any, **kwargs: Any) -> Any:
            with Replaced(F.scaled_dot_product_attention, self.divided(F.scaled_dot_product_attention, spec)):
                return forward(*args, **kwargs)

        return run

    def produced(self, owner: nn.Module, spec: HeadProducer, full: Any, function: Function) -> Function:
        """Returns `function`, which attends in the place of a module of `owner`, for this rank's tokens."""
        if self._mesh.ring.size > 1:
            raise self._override.has_no_lse(function)
        module: Any = owner.get_submodule(spec.module)
        layers = [getattr(module, spec.qkv), *filter(None, [getattr(module, spec.gate, None)])]

        @torch.compiler.disable
        def attend(hidden: Tensor, **more: Any) -> Tensor:
            size = module.head_dim
            given = [part.unflatten(-1, (-1, size))[None] for part in layers[0](hidden).chunk(3, -1)]
            if gates := [layer(hidden).unflatten(-1, (-1, size))[None] for layer in layers[1:]]:
                beside = [gates[0], *map(torch.zeros_like, given[1:])]
                given = [torch.cat(pair, 3) for pair in zip(given, beside, strict=True)]

            def call(*tensors: Any) -> Tensor:
                parts = [tensor[..., :size] for tensor in tensors[:3]]
                parts += [tensors[0][..., size:]] * bool(gates)
                rows = torch.cat([part[0].flatten(1) for part in parts], 1)
                vars(owner)[spec.module] = _OwnHeads(module, spec, tensors[0].shape[2])
                try:
                    with self._override.undivided():
                        out = function(rows, **{**more, spec.full: full})
                finally:
                    del vars(owner)[spec.module]
                return F.pad(out.unflatten(1, (-1, size))[None], (0, tensors[0].shape[3] - size))

            out = self._override.across(self._streams.call_streams, call, FALLBACK, in_order=True, max_chunks=1)(*given)
            return getattr(module, spec.out)(out[0, ..., :size].flatten(1))

        return attend

    def _attend(
        self, function: Function, spec: HeadFunction, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any
    ) -> Tensor:
        if not self._streams.any_split:
            return function(query, key, value, *args, **more)
        first_dim, four = 1 if spec.heads_first else 2, query.ndim == 4
        heads: int = query.shape[first_dim] if four else more["heads"] if "heads" in more else args[0]
        size = query.shape[-1] if four else query.shape[-1] // heads
        start, own = chunk_range(heads, self._mesh.ulysses.parts, self._mesh.ulysses.index)
        flat: list[bool] = []

        def call(*tensors: Any) -> Tensor:
            if four:
                given = [x.transpose(1, 2) if spec.heads_first else x for x in tensors[:3]]
            else:
                given = [x.flatten(2) for x in tensors[:3]]
            rest, named = _of_heads(args, more, heads, start, tensors[0].shape[2])
            with self._override.undivided():
                out = function(*given, *rest, **named)
            flat.append(out.ndim == 3)
            return by_heads(out, size, spec.heads_first and out.ndim == 4)

        over = spec.streams or self._streams.call_streams
        attention = self._override.across(over, call, FALLBACK, in_order=True, max_chunks=1)
        q, k, v = (by_heads(x, size, spec.heads_first and four) for x in (query, key, value))
        out = attention(q, k, v)
        # A rank without heads has called nothing yet, and has to know the shape that the function returns.
        if not own:
            streams = attention.query_streams, attention.key_streams, attention.key_streams
            call(*(query.new_zeros(len(q), self._streams.total(names), 1, size) for names in streams))
        if flat[0]:
            return out.flatten(2)
        return out.transpose(1, 2) if spec.heads_first else out


def _of_heads(args: Args, more: Kwargs, heads: int, start: int, own: int) -> tuple[Args, Kwargs]:
    """Returns the arguments after queries, keys and values for `own` of all `heads`."""

    def narrowed(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim != 4 or value.shape[1] != heads or heads == 1:
            return value
        return value.narrow(1, min(start, heads - own), own)

    if args and type(args[0]) is int:
        args = own, *args[1:]
    if "heads" in more:
        more = {**more, "heads": own}
    return tuple(map(narrowed, args)), {name: narrowed(value) for name, value in more.items()}


class _OwnHeads:
    """An attention module of `heads` of its heads, whose projections are made: its layers only tell them apart."""

    def __init__(self, module: Any, spec: HeadProducer, heads: int) -> None:
        self._module, self.heads = module, heads
        projected = 3 * heads * module.head_dim
        gate = getattr(module, spec.gate, None)
        setattr(self, spec.qkv, lambda rows: rows[..., :projected])
        setattr(self, spec.gate, None if gate is None else lambda rows: rows[..., projected:])
        setattr(self, spec.out, lambda rows: rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
