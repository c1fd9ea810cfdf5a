"""First-block caching: where the first block changes a step's tokens as it changed the last one's, what the other
blocks added then is added again. The ranks decide on all tokens and as one. Knows no model family and no sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..plan import Names, Plan
from .engine.exchange import any_of, gather
from .engine.hooking import Block, blocks_of_site
from .engine.mesh import Axis, ContextMesh
from .engine.streams import streams_of

Forward = Callable[..., Any]
Carried = list[Any]  # tensors, or None for a stream that a last block gives up, as SD3's does


@dataclass(eq=False)
class _Branch:
    """What is kept of the last whole evaluation: the first block's change, and what the rest of each stack added."""

    change: Tensor | None = None
    rest: dict[str, Carried] = field(default_factory=dict)
    entry: dict[str, Carried] = field(default_factory=dict)  # what the second block of each stack was given


class StepCache:
    """Skips the blocks behind the first one while `caching`, in evaluations of which it is told the branch.

    It skips where, for every row of the batch, the first block's change differs from that of the last whole evaluation
    by less than `threshold`, as a share of it: mean absolute values over the tokens of all ranks. All rows of all data
    lanes decide together, so that the degrees never change what is skipped. What is added to tokens between blocks
    (residuals of a ControlNet) is part of what was kept. Evaluations in which ComfyUI replaces blocks skip nothing.
    """

    def __init__(self, transformer: nn.Module, plan: Plan, mesh: ContextMesh, threshold: float) -> None:
        self.evaluations = 0
        self.skipped = 0
        self._transformer = transformer
        self._plan = plan
        self._mesh = mesh
        self._threshold = threshold
        self._branches: dict[Hashable, _Branch] = {}
        self._branch: _Branch | None = None
        self._skipping = False
        self._replaced = False
        self._followers: set[nn.Module] = set()

    @contextmanager
    def caching(self) -> Iterator[None]:
        """Nothing is kept from before, and nothing after."""
        forwards = [(block, vars(block).get("forward"), forward) for block, forward in self._forwards()]
        for block, _, forward in forwards:
            block.forward = forward  # type: ignore[method-assign]
        handle = self._transformer.register_forward_pre_hook(self._note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
            for block, before, _ in forwards:
                if before is None:
                    del block.forward
                else:  # it is compiled
                    block.forward = before
            self._branches.clear()
            self._followers.clear()
            self._branch = None

    @contextmanager
    def branch(self, key: Hashable) -> Iterator[None]:
        """What is evaluated in here belongs to one prompt, at one size; `key` differs where either does."""
        self._branch = self._branches.setdefault(key, _Branch())
        yield
        self._branch = None

    def skips(self, block: nn.Module) -> bool:
        """Whether the evaluation in progress leaves `block` out."""
        return self._skipping and not self._replaced and block in self._followers

    def tally(self, *, shared: bool) -> list[int]:
        """[evaluations skipped, evaluations]; of all lanes of guidance where they `shared` the branches. Collective."""
        device = next(self._transformer.parameters()).device
        mine = torch.tensor([self.skipped, self.evaluations], device=device)
        return (self._from_all(mine, self._mesh.cfg).sum(0) if shared else mine).tolist()

    def _note(self, _: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        options = kwargs.get("transformer_options") or {}
        self._replaced = bool((options.get("patches_replace") or {}).get("dit"))

    def _forwards(self) -> Iterator[tuple[nn.Module, Forward]]:
        for number, site in enumerate(self._plan.trunk):
            blocks = list(blocks_of_site(self._transformer, site))
            if number == 0:
                head = blocks.pop(0)
                yield head.module, self._leading(head)
            self._followers.update(block.module for block in blocks)
            for block in blocks:
                yield block.module, self._following(block, first=block is blocks[0])

    def _leading(self, block: Block) -> Forward:
        site, plain = block.site, block.module.forward
        carried = [streams for *_, streams in site.carries]
        watched = next((n for n, streams in enumerate(carried) if self._plan.main in streams), 0)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._replaced:
                return plain(*args, **kwargs)
            before = block.carried(args, kwargs)[watched].clone()
            out = plain(*args, **kwargs)
            change = _listed(out)[watched] - before
            self._decide(change if site.outputs[watched][0].dim else change[None], carried[watched])
            return out

        return forward

    def _following(self, block: Block, *, first: bool) -> Forward:
        plain, name = block.module.forward, block.site.name

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._replaced:
                return plain(*args, **kwargs)
            assert self._branch is not None
            entry, rest = self._branch.entry, self._branch.rest
            if first:
                entry[name] = _each(Tensor.clone, block.carried(args, kwargs))  # blocks write into what they are given
            if not self._skipping:
                out = plain(*args, **kwargs)
                if block.last:
                    rest[name] = _each(torch.sub, _listed(out), entry.pop(name))
                return out
            out = _each(torch.add, rest[name], entry.pop(name)) if block.last else block.carried(args, kwargs)
            return tuple(out) if len(out) > 1 else out[0]

        return forward

    def _decide(self, change: Tensor, of: Names) -> None:
        branch = self._branch
        assert branch is not None, "an evaluation of no branch"
        streams = streams_of(self._transformer)
        if streams is not None:
            change = streams.held(of).drop(change)
        self._skipping = branch.change is not None and self._repeats(change, branch.change)
        self.evaluations += 1
        self.skipped += self._skipping
        if not self._skipping:
            branch.change = change

    def _repeats(self, change: Tensor, last: Tensor) -> bool:
        """No difference that is not a number counts as small, nor does a change of nothing."""
        tokens = [part.abs().flatten(1).sum(dim=1, dtype=torch.float32) for part in (change - last, last)]
        difference, size = self._from_all(torch.stack(tokens), self._mesh.context).sum(0)
        excess = (difference - self._threshold * size).max()
        return self._for_all(bool(self._from_all(excess, self._mesh.data).max() < 0))

    def _for_all(self, repeats: bool) -> bool:
        """The same bits are added up, and cards of unlike kinds add in unlike orders: what is not small to one of them
        is small to none."""
        context = self._mesh.context
        if not context.world.unlike:
            return repeats
        return not any_of(self._mesh.data, any_of(context, not repeats))

    def _from_all(self, mine: Tensor, axis: Axis) -> Tensor:
        """[ranks of the axis, ...]: the same bits on each of them, so what they make of it is the same too."""
        return gather(mine[None], (1,) * axis.size, axis).wait()[0] if axis.size > 1 else mine[None]


def _listed(out: Any) -> Carried:
    return [out] if isinstance(out, Tensor) else list(out)


def _each(function: Callable[..., Tensor], *carried: Carried) -> Carried:
    """Of each stream that is still carried on."""
    return [None if values[0] is None else function(*values) for values in zip(*carried, strict=True)]
