"""The models that ComfyUI loads besides a MODEL's own network: those of Load Model Patch, ControlNets, the VAEs that
encode pictures for both, GLIGEN and hypernetworks.

Each is loaded by ComfyUI's own code, once per file, and kept while any of this rank's models used it in its last job.
"""

from __future__ import annotations

import math
import os
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import comfy.controlnet
import comfy.model_management
import comfy.sd
import folder_paths
import torch
from comfy.controlnet import ControlBase
from comfy.gligen import Gligen
from comfy.model_patcher import ModelPatcher
from comfy.sd import VAE
from torch import Tensor

from ...engine.comm.collectives import refuse_on_all_ranks
from ...engine.comm.ranks import world_size
from ...errors import Refused
from ...loading.code_names import named
from ...loading.fingerprint import fingerprint
from ...loading.mapped import Mapped, load_mapped
from ...loading.object_codec import LoadAdditional
from ...specs import ModelSpec, SourceFile
from ..links import check_files
from .autoencoder import native_vae
from .patcher import UNLIMITED_BYTES, unload

FOLDER = "model_patches"
LOADER = "comfy_extras.nodes_model_patch:ModelPatchLoader"
KEPT_PICTURES = 4
OWN_DECISIONS: dict[str, Any] = {  # of comfy.model_management, by a rank's own memory
    "load_models_gpu": lambda *_, **__: None, "OOM_EXCEPTION": (), "ACCELERATOR_ERROR": (),
}  # fmt: skip
HYPERNETWORK_LOADER = "comfy_extras.nodes_hypernetwork:load_hypernetwork_patch"
Key = tuple[SourceFile | ModelSpec, str]  # and the dtype of a ControlNet's weights, "" for none
Additional: TypeAlias = ModelPatcher | ControlBase | VAE | Any  # a hypernetwork's class has no name in its module


class AdditionalModels:
    """The additional models that this rank has loaded."""

    def __init__(self) -> None:
        self._used: dict[object, dict[Key, Additional]] = {}  # by the models that this rank has

    @contextmanager
    def of_job(self, user: object) -> Iterator[LoadAdditional]:
        """Yields a function that loads the additional models of a job on the model `user` by their descriptions. At the
        end those that no model's last job used are unloaded."""
        used: dict[Key, Additional] = {}
        yield partial(self._load, used)
        self._replace(user, used)

    def weights(self, user: object) -> Iterator[Tensor]:
        """Yields the weights of the additional models that the last job on `user` used."""
        for loaded in self._used.get(user, {}).values():
            yield from _weights_of(loaded)

    def unlisted(self, user: object) -> list[ModelPatcher]:
        """Returns the GLIGEN models and VAEs that the last job on `user` used, which no MODEL or ControlNet lists."""
        models = self._used.get(user, {}).values()
        gligens = [one for one in models if isinstance(one, ModelPatcher) and isinstance(one.model, Gligen)]
        return [*gligens, *(one.patcher for one in models if isinstance(one, VAE))]

    def drop(self, user: object) -> None:
        """Unloads the additional models that only `user` used, which this rank no longer has."""
        self._replace(user, {})

    def _replace(self, user: object, used: dict[Key, Additional]) -> None:
        """Sets the models that `user` uses, and unloads those that nothing uses any more."""
        before = self._used.pop(user, {})
        if used:
            self._used[user] = used
        for key in before.keys() - set().union(*self._used.values()):
            for patcher in _patchers_of(before[key]):
                unload(patcher)

    def _load(self, used: dict[Key, Additional], described: dict[str, Any]) -> Additional:
        """Returns the model of one file. Collective where it is not loaded yet. Raises Refused for a changed file."""
        key = _key_of(described)
        known = ChainMap(used, *self._used.values())
        if key not in known:
            with refuse_on_all_ranks():
                if isinstance(key[0], SourceFile):
                    check_files([key[0]])
                used[key] = LOADERS[described["kind"]](described)
        used[key] = known[key]
        return used[key]


def _key_of(described: dict[str, Any]) -> Key:
    if described["kind"] == "vae":
        return ModelSpec(**described["spec"]), ""
    file = SourceFile(path=described["path"], size=described["size"], mtime_ns=described["mtime_ns"])
    return file, described.get("dtype", "")


def _weights_of(loaded: Additional) -> Iterator[Tensor]:
    if isinstance(loaded, comfy.controlnet.ControlLora):
        return iter(loaded.control_weights.values())
    if isinstance(loaded, comfy.controlnet.T2IAdapter):
        return loaded.t2i_model.parameters()
    if isinstance(loaded, ModelPatcher):
        return loaded.model.parameters()
    if isinstance(loaded, VAE):
        return loaded.first_stage_model.parameters()
    if isinstance(loaded, ControlBase):
        return loaded.control_model.parameters()
    return (weight for layers in loaded.hypernet.values() for weight in layers.parameters())


def _patchers_of(loaded: Additional) -> list[ModelPatcher]:
    """Returns what ComfyUI puts on a device for it; a hypernetwork goes along with its MODEL."""
    if isinstance(loaded, ModelPatcher | VAE):
        return [getattr(loaded, "patcher", loaded)]
    return list(loaded.get_models()) if isinstance(loaded, ControlBase) else []


