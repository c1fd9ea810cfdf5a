"""A network whose parts run on one rank each, which has their weights and gives every result to the others.

All ranks run the code around these parts on the same real numbers, whatever it does with them. So it needs no plan, as
the stages of a pipeline do, which is worth its traffic for networks that run once, such as text encoders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from ...errors import Refused
from ..comm.collectives import all_gather_v
from ..comm.mesh import MeshDim
from ..comm.votes import all_gather_int
from .stages import PlaceholderBlock

BAD_INPUT = (AttributeError, LookupError, TypeError, ValueError)  # raised for tokens of another text encoder


class RemoteModule(PlaceholderBlock):
    """Replaces a module whose weights another rank has: returns what that rank sends."""

    def __init__(self, module: nn.Module, receive: Callable[..., Any]) -> None:
        super().__init__(module)
        self.__dict__["receive"] = receive

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.receive(args, kwargs)


class OwnedModules:
    """The `modules` of a network with the index of the rank that has each in `dim`; set `dim` before a forward. `paths`
    are the names of those that other ranks have."""

    def __init__(self, network: nn.Module, modules: Sequence[nn.Module], owners: Sequence[int], index: int) -> None:
        self.dim = MeshDim()
        self.paths: list[str] = []
        names = {module: name for name, module in network.named_modules()}
        for module, owner in zip(modules, owners, strict=True):
            if owner == index:
                module.forward = partial(self._compute, module.forward)
                continue
            parent, _, name = names[module].rpartition(".")
            network.get_submodule(parent)._modules[name] = RemoteModule(module, partial(self._receive, owner))
            self.paths.append(names[module])

    def _compute(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Raises Refused, on all ranks, for input at which the module fails."""
        try:
            output = forward(*args, **kwargs)
            leaves, structure = tree_flatten(output)
            places = {id(leaf): place for place, leaf in enumerate(tree_flatten((args, kwargs))[0])}
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            layouts = [[str(x.dtype).removeprefix("torch."), list(x.shape), places.get(id(x))] for x in tensors]
            plain = [None if isinstance(leaf, Tensor) else [leaf] for leaf in leaves]
            note = json.dumps([treespec_dumps(structure), layouts, plain])
        except BAD_INPUT as error:
            self._exchange_note(self.dim.index, json.dumps(repr(error)))
            raise Refused("clip.failed", error=repr(error)) from None
        self._exchange_note(self.dim.index, note)
        for tensor in tensors:
            self._exchange(self.dim, self.dim.index, tensor.contiguous().view(-1), tensor.numel())
        return output

    def _receive(self, owner: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the output on the device of the first argument. An argument in which the module computes gets its
        result here too."""
        note, inputs = self._exchange_note(owner), tree_flatten((args, kwargs))[0]
        if isinstance(note, str):
            raise Refused("clip.failed", error=note)
        structure, layouts, plain = note
        device = next(leaf.device for leaf in inputs if isinstance(leaf, Tensor))
        arrived = []
        for name, shape, place in layouts:
            nothing = torch.empty(0, dtype=getattr(torch, name), device=device)
            value = self._exchange(self.dim, owner, nothing, torch.Size(shape).numel()).view(shape)
            arrived.append(value if place is None else inputs[place].copy_(value))
        tensors = iter(arrived)
        leaves = [next(tensors) if value is None else value[0] for value in plain]
        return tree_unflatten(leaves, treespec_loads(structure))

    def _exchange_note(self, owner: int, note: str = "") -> Any:
        """Returns the owner's note, out of JSON."""
        local = torch.tensor(list(note.encode()), dtype=torch.uint8)
        size = all_gather_int(len(local), self.dim)[owner]
        on_cpu = MeshDim(size=self.dim.size, index=self.dim.index, ranks=self.dim.ranks)
        return json.loads(bytes(self._exchange(on_cpu, owner, local, size).tolist()))

    @staticmethod
    def _exchange(dim: MeshDim, owner: int, local: Tensor, size: int) -> Tensor:
        """Returns the owner's flat tensor of this size, on every rank; `local` is empty on others."""
        return all_gather_v(local, [size * (index == owner) for index in range(dim.size)], dim).wait()[0]
