"""Makes a UNet of ComfyUI's, or a network of Stable Cascade, context parallel: its own forward runs on this rank's rows
of the latent.

Convolutions and group norms are handled in the functions that their modules call, attention by ComfyUI's override. All
other layers see only this rank's rows. Where a latent has too few rows for the ranks, or a patch makes a picture of no
level's size, every rank computes that evaluation in full, by itself. A UNet's ControlNet runs on the same rows, and
returns only this rank's rows of each residual, which the UNet expects."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Size, Tensor, nn

from ...architectures.row_plan import CascadeRowPlan, ControlRowPlan, RowPlan
from ...architectures.split_plan import TEXT, Cross
from ...loading.random_states import random_states, set_random_states
from ...specs import Parallelism
from ..attention.attention_override import OVERRIDE, AttentionOverride, backend_override, wrap_modules
from ..comm.collectives import all_gather_v, shared_input_scales
from ..comm.mesh import ContextMesh
from . import functions
from .functions import Handlers, RowFunctions
from .levels import FullPatches, Levels, LevelTokens, NoLevel, levels_of

ATTENTION = "comfy.ldm.modules.attention"
Forward = Callable[..., Any]
ControlResiduals = dict[str, list[Any]]  # by kind; None for a block that has none


class RowDivision(ExitStack):
    """The replaced forwards of one network, which closing it restores, and the state of its forward in progress."""

    def __init__(self, network: nn.Module, plan: RowPlan, mesh: ContextMesh, parallelism: Parallelism) -> None:
        super().__init__()
        self._plan = plan
        self.depth = plan.depth(network)  # how often the network halves its picture
        self._signature = inspect.signature(getattr(network, plan.forward))
        self._mesh = mesh
        self._backend = parallelism.options.attention_backend
        self._collects_tokens = parallelism.options.rotate_method == "tokens"
        self._known: dict[Size, Levels | None] = {}  # recorded graphs read their tensors
        self._levels: Levels | None = None  # of the forward in progress; None where it sees full tensors
        self._tokens = LevelTokens(mesh.context)
        self._override = AttentionOverride(self._tokens, mesh, parallelism)
        self._local = self._override.scope_index("local")
        self._across = self._override.scope_index([(str(level),) for level in range(self.depth + 1)])
        self._patches = FullPatches(self.undivided)
        self._handlers = HANDLERS
        with ExitStack() as undo:  # half parallel, it would refuse every other plan
            undo.callback(self.close)
            self._replace(network, plan.forward, partial(self._forward, getattr(network, plan.forward)))
            for name, module in network.named_modules():
                self._adopt(name, module)
            self.enter_context(shared_input_scales(network, mesh.context))
            self.enter_context(wrap_modules((ATTENTION,), self._override))
            undo.pop_all()

    def _replace(self, module: nn.Module, name: str, forward: Forward) -> None:
        setattr(module, name, forward)
        self.callback(delattr, module, name)

    def _adopt(self, name: str, module: nn.Module) -> None:
        plan, (below, _, last_name) = self._plan, name.rpartition(".")
        if last_name in plan.attends + plan.local:
            local = not plan.attends_across(name) or getattr(module, "disable_self_attn", False)
            self._replace(module, "forward", partial(self._attend, local, module.forward))
        elif below.rpartition(".")[2] in plan.local_below:
            self.enter_context(module.register_forward_pre_hook(partial(self._set_over_time, True)))
            self.enter_context(module.register_forward_hook(partial(self._set_over_time, False), always_call=True))
        elif isinstance(module, nn.Sequential) and _is_normed_convolution(list(module)):
            self._replace(module, "forward", partial(self._normed_convolution, module.forward, list(module)))
        else:
            size = getattr(module, "kernel_size", 1)  # the convolution of ComfyUI's Control-LoRA is none of torch's
            size = size if isinstance(size, int) else max(size[-2:])
            if isinstance(module, nn.GroupNorm) or size > 1 or type(module).__name__ in plan.across_classes:
                self._replace(module, "forward", partial(self._across_rows, module.forward))

    def _forward(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Replaces the network's forward; [B, C, H, W] in and out."""
        call = self._signature.bind(*args, **kwargs)
        arguments, x = call.arguments, call.arguments["x"]
        options = dict(arguments.get("transformer_options") or {})
        is_full = any(arguments.get(name) is not None for name in self._plan.refused_split)
        if not is_full and (levels := self.levels_of(x.shape)) is not None:
            # A patch may draw noise before it makes a picture of no level: then all is computed again, in full.
            is_patched = options.get("patches") or options.get("patches_replace")
            before = random_states(x.device) if is_patched else None
            with self._dividing(levels, options.get(OVERRIDE)):
                local_options = options | self._patches.of(options, levels, list(x.shape)) | {OVERRIDE: self._override}
                call.arguments = arguments | self._split(arguments, levels) | {"transformer_options": local_options}
                levels.source[:] = [call.arguments["x"], x]
                try:
                    return levels.gather(forward(*call.args, **call.kwargs))
                except NoLevel:  # on all ranks, whose patches saw the same
                    if before is None:
                        raise
            set_random_states(before, x.device)
            if control := arguments.get("control"):
                gathered = {
                    kind: [levels.gather(x) if isinstance(x, Tensor) and levels.is_level(x) else x for x in residuals]
                    for kind, residuals in control.items()
                }
                arguments = arguments | {"control": gathered}
        if self._backend != "auto":
            options = {OVERRIDE: backend_override(self._backend), **options}
        call.arguments = arguments | {"transformer_options": options}
        return forward(*call.args, **call.kwargs)

    def _split(self, arguments: dict[str, Any], levels: Levels) -> dict[str, Any]:
        """Returns those of the network's `arguments` of which it gets this rank's rows."""
        control = arguments.get("control")
        return {"x": levels.split(arguments["x"]), "control": control and split_residuals(control, levels)}

    def levels_of(self, shape: Size) -> Levels | None:
        """Returns the levels of a latent [B, C, H, W] of this shape; None where every rank computes it in full."""
        if shape not in self._known:
            only_multiples, ranks = self._plan.only_multiples, self._mesh.context
            self._known[shape] = levels_of(shape, self.depth, ranks, only_multiples=only_multiples)
        return self._known[shape]

    @contextmanager
    def _dividing(self, levels: Levels, previous: Any) -> Iterator[None]:
        self._override.begin(previous)
        self._levels = levels
        self._tokens.begin(levels)
        try:
            yield
        finally:
            self._override.end()
            self._tokens.begin(None)
            levels.source.clear()
            self._levels = None

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Layers and attentions in this context see full tensors."""
        levels, self._levels = self._levels, None
        try:
            with self._override.undivided():
                yield
        finally:
            self._levels = levels

    def _attend(self, local: bool, forward: Forward, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        local = local or self._levels is None or self._patches.has_full_tokens
        if self._collects_tokens and not local and self._levels is not None and kwargs.get("context") is None:
            kwargs["context"], local = self._levels.gather_flat(x), True
        self._override.active_scopes.append(self._local if local else self._across)
        try:
            return forward(x, *args, **kwargs)
        finally:
            self._override.active_scopes.pop()

    def _set_over_time(self, now: bool, *_: Any) -> None:
        self._patches.over_time = now

    def _across_rows(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Computes a module with functions that read other ranks' rows."""
        if self._levels is None:
            return forward(*args, **kwargs)
        with RowFunctions(self._levels, self._handlers):
            return forward(*args, **kwargs)

    def _normed_convolution(self, forward: Forward, layers: list[nn.Module], x: Tensor) -> Tensor:
        """Computes a group norm, elementwise layers, and a convolution of 3 x 3 pixels, of this rank's rows and one
        more at each side, which travel with the norm's statistics."""
        if (levels := self._levels) is None:
            return forward(x)
        norm, *between, convolution = layers
        try:
            self._handlers = WITH_EDGES
            x = norm(x)
            for layer in between:
                x = layer(x)
            if levels.index == 0:
                x.narrow(levels.dim, 0, 1).zero_()
            if levels.index == levels.ranks.size - 1:
                x.narrow(levels.dim, x.shape[levels.dim] - 1, 1).zero_()
            self._handlers = OF_EDGES
            return convolution(x)
        finally:
            self._handlers = HANDLERS


