"""The models that ComfyUI loads besides a MODEL's own network: those of Load Model Patch, ControlNets, the VAEs that
encode pictures for both, GLIGEN and hypernetworks; and how the ControlNets of one run are divided on this rank.

Each is loaded by ComfyUI's own code, once per file, and kept while any of this rank's models used it in its last job.

ComfyUI's own loop calls the ControlNets. The entries of a batch are divided over batch groups, and the forward over the
ranks of one sequence, like the network that the residuals are added to. In a run with a UNet all residuals are this
rank's rows: full ones are split before they are added to others."""

from __future__ import annotations

import logging
import math
import os
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

import comfy.controlnet
import comfy.model_management
import comfy.sd
import folder_paths
import torch
from comfy.controlnet import ControlBase, ControlLora, T2IAdapter
from comfy.gligen import Gligen
from comfy.model_patcher import ModelPatcher
from comfy.sd import VAE
from torch import Size, Tensor, nn

from ...architectures import control_plan_of
from ...architectures.row_plan import ControlRowPlan
from ...architectures.split_plan import SplitPlan
from ...engine.comm.collectives import refuse_on_all_ranks
from ...engine.comm.mesh import MeshDim
from ...engine.comm.ranks import rank, world_size
from ...engine.parallelize import parallelize_control, unparallelize
from ...engine.rows.row_division import RowDivision, split_residuals
from ...engine.split.streams import PARALLELIZED
from ...errors import Refused
from ...loading.code_names import named
from ...loading.fingerprint import fingerprint
from ...loading.mapped import Mapped, load_mapped, with_attributes
from ...loading.object_codec import LoadAdditional
from ...specs import ModelSpec, SourceFile
from ..batch_groups import local_entries, select_entries
from ..models import Model, check_files
from .autoencoder import native_vae
from .patcher import UNLIMITED_BYTES, unload

log = logging.getLogger(__name__)

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
            if isinstance(loaded, ControlLora):
                yield from loaded.control_weights.values()
            elif isinstance(loaded, T2IAdapter):
                yield from loaded.t2i_model.parameters()
            elif isinstance(loaded, ModelPatcher):
                yield from loaded.model.parameters()
            elif isinstance(loaded, VAE):
                yield from loaded.first_stage_model.parameters()
            elif isinstance(loaded, ControlBase):
                yield from loaded.control_model.parameters()
            else:
                for layers in loaded.hypernet.values():
                    yield from layers.parameters()

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
            loaded = before[key]
            if isinstance(loaded, ControlBase):
                for patcher in loaded.get_models():
                    unload(patcher)
            elif isinstance(loaded, ModelPatcher | VAE):  # a hypernetwork goes along with its MODEL
                unload(getattr(loaded, "patcher", loaded))

    def _load(self, used: dict[Key, Additional], described: dict[str, Any]) -> Additional:
        """Returns the model of one file. Collective where it is not loaded yet. Raises Refused for a changed file."""
        key: Key
        if described["kind"] == "vae":
            key = ModelSpec(**described["spec"]), ""
        else:
            file = SourceFile(path=described["path"], size=described["size"], mtime_ns=described["mtime_ns"])
            key = file, described.get("dtype", "")
        known = ChainMap(used, *self._used.values())
        if key not in known:
            with refuse_on_all_ranks():
                if isinstance(key[0], SourceFile):
                    check_files([key[0]])
                used[key] = _loaded(described)
        used[key] = known[key]
        return used[key]


def _loaded(described: dict[str, Any]) -> Additional:
    """Loads one model as ComfyUI's loader nodes do. Raises Refused where it has another dtype than in ComfyUI."""
    if described["kind"] == "vae":
        try:
            return RankVAE(native_vae(ModelSpec(**described["spec"]), described["weights"]))
        except OSError as error:
            raise Refused("vae.file", error=str(error)) from None
    path, made = described["path"], None
    match described["kind"]:
        case "model_patch":
            # ComfyUI's loader finds the file by name in the first folder that has it, so the folder is put first.
            folder, name = os.path.split(path)
            folder_paths.add_model_folder_path(FOLDER, folder, is_default=True)
            load = named(LOADER)().load_model_patch
            try:  # with weights assigned from the file, or copied, as in ComfyUI
                return load_mapped(_Unsettled, load, [name], 0) if described["assigned"] else load(name)[0]
            except FileNotFoundError as missing:
                raise Refused("patch.missing", path=path, reason=str(missing)) from None
        case "gligen":
            made = comfy.sd.load_gligen(path)
            _check_dtype(str(next(made.model.parameters()).dtype), described["dtype"])
            return _FullyLoaded(made.model, made.load_device, made.offload_device)
        case "hypernetwork":
            made = named(HYPERNETWORK_LOADER)(path, 1.0)
        case "control_net":
            options = {"dtype": getattr(torch, described["dtype"])} if described["dtype"] else {}
            made = comfy.controlnet.load_controlnet(path, None, options)
            if made is not None and described["dtype"]:
                expected = f"{described['dtype']}, {described['computed']}"
                _check_dtype(f"{made.control_model.dtype}, {made.manual_cast_dtype}", expected)
                offload_device = comfy.model_management.unet_offload_device()
                made.control_model_wrapped = _FullyLoaded(made.control_model, made.load_device, offload_device)
    if made is None:
        what = "ControlNet" if described["kind"] == "control_net" else "hypernetwork"
        raise Refused("file.unloadable", path=path, reason=f"ComfyUI finds no {what} in it")
    return made