def _load_model_patch(described: dict[str, Any]) -> ModelPatcher:
    """Loads a model patch as ComfyUI did, with weights `assigned` from the file or copied. ComfyUI's loader finds the
    file by name in the first folder that has it, so the folder is put first."""
    path = described["path"]
    folder, name = os.path.split(path)
    folder_paths.add_model_folder_path(FOLDER, folder, is_default=True)
    load = named(LOADER)().load_model_patch
    try:
        return load_mapped(_Unsettled, load, [name], 0) if described["assigned"] else load(name)[0]
    except FileNotFoundError as missing:
        raise Refused("patch.missing", path=path, reason=str(missing)) from None


def _load_control_net(described: dict[str, Any]) -> ControlBase:
    """Loads a ControlNet as ComfyUI's loader nodes do, in ComfyUI's dtype. Raises Refused where it gets another one."""
    options = {"dtype": getattr(torch, described["dtype"])} if described["dtype"] else {}
    made = comfy.controlnet.load_controlnet(described["path"], None, options)
    if made is None:
        raise Refused("file.unloadable", path=described["path"], reason="ComfyUI finds no ControlNet in it")
    if described["dtype"]:
        dtypes = f"{made.control_model.dtype}, {made.manual_cast_dtype}".replace("torch.", "")
        expected = f"{described['dtype']}, {described['computed']}"
        if dtypes != expected:
            raise Refused("model.dtype", dtype=dtypes, expected=expected)
        offload_device = comfy.model_management.unet_offload_device()
        made.control_model_wrapped = _FullyLoaded(made.control_model, made.load_device, offload_device)
    return made


def _load_gligen(described: dict[str, Any]) -> ModelPatcher:
    """Loads a GLIGEN model as GLIGENLoader does. Raises Refused where it has another dtype than in ComfyUI."""
    made = comfy.sd.load_gligen(described["path"])
    dtype = str(next(made.model.parameters()).dtype).removeprefix("torch.")
    if dtype != described["dtype"]:
        raise Refused("model.dtype", dtype=dtype, expected=described["dtype"])
    return _FullyLoaded(made.model, made.load_device, made.offload_device)


def _load_hypernetwork(described: dict[str, Any]) -> Any:
    """Loads a patch as HypernetworkLoader does, at strength 1."""
    made = named(HYPERNETWORK_LOADER)(described["path"], 1.0)
    if made is None:
        raise Refused("file.unloadable", path=described["path"], reason="ComfyUI finds no hypernetwork in it")
    return made


def _load_vae(described: dict[str, Any]) -> RankVAE:
    try:
        return RankVAE(native_vae(ModelSpec(**described["spec"]), described["weights"]))
    except OSError as error:
        raise Refused("vae.file", error=str(error)) from None


LOADERS: dict[str, Callable[[dict[str, Any]], Additional]] = {
    "model_patch": _load_model_patch,
    "control_net": _load_control_net,
    "gligen": _load_gligen,
    "hypernetwork": _load_hypernetwork,
    "vae": _load_vae,
}


def _alike(name: str) -> Callable[..., Tensor]:
    """Returns ComfyUI's method of this name, which neither unloads others nor tiles where memory is short here."""

    def method(self: VAE, *args: Any, **kwargs: Any) -> Tensor:
        management = vars(comfy.model_management)
        before = {decision: management[decision] for decision in OWN_DECISIONS if decision in management}
        management.update({decision: OWN_DECISIONS[decision] for decision in before})
        try:
            made: Tensor = getattr(VAE, name)(self, *args, **kwargs)
        finally:
            management.update(before)
        return made

    return method


class RankVAE(VAE):
    """A VAE that encodes alike on all ranks, whatever memory each has: fully on the device, one picture after another,
    and not once more in tiles. It keeps what it has encoded last: each evaluation may ask for that again."""

    _encode_alike = _alike("encode")
    decode, decode_tiled, encode_tiled = map(_alike, ("decode", "decode_tiled", "encode_tiled"))

    def __init__(self, native: VAE) -> None:
        self.__dict__.update(vars(native))
        network = self.first_stage_model.requires_grad_(False)
        self.patcher = _FullyLoaded(network, self.device, comfy.model_management.vae_offload_device())
        self._encoded: dict[str, Tensor] = {}
        if world_size() > 1:
            self.memory_used_encode = self.memory_used_decode = lambda *_, **__: math.inf

    def encode(self, pixel_samples: Tensor) -> Tensor:
        key = fingerprint(str(pixel_samples.shape), pixel_samples)
        if key not in self._encoded:
            self._encoded[key] = self._encode_alike(pixel_samples)
        for oldest in list(self._encoded)[:-KEPT_PICTURES]:
            del self._encoded[oldest]
        return self._encoded[key].clone()


class _Unsettled(Mapped):
    """A model whose weights keep the file's dtype, since its code may depend on it."""

    def settle(self, module: torch.nn.Module) -> None:
        pass


class _FullyLoaded(ModelPatcher):
    """A model that is always fully on the device; ComfyUI alone would go by each rank's free memory."""

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        loaded: int = super().partially_load(device_to, UNLIMITED_BYTES, force_patch_weights)
        return loaded

    def partially_unload(self, device_to: torch.device, memory_to_free: int = 0, **_: Any) -> int:
        return 0
