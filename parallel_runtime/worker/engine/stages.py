"""A network in the stages of a pipeline: each rank computes its own blocks, and passes tokens on to who has the next.

Every rank runs the network's own forward from beginning to end. Blocks of other stages give what is no number, in the
shapes of what they would give; where a block of another stage than the last one begins, its tokens travel. So what lies
between blocks is the network's own code, on the rank where its numbers are real.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.hooks import RemovableHandle

from ...errors import Refused
from ...plan import Plan
from ...stages import Seat, owners, units_of
from .hooking import Block, cut_blocks
from .mesh import Axis
from .passing import Passing
from .patches import Patches

HERE = "_real_on_stage"  # of a tensor that a block gave: the stage whose numbers it holds


class Elsewhere(nn.Module):
    """In the place of a block that another stage has. It gives what is no number, in the shapes of the arguments that
    the block would have gone on from: where the plan is wrong, that is seen in the answer.

    What else the network asks of its block it is told by the block itself, whose weights nobody touches.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__["block"] = block

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter):  # a weight that goes back to where it is in the file
            setattr(self.__dict__["block"], name, value)
        else:
            super().__setattr__(name, value)


def _elsewhere(seat: Seat) -> Elsewhere:
    """Of a class whose forward takes what the block's does: plans go by its arguments."""
    signature = inspect.signature(type(seat.block).forward)
    names = [one.name for one in signature.parameters.values() if one.kind == one.POSITIONAL_OR_KEYWORD][1:]
    no_numbers = partial(torch.full_like, fill_value=torch.nan)

    def forward(_: Elsewhere, *args: Any, **kwargs: Any) -> Any:
        given: dict[Any, Any] = {**dict(enumerate(args)), **dict(zip(names, args, strict=False)), **kwargs}
        out = tuple(tree_map_only(Tensor, no_numbers, given[name]) for name in seat.site.given_on)
        return out[0] if len(out) == 1 else out

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return type(type(seat.block).__name__, (Elsewhere,), {"forward": forward})(seat.block)


def settle(network: nn.Module, plan: Plan, counts: Sequence[int], own: int) -> list[Seat]:
    """Have Elsewhere sit where blocks of other stages than `own` do, of stages of so many units; where that is."""
    units = units_of(network, plan)
    assert sum(counts) == len(units)
    others = [seat for unit, owner in zip(units, owners(counts), strict=True) if owner != own for seat in unit]
    for seat in others:
        seat.stack._modules[seat.name] = _elsewhere(seat)
    return others


def unsettle(others: Sequence[Seat]) -> None:
    """Undo `settle`."""
    for seat in others:
        seat.stack._modules[seat.name] = seat.block.block  # type: ignore[assignment]


