"""A second kind of device that is not there: its tensors say "meta", compute on the CPU, and mix with no others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


class OnSecondDevice(Tensor):
    """`value` as that device has it. As of a real one, `.cpu()` gives it back."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> OnSecondDevice:
        kind = {"dtype": value.dtype, "device": "meta", "strides": value.stride()}
        made: OnSecondDevice = torch.Tensor._make_wrapper_subclass(cls, value.shape, **kind)  # type: ignore[attr-defined]
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if len({tensor.device.type for tensor in given}) > 1:
            raise RuntimeError(f"{function}: expected all tensors to be on the same device")
        wanted = kwargs.pop("device", None)
        args, kwargs = tree_map_only(OnSecondDevice, lambda tensor: tensor.value, (args, kwargs))
        out = function(*args, **kwargs)
        if wanted is not None and torch.device(wanted).type == "cpu":
            return out
        return tree_map_only(Tensor, OnSecondDevice, out)