def _check_dtype(found: str, expected: str) -> None:
    if (dtype := found.replace("torch.", "")) != expected:
        raise Refused("model.dtype", dtype=dtype, expected=expected)


def _alike(name: str) -> Callable[..., Tensor]:
    """Returns ComfyUI's method of this name, which neither unloads others nor tiles where memory is short here."""

    def method(self: VAE, *args: Any, **kwargs: Any) -> Tensor:
        own = {one: value for one, value in OWN_DECISIONS.items() if hasattr(comfy.model_management, one)}
        with with_attributes(comfy.model_management, **own):
            made: Tensor = getattr(VAE, name)(self, *args, **kwargs)
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


@contextmanager
def own_entries(controls: Iterable[ControlBase], dim: MeshDim) -> Iterator[None]:
    """Has the networks of these ControlNets, which a run has prepared, compute only the entries of this batch group in
    this context."""

    # The network's own call, not `get_control`, gets fewer entries: that would cut the batch of hints.
    def select(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        batch = len(kwargs["x"] if "x" in kwargs else args[0])
        entries = local_entries(dim, batch)
        return select_entries(args, entries, batch), select_entries(kwargs, entries, batch)

    with ExitStack() as hooks:
        for network in _by_network(controls) if dim.size > 1 else ():
            hooks.enter_context(network.register_forward_pre_hook(select, with_kwargs=True))
        yield


@contextmanager
def divided(controls: Iterable[ControlBase], model: Model) -> Iterator[None]:
    """Has the networks of these ControlNets, which a run has prepared, run over the context ranks of the `model` in
    this context."""
    # And no longer: in the next run these ranks may have different prompts, which would be mixed silently.
    with ExitStack() as undo:
        if model.parallelism.splits_tokens:
            users, division = _by_network(controls), getattr(model.network, PARALLELIZED)
            plans = {network: _plan_of(network, own, division) for network, own in users.items()}
            undivided = [network for network, plan in plans.items() if plan is None]
            by_rows = isinstance(division, RowDivision)
            for network in undivided if by_rows else ():
                for control in users[network]:
                    _split_by_rows(undo, control, division)
            # Without rows the full residuals of an undivided one would be added to parts of others.
            for network, plan in plans.items() if by_rows or not undivided else ():  # in the same order on all ranks
                if plan is not None:
                    parallelize_control(network, plan, model.network, model.mesh, model.parallelism)
                    undo.callback(unparallelize, network)
        yield


def _by_network(controls: Iterable[ControlBase]) -> dict[nn.Module, list[ControlBase]]:
    """Returns the ControlNets of each network; a Control-LoRA has one only in a run that has begun."""
    users: dict[nn.Module, list[ControlBase]] = {}
    for control in controls:
        network = getattr(control, "t2i_model", None) or getattr(control, "control_model", None)
        if network is not None:
            users.setdefault(network, []).append(control)
    return users


def _plan_of(network: nn.Module, users: Sequence[ControlBase], division: Any) -> SplitPlan | None:
    """Returns the plan of a ControlNet to divide; None, with a line in the log, where all ranks compute it."""
    plan, reason = control_plan_of(network), ""
    if plan is None or isinstance(plan, ControlRowPlan) != isinstance(division, RowDivision):
        reason = f"nothing is known of how to divide a {type(network).__name__}"
    elif any(control.global_average_pooling for control in users):
        reason = "it takes means over the whole picture"
    elif isinstance(plan, ControlRowPlan) and (depth := plan.depth(network) - plan.hint_halvings) != division.depth:
        reason = f"it halves the latent {depth} times, and the network {division.depth} times"
    if not reason:
        return plan
    if rank() == 0 and not isinstance(users[0], T2IAdapter):  # which is computed once a run
        log.warning("[CP] a ControlNet (%s) runs undivided on each rank: %s", type(users[0]).__name__, reason)
    return None


def _split_by_rows(undo: ExitStack, control: ControlBase, division: RowDivision) -> None:
    """Has an undivided ControlNet or T2I adapter return this rank's rows of its residuals until `undo` is closed."""
    get, merge, latents = control.get_control, control.control_merge, list[Size]()

    def get_control(x_noisy: Tensor, *args: Any, **kwargs: Any) -> Any:
        latents[:] = [x_noisy.shape]
        return get(x_noisy, *args, **kwargs)

    def control_merge(residuals: Any, previous: Any, output_dtype: Any) -> Any:
        full, levels = merge(residuals, None, output_dtype), division.levels_of(latents[0])
        own = full if levels is None else split_residuals(full, levels)
        return ControlBase().control_merge(own, previous, None)

    for method in (get_control, control_merge):
        setattr(control, method.__name__, method)
        undo.callback(delattr, control, method.__name__)