class Stages:
    """The hooks of a network that `settle` has settled, over the ranks of `axis`; after those of any other division.

    Each forward's answer is on every rank when it returns. `in_flight` several follow each other without waiting, and
    their answers are real on the last stage until `answers`. So do the turns of a forward in `patches`.
    """

    def __init__(
        self, network: nn.Module, plan: Plan, axis: Axis, counts: Sequence[int], patches: Patches | None = None
    ) -> None:
        self.passing = Passing(axis)
        self._axis = axis
        self._flying = False
        self._told = False  # all have this forward's answer, or why there is none
        self._unit = 0  # that ran last in this forward
        self._latest: int | None = None  # whose block ran last in this forward; None: what there is all computed
        self._sources: list[int | None] = []  # of a block's tokens: the stages where they are real
        self._kept = _kept_for_later(plan)
        self.patches = patches
        if patches is not None:
            patches.begins.append(self._begin_turn)
        self._handles: list[RemovableHandle] = [network.register_forward_pre_hook(self._begin, with_kwargs=True)]
        blocks = {block.module: block for block in cut_blocks(network, plan)}
        for number, (unit, owner) in enumerate(zip(units_of(network, plan), owners(counts), strict=True)):
            for seat in unit:
                self._hook(blocks[seat.block], number, owner)
        self._handles.append(network.register_forward_hook(self._end, always_call=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """In here forwards give numbers on the last stage alone. What one stage refuses all do as they leave."""
        self._flying, refused = True, None
        try:
            with nullcontext() if self.patches is None else self.patches.in_flight():
                yield
        except Refused as error:
            self.passing.refuse()
            refused = error
        finally:
            self._flying = False
        try:
            self.passing.close(refused=refused is not None)
        except Refused as others:
            raise refused or others from None

    def answers(self, out: Sequence[Tensor]) -> list[Tensor]:
        """What was computed `in_flight` from the answers of forwards: the last stage's, on every rank."""
        return self._from(self._axis.size - 1, list(out))

    def before_others_look(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """ComfyUI's innermost wrapper around a network's forward: who is around it too (EasyCache) decides by what it
        gives, and all stages have to decide alike."""
        output = forward(*args, **kwargs)
        if not self._flying:
            self._told = True
            with self.in_flight():
                output = self._of_the_latest(output)
        return output

    def _hook(self, block: Block, number: int, owner: int) -> None:
        module = block.module
        self._handles += [
            module.register_forward_pre_hook(partial(self._look, block, number), prepend=True, with_kwargs=True),
            module.register_forward_pre_hook(partial(self._cross, block, owner), with_kwargs=True),
            module.register_forward_hook(partial(self._label, owner)),
        ]

    def _begin(self, network: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        self._told = False
        self._begin_turn()
        if self._kept and any((kwargs.get("control") or {}).values()):
            raise Refused(
                f"{type(network).__name__}: a ControlNet adds to what {self._kept} keep for later blocks, which may "
                "be another stage's; set pipeline_degree to 1"
            )
        if ((kwargs.get("transformer_options") or {}).get("patches") or {}).get("noise_refiner"):
            raise Refused(
                f"{type(network).__name__}: a Fun ControlNet goes on from what it made at earlier blocks, which may be "
                "another stage's; set pipeline_degree to 1"
            )

    def _begin_turn(self) -> None:
        self._latest, self._unit = None, 0

    @torch.compiler.disable
    def _look(self, block: Block, number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before anything is cut: what is cut is another tensor."""
        if number < self._unit and not block.site.again:
            raise Refused(
                f"{block.site.name} runs in another order than its plan says; this ComfyUI needs another one: set "
                "pipeline_degree to 1"
            )
        self._unit = number
        self._sources = [getattr(tensor, HERE, self._latest) for tensor in _tokens(block, args, kwargs)]

    @torch.compiler.disable
    def _cross(self, block: Block, owner: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        me, tokens = self._axis.index, _tokens(block, args, kwargs)
        if owner != me:
            if me in self._sources:
                pairs = zip(tokens, self._sources, strict=True)
                self.passing.give(owner, [tensor for tensor, source in pairs if source == me])
            return None
        arrived: dict[int, Tensor] = {}
        for source in dict.fromkeys(self._sources):
            if source not in (None, me):
                like = [tensor for tensor, at in zip(tokens, self._sources, strict=True) if at == source]
                arrived |= zip(map(id, like), self.passing.take(source, like), strict=True)

        def real(_: Any, value: Any, __: Any) -> Any:
            return tree_map_only(Tensor, lambda tensor: arrived.get(id(tensor), tensor), value)

        return block.given(args, kwargs, real) if arrived else None

    @torch.compiler.disable
    def _label(self, owner: int, _: nn.Module, __: Any, output: Any) -> None:
        self._latest = owner
        for tensor in tree_flatten(output)[0]:
            if isinstance(tensor, Tensor):
                setattr(tensor, HERE, owner)

    def _end(self, _: nn.Module, __: Any, output: Any) -> Any:
        """The answer of whose block ran last. Torch calls this too where the forward raised."""
        if self._told:
            return output
        if sys.exc_info()[0] is not None:
            self.passing.refuse()
            if not self._flying:
                with suppress(Refused):
                    self.passing.close(refused=True)
            return None
        if self._flying:
            return output if self._latest == self._axis.size - 1 else self._of_the_latest(output)
        with self.in_flight():
            output = self._of_the_latest(output)
        return output

    def _of_the_latest(self, output: Any) -> Any:
        if self._latest is None:
            return output
        leaves, structure = tree_flatten(output)
        return tree_unflatten(self._from(self._latest, leaves), structure)

    def _from(self, owner: int, tensors: list[Tensor]) -> list[Tensor]:
        """These tensors of the stage `owner`, on every rank."""
        if owner != self._axis.index:
            return self.passing.take(owner, tensors)
        if any(bool(tensor.isnan().any()) for tensor in tensors):
            raise Refused(
                "what comes out of the pipeline is not a number: this ComfyUI or this input needs another plan, or the "
                "model gives none either way; set pipeline_degree to 1 to see which"
            )
        for peer in self._axis.others:
            self.passing.give(peer, tensors)
        return tensors


def _kept_for_later(plan: Plan) -> str:
    """Blocks that are also given what others left long before; "" for none."""
    kept = (site.name for site in plan.sites if site.given_on and site.beside is None
            and {name for name, *_ in site.carries} - set(site.given_on))  # fmt: skip
    return next(kept, "")


def _tokens(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The hidden states that a block is given."""
    return [value for value in block.carried(args, kwargs) if isinstance(value, Tensor)]