class CascadeDivision(RowDivision):
    """Divides a network of Stable Cascade: attentions have the text's keys too, and it resizes pictures."""

    _plan: CascadeRowPlan

    def __init__(self, network: nn.Module, plan: CascadeRowPlan, mesh: ContextMesh, parallelism: Parallelism) -> None:
        super().__init__(network, plan, mesh, parallelism)
        self._first = plan.first(network)
        levels = [(str(level),) for level in range(self.depth + 1)]
        self._across = self._override.scope_index([Cross(queries=level, keys=(*level, *TEXT)) for level in levels])

    def _split(self, arguments: dict[str, Any], levels: Levels) -> dict[str, Any]:
        resized = arguments.keys() & self._plan.resized
        split: dict[str, Any] = {name: self._resized(arguments[name], levels) for name in resized}
        if control := arguments.get("control"):
            split["control"] = {
                kind: [None if each is None else self._resized(each, levels) for each in residuals]
                for kind, residuals in control.items()
            }
        return {"x": levels.split(arguments["x"]), **split}

    def _resized(self, picture: Tensor, levels: Levels) -> Tensor:
        """Returns this rank's rows of `picture`, resized as the network does."""
        size = levels.plane(self._first, sum(levels.sizes[self._first]))
        return levels.split(F.interpolate(picture, size=size, mode="bilinear", align_corners=True))

    def _attend(self, local: bool, forward: Forward, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attends to the text, and with `self_attn` to the picture's keys before it."""
        keys, levels = args[0], self._levels
        local = local or levels is None or not kwargs.get("self_attn", False)
        if levels is not None and not local:
            self._tokens.record_length(TEXT[0], keys.shape[1], "the text")
            if self._collects_tokens:
                tokens = levels.gather_flat(x.flatten(2).transpose(1, 2))
                args, local = (torch.cat([tokens, keys], 1), *args[1:]), True
                kwargs["self_attn"] = False
        return super()._attend(local, forward, x, *args, **kwargs)


def split_residuals(control: ControlResiduals, levels: Levels) -> ControlResiduals:
    """Returns this rank's rows of the residuals of a ControlNet or T2I adapter, by kind; those of a divided ControlNet
    are so already. ComfyUI does not apply residuals of no level's size."""
    return {
        kind: [levels.split(x) if isinstance(x, Tensor) and levels.is_full(x) else x for x in residuals]
        for kind, residuals in control.items()
    }


def _is_normed_convolution(layers: list[nn.Module]) -> bool:
    if len(layers) < 2 or not isinstance(layers[0], nn.GroupNorm):
        return False
    *between, last = layers[1:]
    if not isinstance(last, nn.Conv2d | nn.Conv3d) or not all(isinstance(x, nn.SiLU | nn.Dropout) for x in between):
        return False
    shape = (last.kernel_size, last.padding, last.stride, last.dilation)
    return [size[-2:] for size in shape] == [(3, 3), (1, 1), (1, 1), (1, 1)]


HANDLERS: Handlers = {
    F.conv2d: functions.convolution,
    F.conv3d: functions.convolution,
    torch.cudnn_convolution: functions.cudnn_convolution,
    F.group_norm: functions.group_norm,
    F.avg_pool2d: functions.pool,
    torch.norm: functions.norm,
}
WITH_EDGES: Handlers = {F.group_norm: functions.group_norm_with_edges}
OF_EDGES: Handlers = {
    F.conv2d: functions.convolution_with_edges,
    F.conv3d: functions.convolution_with_edges,
    torch.cudnn_convolution: functions.refuse,
}


class ControlRowDivision(RowDivision):
    """The replaced forwards of one ControlNet's network, and the state of its forward in progress."""

    _plan: ControlRowPlan
    _unet: RowDivision
    _hint_levels: dict[Levels, Levels]  # by those of the latent

    def return_residuals_to(self, consumer: RowDivision) -> None:
        """Has this network compute the rows that `consumer`, the UNet, has."""
        self._unet, self._hint_levels = consumer, {}

    def _adopt(self, name: str, module: nn.Module) -> None:
        if name.rpartition(".")[2] in self._plan.averaged:
            self.enter_context(module.register_forward_pre_hook(self._mean_of_all))
        else:
            super()._adopt(name, module)

    def _forward(  # type: ignore[override]  # its network is always given a hint
        self, forward: Forward, x: Tensor, hint: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Replaces the network's forward; full pictures in, this rank's rows of its residuals out."""
        of_latent = self._unet.levels_of(x.shape)
        if of_latent is None:
            return forward(x, hint, *args, **kwargs)
        levels = self._with_hint(of_latent)
        if not levels.is_full(hint):
            return split_residuals(forward(x, hint, *args, **kwargs), of_latent)
        with self._dividing(levels, None):
            return forward(levels.split(x), levels.split(hint), *args, **kwargs)

    def _attend(self, local: bool, forward: Forward, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Gives an attention the override: ComfyUI gives a ControlNet no transformer_options."""
        if self._levels is not None:
            kwargs["transformer_options"] = {**kwargs.get("transformer_options", {}), OVERRIDE: self._override}
        return super()._attend(local, forward, x, *args, **kwargs)

    def _with_hint(self, of_latent: Levels) -> Levels:
        """Returns the levels of the hint's picture, of which the last are those of the latent."""
        if of_latent not in self._hint_levels:
            finer = 2**self._plan.hint_halvings
            rows, across = of_latent.rows * finer, of_latent.across * finer
            depth = of_latent.depth + self._plan.hint_halvings
            self._hint_levels[of_latent] = replace(of_latent, rows=rows, across=across, depth=depth, source=[])
        return self._hint_levels[of_latent]

    def _mean_of_all(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Replaces means [B, items, C] over this rank's rows of the latent by means over all rows."""
        if (levels := self._levels) is None:
            return None
        rows = levels.sizes[self._plan.hint_halvings]
        means = all_gather_v(args[0].float()[None], [1] * len(rows), levels.ranks)
        shares = torch.tensor([each / sum(rows) for each in rows], device=means.device)
        return (torch.tensordot(shares, means, 1).to(args[0]), *args[1:])
