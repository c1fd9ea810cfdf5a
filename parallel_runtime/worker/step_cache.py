"""First-block caching: where the first block's residual repeats that of the last step, the other blocks are skipped and
their last residual is added again. All ranks decide together, by all tokens. Knows no model family and no sampler."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures.split_plan import Names, SplitPlan
from ..engine.comm.collectives import all_gather_v, any_rank
from ..engine.comm.mesh import ContextMesh, MeshDim
from ..engine.parallelize import MAY_SKIP
from ..engine.split.hooks import Block, blocks_of_module_plan
from ..engine.split.streams import streams_of

Forward = Callable[..., Any]
HiddenStates = list[Any]  # a tensor for each stream; None for one that the last block drops, as SD3's does


@dataclass(eq=False)
class _Branch:
    """Residuals of a branch's last full evaluation: of the first block, and of each stack's other blocks together."""

    first_residual: Tensor | None = None
    residuals: dict[str, HiddenStates] = field(default_factory=dict)
    entry_states: dict[str, HiddenStates] = field(default_factory=dict)  # inputs of the second block of each stack


class StepCache:
    """Skips the blocks after the first one while `caching`; each evaluation runs inside `branch`.

    It skips where, for every row of the batch, the first block's residual differs from that of the last full evaluation
    by less than `threshold`, relative to it: mean absolute values over the tokens of all ranks. All rows of all batch
    groups decide together, so the degrees never change what is skipped. What is added to tokens between blocks
    (as by a ControlNet) is part of the cached residual. Evaluations in which ComfyUI replaces blocks skip nothing."""

    def __init__(self, transformer: nn.Module, plan: SplitPlan, mesh: ContextMesh, threshold: float) -> None:
        self.evaluations = 0
        self.skipped = 0
        self._transformer = transformer
        self._plan = plan
        self._mesh = mesh
        self._threshold = threshold
        self._branches: dict[Hashable, _Branch] = {}
        self._earlier: dict[Hashable, _Branch] = {}  # of the last prediction, not evaluated in this one yet
        self._branch: _Branch | None = None
        self._skipping = False
        self._replaced = False
        self._followers: set[nn.Module] = set()

    @contextmanager
    def caching(self) -> Iterator[None]:
        """Caches within this context: it starts empty, and is emptied at the end."""
        new: list[tuple[nn.Module, Forward]] = []
        for number, module_plan in enumerate(self._plan.trunk):
            blocks = list(blocks_of_module_plan(self._transformer, module_plan))
            if number == 0:
                head = blocks.pop(0)
                new.append((head.module, self._first_forward(head)))
            self._followers.update(block.module for block in blocks)
            new += [(block.module, self._later_forward(block, first=block is blocks[0])) for block in blocks]
        forwards = [(block, vars(block).get("forward"), forward) for block, forward in new]
        for block, _, forward in forwards:
            block.forward = forward  # type: ignore[method-assign]

        def detect_replacements(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            options = kwargs.get("transformer_options") or {}
            self._replaced = bool((options.get("patches_replace") or {}).get("dit"))

        handle = self._transformer.register_forward_pre_hook(detect_replacements, with_kwargs=True)
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
            self._earlier.clear()
            self._followers.clear()
            self._branch = None

    def begin_prediction(self) -> None:
        """Drops branches that the last prediction did not evaluate. Call it before each prediction of the sampler."""
        # Windows over a video may move in every step.
        self._earlier, self._branches = self._branches, {}

    @contextmanager
    def branch(self, key: Hashable) -> Iterator[None]:
        """Evaluations in this context belong to one prompt, size and window over the latent, which `key` identifies."""
        self._branch = self._branches.setdefault(key, self._earlier.pop(key, _Branch()))
        yield
        self._branch = None

    def skips(self, block: nn.Module) -> bool:
        """Returns whether the evaluation in progress skips `block`."""
        return self._skipping and not self._replaced and block in self._followers

    def counts(self, *, shared: bool) -> list[int]:
        """Returns [evaluations skipped, evaluations], summed over the groups that `shared` the branches. Collective."""
        device = next(self._transformer.parameters()).device
        local = torch.tensor([self.skipped, self.evaluations], device=device)
        return (self._all_gather(local, self._mesh.cfg).sum(0) if shared else local).tolist()

    def _first_forward(self, block: Block) -> Forward:
        module_plan, original = block.module_plan, block.module.forward
        names = [streams for *_, streams in module_plan.split_args]
        main = next((n for n, streams in enumerate(names) if self._plan.main_stream in streams), 0)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._replaced:
                return original(*args, **kwargs)
            before = block.hidden_states(args, kwargs)[main].clone()
            out = original(*args, **kwargs)
            residual = _as_list(out)[main] - before
            self._decide(residual if module_plan.outputs[main][0].dim else residual[None], names[main])
            return out

        return forward

    def _later_forward(self, block: Block, *, first: bool) -> Forward:
        original, name = block.module.forward, block.module_plan.name

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._replaced:
                return original(*args, **kwargs)
            assert self._branch is not None
            entry, residuals = self._branch.entry_states, self._branch.residuals
            if first:  # blocks write into their inputs
                entry[name] = _map_streams(Tensor.clone, block.hidden_states(args, kwargs))
            if not self._skipping:
                out = original(*args, **kwargs)
                if block.last:
                    residuals[name] = _map_streams(torch.sub, _as_list(out), entry.pop(name))
                return out
            if block.last:
                out = _map_streams(torch.add, residuals[name], entry.pop(name))
            else:
                out = block.hidden_states(args, kwargs)
            return tuple(out) if len(out) > 1 else out[0]

        setattr(forward, MAY_SKIP, True)
        return forward

    def _decide(self, residual: Tensor, names: Names) -> None:
        """Skips if all rows are below the threshold; a NaN, or a last residual of zero, is not."""
        branch, context = self._branch, self._mesh.context
        assert branch is not None, "an evaluation of no branch"
        streams = streams_of(self._transformer)
        if streams is not None:
            residual = streams.local_tokens(names).to_chunks(residual)
        self._skipping, last = False, branch.first_residual
        if last is not None:
            tokens = [part.abs().flatten(1).sum(dim=1, dtype=torch.float32) for part in (residual - last, last)]
            difference, size = self._all_gather(torch.stack(tokens), context).sum(0)
            excess = (difference - self._threshold * size).max()
            self._skipping = bool(self._all_gather(excess, self._mesh.data).max() < 0)
            if context.group_state.heterogeneous:  # such devices may sum in other orders
                self._skipping = not any_rank(any_rank(not self._skipping, context), self._mesh.data)
        self.evaluations += 1
        self.skipped += self._skipping
        if not self._skipping:
            branch.first_residual = residual

    def _all_gather(self, local: Tensor, dim: MeshDim) -> Tensor:
        """Gathers `local` of every rank into [ranks of `dim`, ...], with the same bits on each."""
        return all_gather_v(local[None], (1,) * dim.size, dim) if dim.size > 1 else local[None]


def _as_list(out: Any) -> HiddenStates:
    return [out] if isinstance(out, Tensor) else list(out)


def _map_streams(function: Callable[..., Tensor], *states: HiddenStates) -> HiddenStates:
    """Applies `function` to each stream that has not been dropped."""
    return [None if values[0] is None else function(*values) for values in zip(*states, strict=True)]
