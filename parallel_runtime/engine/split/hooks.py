"""A split plan in a network: its modules, hooks that split their arguments and gather their outputs, and functions of
torch that read other ranks' tokens without attention (sums over tokens, and convolutions along them).

The hooks run outside of whatever wraps a module's forward (offloading, caching), in any order of attaching. Modules
that reshape their tokens by frames receive this rank's tokens padded to full frames, each with its own keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, wraps
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ...architectures import split_plan as plans
from ...architectures.block_patches import goes_by_frames
from ...architectures.network_modules import modules_of
from ...errors import Unsplittable
from ..comm.collectives import all_gather_v
from ..comm.mesh import MeshDim
from .splitter import Splitter
from .streams import Streams

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Replaced(TorchFunctionMode):
    """Within this context calls `replacement` in the place of a function of torch, `once` or always."""

    def __init__(self, function: Any, replacement: Callable[..., Any], *, once: bool = False) -> None:
        super().__init__()
        self._function, self._replacement, self._once = function, replacement, once

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not self._function:
            return func(*args, **(kwargs or {}))
        if self._once:
            self._function = None
        return self._replacement(*args, **(kwargs or {}))


def with_all_tokens(
    forward: Callable[..., Any], function: plans.TokenFunction, stream: str, streams: Streams, ranks: MeshDim
) -> Callable[..., Any]:
    """Returns a module's forward whose first `function` takes the tokens of `stream` of all ranks into account."""
    torchs, handler = (F.conv1d, _convolution) if function == "convolution" else (torch.matmul, _sum)

    @torch.compiler.disable
    def run(*args: Any, **kwargs: Any) -> Any:
        with Replaced(torchs, partial(handler, streams.sizes(stream), ranks), once=True):
            return forward(*args, **kwargs)

    return run


def _sum(sizes: tuple[int, ...], ranks: MeshDim, first: Tensor, second: Tensor) -> Tensor:
    """Returns the product of [..., M, local tokens] and [..., local tokens, N], summed over all ranks."""
    product = torch.matmul(first, second)
    if not sizes[ranks.index]:  # of a dummy token
        product = torch.zeros_like(product)
    return all_gather_v(product[None], [1] * ranks.size, ranks).sum(0)


