"""First-block caching: where the first block changes a step's tokens as it changed the last one's, what the other
blocks added then is added again. The ranks decide on all tokens and as one. Knows no model family and no sampler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..old_plan import Blocks
from .engine.attach import streams_of
from .engine.exchange import gather
from .engine.mesh import Axis, ContextMesh

Forward = Callable[..., Any]
Carried = list[Any]  # tensors, or None for a stream that a last block gives up, as SD3's does


@dataclass(eq=False)
class _Branch:
    """What is kept of the last whole evaluation: the first block's change, and what the rest of each stack added."""

    change: Tensor | None = None
    rest: dict[str, Carried] = field(default_factory=dict)


class StepCache:
    """Skips the blocks behind the first one while `caching`, in evaluations of which it is told the branch.

    It skips where, for every row of the batch, the first block's change differs from that of the last whole evaluation
    by less than `threshold`, as a share of it: mean absolute values over the tokens of all ranks. All rows of all data
    lanes decide together, so that the degrees never change what is skipped.
    """

    def __init__(self, transformer: nn.Module, blocks: Blocks, mesh: ContextMesh, threshold: float) -> None:
        self.evaluations = 0
        self.skipped = 0
        self._transformer = transformer
        self._blocks = blocks
        self._mesh = mesh
        self._threshold = threshold
        self._branches: dict[Hashable, _Branch] = {}
        self._branch: _Branch | None = None
        self._skipping = False

    @contextmanager
    def caching(self) -> Iterator[None]:
        """Nothing is kept from before, and nothing after."""
        forwards = list(self._forwards())
        for block, forward in forwards:
            assert "forward" not in vars(block)
            block.forward = forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            for block, _ in forwards:
                del block.forward
            self._branches.clear()
            self._branch = None

    @contextmanager
    def branch(self, key: Hashable) -> Iterator[None]:
        """What is evaluated in here belongs to one prompt, at one size; `key` differs where either does."""
        self._branch = self._branches.setdefault(key, _Branch())
        yield
        self._branch = None

    def tally(self, *, shared: bool) -> list[int]:
        """[evaluations skipped, evaluations]; of all lanes of guidance where they `shared` the branches. Collective."""
        device = next(self._transformer.parameters()).device
        mine = torch.tensor([self.skipped, self.evaluations], device=device)
        return (self._from_all(mine, self._mesh.cfg).sum(0) if shared else mine).tolist()

    def _forwards(self) -> Iterator[tuple[nn.Module, Forward]]:
        first, *_ = self._blocks.stacks
        for stack, carries in self._blocks.stacks.items():
            modules = list(self._transformer.get_submodule(stack))  # type: ignore[call-overload]
            if stack == first:
                head = modules.pop(0)
                yield head, self._leading(head, carries)
            for module in modules:
                yield module, self._following(module, stack, carries, modules[0], modules[-1])

    def _leading(self, block: nn.Module, carries: Sequence[str]) -> Forward:
        plain, read = block.forward, _reader(block, [self._blocks.watched])
        watched = carries.index(self._blocks.watched)

        def forward(*args: Any, **kwargs: Any) -> Any:
            (before,) = read(args, kwargs)
            out = plain(*args, **kwargs)
            self._decide(_listed(out)[watched] - before)
            return out

        return forward

    def _following(
        self, block: nn.Module, stack: str, carries: Sequence[str], first: nn.Module, last: nn.Module
    ) -> Forward:
        plain, read = block.forward, _reader(block, carries)

        def forward(*args: Any, **kwargs: Any) -> Any:
            assert self._branch is not None
            carried, rest = read(args, kwargs), self._branch.rest
            if self._skipping:
                return _shaped(_added(carried, rest[stack]) if block is last else carried)
            if block is first:
                rest[stack] = carried
            out = plain(*args, **kwargs)
            if block is last:
                rest[stack] = _taken(_listed(out), rest[stack])
            return out

        return forward

    def _decide(self, change: Tensor) -> None:
        branch = self._branch
        assert branch is not None, "an evaluation of no branch"
        if (streams := streams_of(self._transformer)) is not None:
            change = streams.held((self._blocks.stream,), self._mesh.context.index).drop(change)
        self._skipping = branch.change is not None and self._repeats(change, branch.change)
        self.evaluations += 1
        self.skipped += self._skipping
        if not self._skipping:
            branch.change = change

    def _repeats(self, change: Tensor, last: Tensor) -> bool:
        """No difference that is not a number counts as small, nor does a change of nothing."""
        tokens = [part.abs().sum(dim=(1, 2), dtype=torch.float32) for part in (change - last, last)]
        difference, size = self._from_all(torch.stack(tokens), self._mesh.context).sum(0)
        excess = (difference - self._threshold * size).max()
        return bool(self._from_all(excess, self._mesh.data).max() < 0)

    def _from_all(self, mine: Tensor, axis: Axis) -> Tensor:
        """[ranks of the axis, ...]: the same bits on each of them, so what they make of it is the same too."""
        return gather(mine[None], (1,) * axis.size, axis).wait()[0] if axis.size > 1 else mine[None]


def _reader(block: nn.Module, names: Sequence[str]) -> Callable[[Sequence[Any], dict[str, Any]], list[Any]]:
    """The arguments called `names` out of those of a call of `block`."""
    places = list(inspect.signature(type(block).forward).parameters)[1:]
    return lambda args, kwargs: [kwargs[name] if name in kwargs else args[places.index(name)] for name in names]


def _listed(out: Any) -> Carried:
    return list(out) if isinstance(out, tuple) else [out]


def _shaped(carried: Carried) -> Any:
    return tuple(carried) if len(carried) > 1 else carried[0]


def _added(carried: Carried, rest: Carried) -> Carried:
    return [None if b is None else a + b for a, b in zip(carried, rest, strict=True)]


def _taken(after: Carried, before: Carried) -> Carried:
    return [None if a is None else a - b for a, b in zip(after, before, strict=True)]
