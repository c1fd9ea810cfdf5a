"""A Plan at work: module hooks that cut streams before a forward, inside it, and put them back together.

They are torch's own hooks, so they run outside of whatever wraps a module's forward (offloading, caching), in any
order of attaching.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...old_plan import Gather, Plan, Split
from .exchange import gather
from .mesh import Axis
from .sizes import chunk_sizes
from .standins import hold
from .streams import Streams


def named(transformer: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The modules that a plan's name stands for; ValueError if there are none."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    found = [(name, module) for name, module in transformer.named_modules() if expression.fullmatch(name)]
    if not found:
        raise ValueError(f"the plan names {pattern!r}, which {type(transformer).__name__} does not have")
    return found


Register = Callable[[], RemovableHandle]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def hooks(transformer: nn.Module, plan: Plan, streams: Streams, context: Axis) -> list[Register]:
    """What registers each hook that `plan` needs; ValueError for modules and arguments that do not exist."""
    shard = Shard(streams, context)
    return [*_input_hooks(transformer, plan, shard), *_output_hooks(transformer, plan, shard)]


class Shard:
    """Cuts this rank's chunk out of whole tensors, and makes chunks whole again."""

    def __init__(self, streams: Streams, context: Axis) -> None:
        self._streams = streams
        self._context = context

    def cut(self, value: Any, split: Split, where: str) -> Any:
        """This rank's chunk of a tensor, or of each tensor of a list or tuple; None and replicated streams stay."""
        if value is None:
            return None
        if isinstance(value, (list, tuple)):
            return type(value)([self.cut(item, split, where) for item in value])
        if not isinstance(value, Tensor):
            raise ValueError(f"{where} is a {type(value).__name__}; only tensors can be cut")
        if split.ndim is not None and value.ndim != split.ndim:
            return value
        length = value.shape[split.dim]
        self._streams.see(split.stream, length, where)
        if split.stream in self._streams.replicated:
            return value
        return hold(value, split.dim, self._context.size, self._context.index)

    def join(self, chunk: Tensor, whole: Gather, where: str) -> Tensor:
        """The whole tensor from every rank's chunk along `whole.dim`; that of a replicated stream is whole."""
        if whole.stream in self._streams.replicated:
            return chunk
        sizes = chunk_sizes(self._streams.length(whole.stream), self._context.size)
        own = sizes[self._context.index]
        if own == 0:
            chunk = chunk.narrow(whole.dim, 0, 0)
        if chunk.shape[whole.dim] != own:
            raise ValueError(
                f"{where} has {chunk.shape[whole.dim]} tokens on this rank, but its chunk of stream {whole.stream!r} "
                f"has {own}"
            )
        (gathered,) = gather(chunk.movedim(whole.dim, 0), sizes, self._context).wait()
        return gathered.movedim(0, whole.dim).contiguous()


def _input_hooks(transformer: nn.Module, plan: Plan, shard: Shard) -> Iterator[Register]:
    for pattern, splits in plan.inputs.items():
        for name, module in named(transformer, pattern):
            hook = _cut_inputs(shard, splits, _positions(module, name, splits), name or type(module).__name__)
            yield partial(module.register_forward_pre_hook, hook, with_kwargs=True)


def _output_hooks(transformer: nn.Module, plan: Plan, shard: Shard) -> Iterator[Register]:
    for pattern, splits in plan.outputs_split.items():
        for name, module in named(transformer, pattern):
            hook = _change_outputs(shard.cut, splits, name)
            yield partial(module.register_forward_hook, hook)
    for pattern, wholes in plan.outputs.items():
        for name, module in named(transformer, pattern):
            hook = _change_outputs(shard.join, {0: wholes} if isinstance(wholes, Gather) else wholes, name)
            yield partial(module.register_forward_hook, hook)


def _positions(module: nn.Module, name: str, splits: Mapping[str, Split]) -> dict[str, int]:
    """Where in the positional arguments each cut argument would be."""
    parameters = list(inspect.signature(type(module).forward).parameters)[1:]
    for argument in splits:
        if argument not in parameters:
            raise ValueError(
                f"the plan cuts argument {argument!r} of {name or 'the transformer'} ({type(module).__name__}), whose "
                f"forward takes {', '.join(parameters)}"
            )
    return {argument: parameters.index(argument) for argument in splits}


def _cut_inputs(shard: Shard, splits: Mapping[str, Split], positions: dict[str, int], name: str) -> Callable[..., Any]:
    def cut_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        arguments = list(args)
        for argument, split in splits.items():
            where = f"{name}({argument})"
            if argument in kwargs:
                kwargs[argument] = shard.cut(kwargs[argument], split, where)
            elif positions[argument] < len(arguments):
                arguments[positions[argument]] = shard.cut(arguments[positions[argument]], split, where)
        return tuple(arguments), kwargs

    return cut_inputs


def _change_outputs(change: Callable[[Any, Any, str], Any], parts: Mapping[int, Any], name: str) -> Callable[..., Any]:
    def change_outputs(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        single = isinstance(output, Tensor)
        if not single and not isinstance(output, (list, tuple)):
            raise ValueError(f"the plan changes the output of {name!r}, a {type(output).__name__}; it must be tensors")
        outputs = [output] if single else list(output)
        for index, part in parts.items():
            if index >= len(outputs):
                raise ValueError(f"the plan changes output {index} of {name!r}, which returns {len(outputs)}")
            outputs[index] = change(outputs[index], part, f"output {index} of {name}")
        return outputs[0] if single else type(output)(outputs)

    return change_outputs