def _convolution(
    sizes: tuple[int, ...], ranks: MeshDim, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Computes torch.nn.functional.conv1d of [batch, channels, local tokens] with the tokens next to them."""
    shape = [value if isinstance(value, int) else next(iter(value)) for value in (stride, padding, dilation)]
    if shape != [1, 1, 1] or weight.shape[2] != 3:
        raise Unsplittable(f"a convolution with padding {padding} of a kernel of {weight.shape[2]}")
    edges = torch.stack([x[..., :1], x[..., -1:]])[None]
    by_rank = all_gather_v(edges, [1] * ranks.size, ranks)
    outside, others = torch.zeros_like(x[..., :1]), [rank for rank, size in enumerate(sizes) if size]
    before = [by_rank[rank, 1] for rank in others if rank < ranks.index] or [outside]
    after = [by_rank[rank, 0] for rank in others if rank > ranks.index] or [outside]
    return F.conv1d(torch.cat([before[-1], x, after[0]], 2), weight, bias, 1, 0, 1, groups)


@dataclass(frozen=True, eq=False)
class Block:
    """One module of a ModulePlan. `specs`: argument to (its index among positional ones, how it is split)."""

    module_plan: plans.ModulePlan
    module: nn.Module
    last: bool
    specs: dict[str | int, tuple[int | None, plans.SplitSpec]]
    scopes: list[tuple[nn.Module, plans.AttentionSpecs]]
    parameters: list[str]

    def check_arguments(self, args: Args, kwargs: Kwargs) -> None:
        """Raises Refused for an argument that the plan does not name: ignored, it would make a wrong result."""
        only_counts = all(isinstance(spec, plans.Gather | plans.Count) for _, spec in self.specs.values())
        if only_counts and self.module_plan.frames is None and self.module_plan.tail is None:
            return
        arguments, frames = self.arguments_by_name(args, kwargs), self.module_plan.frames
        framed = set() if frames is None else {frames.tokens, *frames.conditions, frames.until}
        functions = {*self.module_plan.head_functions, *self.module_plan.head_producers}
        whole = {"transformer_options", *self.module_plan.unsplit_args} | functions
        known = self.specs.keys() | whole | framed
        if unknown := [str(name) for name, value in arguments.items() if value is not None and name not in known]:
            name = f"{self.module_plan.name} ({type(self.module).__name__})"
            raise Unsplittable(f"{name} gets {', '.join(unknown)}, which its plan does not name")

    def arguments_by_name(self, args: Args, kwargs: Kwargs) -> dict[Any, Any]:
        """Returns the arguments by name; by index where they have none."""
        return {self.parameters[n] if n < len(self.parameters) else n: value for n, value in enumerate(args)} | kwargs

    def replace_arguments(
        self, args: Args, kwargs: Kwargs, replacement: Callable[[str | int, Any, plans.SplitSpec], Any]
    ) -> tuple[Args, Kwargs]:
        """Returns the call with each argument of the plan replaced by `replacement(name, value, spec)`."""
        positional = list(args)
        for name, (index, spec) in self.specs.items():
            if name in kwargs:
                kwargs[str(name)] = replacement(name, kwargs[str(name)], spec)
            elif index is not None and index < len(positional):
                positional[index] = replacement(name, positional[index], spec)
        return tuple(positional), kwargs

    def hidden_states(self, args: Args, kwargs: Kwargs) -> list[Any]:
        """Returns the hidden states among the arguments, in the plan's order."""
        names = dict(zip(self.module_plan.args, self.specs, strict=True))  # a plan may give a position instead
        arguments = self.arguments_by_name(args, kwargs)
        values = [(arguments.get(names[name]), item) for name, item, _ in self.module_plan.split_args]
        return [value if item is None or value is None else value[item] for value, item in values]


def blocks_of_plan(network: nn.Module, plan: plans.SplitPlan) -> list[Block]:
    """Returns the modules that `plan` names; ValueError where the network lacks one."""
    return [block for module_plan in plan.module_plans for block in blocks_of_module_plan(network, module_plan)]


def blocks_of_module_plan(network: nn.Module, plan: plans.ModulePlan) -> Iterator[Block]:
    modules = modules_of(network, plan)
    if plan.method != "forward":
        modules = [method_module(module, plan.method) for module in modules]
    for module in modules:
        signature = list(inspect.signature(type(module).forward).parameters.values())[1:]
        parameters = [one.name for one in signature if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        open_ended = any(one.kind == one.VAR_KEYWORD for one in signature)
        specs: dict[str | int, tuple[int | None, plans.SplitSpec]] = {}
        for name, spec in plan.args.items():
            if isinstance(name, int):
                specs[parameters[name] if name < len(parameters) else name] = name, spec
            elif name in parameters or open_ended:
                specs[name] = parameters.index(name) if name in parameters else None, spec
            else:
                kind, takes = type(module).__name__, ", ".join(parameters)
                detail = f"the plan names argument {name!r} of {plan.name} ({kind}), whose forward takes {takes}"
                raise ValueError(detail)
        scopes: list[tuple[nn.Module, plans.AttentionSpecs]] = [] if plan.attends is None else [(module, plan.attends)]
        for path, below in module.named_modules():
            over = plan.submodule_attends.get(path)
            if isinstance(over, plans.Window) and not isinstance(over.width, int):  # the name of an attribute
                width = getattr(below, over.width)
                over = over.streams if width is None else replace(over, width=width)
            if over is not None:
                scopes.append((below, over))
        yield Block(plan, module, module is modules[-1], specs, scopes, parameters)


def method_module(owner: nn.Module, method: str) -> nn.Module:
    """Returns a module, for hooks on it, whose call is that of the method of its `owner`."""
    function = getattr(type(owner), method)

    @wraps(function)
    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(owner, *args, **kwargs)

    made: nn.Module = type(type(owner).__name__, (nn.Module,), {"forward": forward})()
    vars(made)["owner"] = owner
    return made


def add_hooks(block: Block, splitter: Splitter) -> list[RemovableHandle]:
    """Splits the arguments of `block`, and gathers its outputs where its plan or the forward asks for it."""
    plan, handles = block.module_plan, list[RemovableHandle]()
    if block.specs:
        split = partial(_split_inputs, block, splitter)
        handles.append(block.module.register_forward_pre_hook(split, with_kwargs=True))
    if plan.outputs or plan.tail is not None:
        handles.append(block.module.register_forward_hook(partial(_gather_outputs, block, splitter)))
    return handles


@torch.compiler.disable
def _split_inputs(block: Block, splitter: Splitter, _: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    block.check_arguments(args, kwargs)
    plan = block.module_plan
    splitter.begin_call(id(block.module))
    if plan.tail is not None:
        arguments = block.arguments_by_name(args, kwargs)
        tokens = next(arguments[name] for name, (_, spec) in block.specs.items() if spec is plan.tail)
        if not splitter.begin_tail(plan.tail, tokens, [arguments[name] for name in plan.tail.ranges]):
            return None
    split = block.replace_arguments(
        args, kwargs, lambda name, value, spec: splitter.split(value, spec, f"{plan.name}({name})")
    )
    splitter.raise_if_incomplete()
    if splitter.has_block_patches and "transformer_options" in kwargs:
        kwargs["transformer_options"] = _local_options(kwargs["transformer_options"], plan, splitter)
    return split


@torch.compiler.disable
def _gather_outputs(block: Block, splitter: Splitter, _: nn.Module, __: Any, output: Any) -> Any:
    plan = block.module_plan
    if plan.tail is not None:
        output = splitter.gather_tail(plan.tail, output, f"output of {plan.name}")
        splitter.raise_if_incomplete()
        return output
    if not (splitter.full_between_blocks or (block.last and plan.gathers) or plan.gathers == "each"):
        return None
    outputs = [output] if isinstance(output, Tensor) else list(output)
    for index, specs in enumerate(plan.outputs):
        where = f"output {index} of {plan.name}"
        spec = specs[0] if len(specs) == 1 else splitter.matching_spec(outputs[index], specs, where)
        spec = splitter.of_call(spec)
        outputs[index] = splitter.gather(outputs[index], spec.streams, spec.dim, where)
    splitter.raise_if_incomplete()
    return outputs[0] if isinstance(output, Tensor) else type(output)(outputs)


def _local_options(options: dict[str, Any], plan: plans.ModulePlan, splitter: Splitter) -> dict[str, Any]:
    """Returns the transformer_options for this rank's tokens: positions in full streams (`img_slice`), and the values
    that a model patch keeps for each token (`model_patch_data`)."""
    local, over = dict(options), plan.attends
    image_range = options.get("img_slice")
    if image_range and isinstance(over, tuple) and image_range[1] == splitter.total(over):
        local["img_slice"] = list(splitter.split([tuple(image_range)], plans.Slices(over), "img_slice")[0])
    if not plan.split_args:
        return local
    (_, _, streams), *_ = plan.split_args

    local["patches"] = {
        kind: [partial(_patch_local_frames, each, splitter, streams) if goes_by_frames(each) else each for each in some]
        for kind, some in options["patches"].items()
    }
    if data := options.get("model_patch_data"):
        local["model_patch_data"] = {
            patch: splitter.split(value, plans.SplitLike(streams), f"model_patch_data of patch {number}")
            for number, (patch, value) in enumerate(data.items())
        }
    return local


def _patch_local_frames(
    patch: Callable[[dict[str, Any]], Tensor], splitter: Splitter, streams: plans.Names, arguments: dict[str, Any]
) -> Tensor:
    """Runs a patch of InfiniteTalk's on the frames of this rank's tokens, each with its own audio."""
    options, total = arguments["transformer_options"], splitter.total(streams)
    frames, *plane = options["grid_sizes"]
    if total != prod(options["grid_sizes"]):
        raise Unsplittable("InfiniteTalk with tokens that belong to no frame")
    part = _LocalFrames.of(splitter, streams[0], total, frames)
    audio = options["audio_embeds"][:, part.first : part.last]
    local = {**options, "grid_sizes": (part.last - part.first, *plane), "audio_embeds": audio}
    return part.unpad(patch({**arguments, "x": part.pad(arguments["x"]), "transformer_options": local}))


@dataclass(frozen=True)
class _LocalFrames:
    """This rank's `tokens` padded to full frames, `first` to `last`, with `padding_before` dummy tokens first."""

    first: int
    last: int
    padding_before: int
    tokens: int
    size: int  # tokens of a frame

    @classmethod
    def of(cls, splitter: Splitter, stream: str, tokens: int, frames: int) -> _LocalFrames:
        """Returns the frames of this rank's part of `stream`, whose first `tokens` are of `frames` frames."""
        start, chunk_tokens = splitter.chunk(stream)
        start = start if chunk_tokens else 0  # a dummy token is a copy of the first
        size = tokens // frames
        end = min(start + splitter.local_count((stream,)), tokens)
        if start >= end:  # no token in any frame: the module still needs one frame
            return cls(first=0, last=1, padding_before=0, tokens=0, size=size)
        first, last = start // size, -(-end // size)
        return cls(first=first, last=last, padding_before=start - first * size, tokens=end - start, size=size)

    @property
    def length(self) -> int:
        return (self.last - self.first) * self.size

    def pad(self, local: Tensor) -> Tensor:
        in_frames, remainder = local[:, : self.tokens], local[:, self.tokens :]
        counts = self.padding_before, self.length - self.padding_before - self.tokens
        before, after = (local.new_zeros(local.shape[0], count, *local.shape[2:]) for count in counts)
        return torch.cat([before, in_frames, after, remainder], 1)

    def unpad(self, padded: Tensor) -> Tensor:
        end = self.padding_before + self.tokens
        return torch.cat([padded[:, self.padding_before : end], padded[:, self.length :]], 1)


@torch.compiler.disable
def run_on_frames(
    block: Block, frames: plans.Frames, splitter: Splitter, forward: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Calls the `forward` of a module that reshapes its tokens by frames on this rank's tokens in full frames."""
    block.check_arguments(args, kwargs)
    arguments = block.arguments_by_name(args, kwargs)
    tokens, stream = arguments[frames.tokens], (frames.stream,)
    total, local = splitter.total(stream), splitter.local_count(stream)
    if tokens.shape[1] != local or local == total:
        return forward(*args, **kwargs)
    conditions = {name: arguments[name] for name in frames.conditions if arguments.get(name) is not None}
    count = next(iter(conditions.values())).shape[1] // frames.each
    part = _LocalFrames.of(splitter, frames.stream, arguments[frames.until] if frames.until else total, count)
    arguments[frames.tokens] = part.pad(tokens)
    for name, value in conditions.items():
        arguments[name] = value[:, part.first * frames.each : part.last * frames.each]
    if frames.until:
        arguments[frames.until] = part.length
    return part.unpad(forward(**arguments))
