"""Makes the API graph of any workflow small by rules: tiny networks for its files, stand-ins for what loads other
models or asks a service, small sizes, few steps, and the latent of every sampler saved instead of its pictures."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from .client import Graph
from .nodes_graphs import node
from .stock_graphs import samplers
from .stock_zoo import CONTROL_NETS, HEARD, PATCHES, VAES, Tiny, matching, tiny_of

Info = Mapping[str, Any]
HEIGHT, WIDTH, FRAMES, STEPS, HALF = 128, 192, 9, 4, 2
NUMBERS: dict[str, Any] = {  # what widgets of these names are, wherever they came from
    **dict.fromkeys(("width", "target_width", "resize_width", "megapixels_width"), WIDTH),
    **dict.fromkeys(("height", "target_height", "resize_height"), HEIGHT),
    **dict.fromkeys(("longer_size", "longer_edge", "largest_size", "longest_size", "size", "resolution"), WIDTH),
    **dict.fromkeys(("shorter_size", "shorter_edge", "smallest_size"), HEIGHT),
    **dict.fromkeys(("length", "frames_number", "num_frames", "video_frames", "total_frames"), FRAMES),
    **dict.fromkeys(("megapixels", "total_megapixels"), 0.0234375),
    **dict.fromkeys(("seconds", "duration", "seconds_total"), 2.0),
    **dict.fromkeys(("tile_size", "temporal_size"), 512),
    "steps": STEPS, "batch_size": 1,
}  # fmt: skip
TINY = {"CONTROL_NET": ("control_net_name", CONTROL_NETS), "MODEL_PATCH": ("name", PATCHES)}
STOOD_FOR = ("MODEL", "CLIP", "VAE", "CLIP_VISION", "STYLE_MODEL", "IMAGE", "MASK", "VIDEO", "AUDIO",
             "AUDIO_ENCODER_OUTPUT", "STRING", "INT", "FLOAT", "BOOLEAN", "LATENT")  # fmt: skip
LOADED = ("MODEL", "CLIP", "VAE", "CLIP_VISION", "STYLE_MODEL", "IMAGE", "MASK", "VIDEO", "AUDIO")
LATENT_SOUND = ("LTXVEmptyLatentAudio", "LTXVAudioVAEEncode")
WRITERS = ("TextGenerate", "TextGenerateLTX2Prompt")  # of a text, by a language model
ONLY_PREVIEWS = ("TripoSplatSamplingPreview",)  # of a MODEL; needs the VAE's own class, and changes no latent


OF_A_MILLION_PIXELS = ("TextEncode", "LongCat", "Omni")  # nodes that begin so make their pictures as large
IN_PLACE_OF = {
    "FluxKontextImageScale": (
        "ImageScale",
        {"upscale_method": "area", "width": WIDTH, "height": HEIGHT, "crop": "center"},
    )
}
ANY = ("*", "COMFY_MATCHTYPE_V3")


class NotSmall(Exception):
    """What the rules do not cover, in words."""


class Small:
    """One workflow as it is made small. `stood_for` says which nodes are replaced by a stand-in of their output."""

    def __init__(self, graph: Graph, info: Info, name: str) -> None:
        self.full, self.info, self.name = graph, info, name
        self.graph: Graph = {}
        self.stood_for: set[str] = set()
        self.tiny: dict[str, Tiny] = {}  # by the loader's node

    def drawn(self) -> Graph:
        for sampler in samplers(self.full):
            self._node(sampler)
            self.graph[f"save {sampler}"] = node(
                "CPTestSaveLatent", samples=[sampler, 0], name=f"{zlib.crc32(self.name.encode())}_{sampler}"
            )
        return self.graph

    @property
    def networks(self) -> list[Tiny]:
        return list({tiny.file: tiny for tiny in self.tiny.values()}.values())

    def _node(self, name: str) -> None:
        if name in self.graph:
            return
        call = self.full[name]
        kind, more = IN_PLACE_OF.get(call["class_type"], (call["class_type"], {}))
        self.graph[name] = node(kind, **more)
        inputs = self.graph[name]["inputs"]
        kinds = dict(_sockets(self.info[call["class_type"]]["input"]))
        for key, value in call["inputs"].items():
            kind = kinds.get(key) or kinds.get(key.rpartition(".")[2], "*")
            small = self._number(call, key)
            if small is not None:
                inputs[key] = small
            elif _is_link(value) and value[0] in self.full:
                inputs[key] = self._link(value, kind, name)
            elif not _is_link(value):
                inputs[key] = value
        self._files(name, call["class_type"], inputs)

    def _number(self, call: Mapping[str, Any], key: str) -> Any:
        short = key.rpartition(".")[2]
        if short == "start_at_step":
            return 0 if call["inputs"][key] == 0 else HALF
        if short == "end_at_step":
            value, steps = call["inputs"][key], call["inputs"].get("steps")
            whole = isinstance(value, int) and isinstance(steps, int) and value >= steps
            return 10000 if value == 10000 or whole else HALF
        if short == "step" and call["class_type"] == "SplitSigmas":
            return HALF
        value = call["inputs"][key]
        if short in ("sampler_name", "scheduler"):
            options = _options(self.info[call["class_type"]]["input"], key)
            return options[0] if isinstance(value, str) and options and value not in options else None
        if call["class_type"] == "Video Slice" and short == "duration":
            return 0.3  # of FRAMES at 24 a second
        if call["class_type"] == "RepeatImageBatch" and short == "amount":
            return FRAMES
        if isinstance(value, str | bool) or short not in NUMBERS:
            return None
        least = _least(self.info[call["class_type"]]["input"], key)
        return max(NUMBERS[short], least) if short != "length" or "Audio" not in call["class_type"] else None

    def _link(self, link: list[Any], kind: str, consumer: str) -> Any:
        source, slot = link
        call = self.full[source]
        if call["class_type"] in ONLY_PREVIEWS:
            self.stood_for.add(call["class_type"])
            return self._link(call["inputs"]["model"], kind, consumer)
        made = self._made(source, slot, kind)
        if not self._stands_for(source, made):
            self._node(source)
            return link
        if call["class_type"] in self.info and not self._is_loader(source):
            self.stood_for.add(call["class_type"])
        elif call["class_type"] not in self.info:
            self.stood_for.add(str(call["class_type"] or "a node that is not installed"))
        return self._stand_in(source, made, consumer)

    def _made(self, source: str, slot: int, kind: str) -> str:
        """The type of an output; where it is any type, that of the socket it goes into."""
        outputs = self.info.get(self.full[source]["class_type"], {}).get("output", [])
        made = str(outputs[slot]) if slot < len(outputs) else kind
        return kind if made in ANY else made

    def _is_loader(self, name: str) -> bool:
        return not any(_is_link(value) for value in self.full[name]["inputs"].values())

    def _stands_for(self, name: str, made: str) -> bool:
        """Is this node replaced: a loader of a model, a node that needs a model of which there is no tiny one, a
        partner's node or another pack's?"""
        call = self.full[name]
        kind = call["class_type"]
        if kind in (*LATENT_SOUND, *WRITERS, "VOIDWarpedNoise") or kind not in self.info:
            return True
        if kind == "Painter" and call["inputs"].get("mask"):  # a file that the page wrote
            return True
        if self.info[kind]["python_module"].startswith("comfy_api_nodes"):
            return True
        if kind.startswith("Primitive") or kind in ("EmptyImage", "SolidMask", "CustomCombo"):
            return False
        if self._is_loader(name):
            return made in LOADED or ("oad" in kind and made not in TINY)
        return any(_is_link(value) and self._lacks(value) for value in call["inputs"].values())

    def _lacks(self, link: list[Any]) -> bool:
        """Is this an output without a stand-in, of a node that is replaced?"""
        if link[0] not in self.full:
            return False
        made = self._made(*link, "*")
        if made == "MODEL" and self._is_loader(link[0]):
            return self._is_no_sampler(link[0])
        return made not in (*STOOD_FOR, *ANY) and self._stands_for(link[0], made)

    def _is_no_sampler(self, loader: str) -> bool:
        """Does this file hold a network that finds or measures things, and never samples?"""
        try:
            tiny_of(self._file(loader))
        except LookupError as lacking:
            return "no network that samples" in str(lacking)
        return False

    def _file(self, loader: str) -> str:
        texts = (value for value in self.full[loader]["inputs"].values() if isinstance(value, str))
        return next(iter(texts), "")

    def _stand_in(self, source: str, made: str, consumer: str) -> Any:
        call = self.full[source]
        if made == "STRING":
            return "a lighthouse in the rain"
        if made in ("INT", "FLOAT", "BOOLEAN"):
            return {"INT": 1, "FLOAT": 1.0, "BOOLEAN": False}[made]
        name = f"{made} for {source}"
        if made == "VAE" and self.full[consumer]["class_type"].startswith(OF_A_MILLION_PIXELS):
            self.graph[f"{name}, coarse"] = _coarse(self._vae(source))
            return [f"{name}, coarse", 0]
        if made == "VIDEO":
            self.graph[f"frames for {source}"] = _pictures(FRAMES, source)
            self.graph[name] = node("CreateVideo", images=[f"frames for {source}", 0], fps=24.0)
        elif made == "MASK":
            self.graph[name] = node("SolidMask", value=1.0, width=WIDTH, height=HEIGHT)
        elif made == "LATENT":
            self.graph[name] = self._latent(call)
        elif made == "CLIP":
            text = self._network_of(consumer, source).text
            self.graph[name] = node("CPTestText", spec=json.dumps(text))
        elif made == "MODEL":
            self.graph[name] = self._network(source)
        elif made == "VAE":
            self.graph[name] = self._vae(source)
        else:
            self.graph[name] = self._other(made, source, consumer)
        return [name, 0]

    def _other(self, made: str, source: str, consumer: str) -> dict[str, Any]:
        if made == "IMAGE":
            moving = any(self._made(*value, "*") == "VIDEO" for value in self.full[source]["inputs"].values()
                         if _is_link(value) and value[0] in self.full)  # fmt: skip
            return _pictures(FRAMES if moving else 1, source)
        if made == "AUDIO":
            return node("CPTestSound", seconds=2.0, rate=16000, seed=3)
        if made == "AUDIO_ENCODER_OUTPUT":
            layers, width = HEARD.get(self._network_of(consumer, source).name, (12, 768))
            return node("CPTestHeard", steps=30, seed=4, layers=layers, width=width)
        if made == "CLIP_VISION":
            tiny = self._network_of(consumer, source)
            return node("CPTestClipVision", width=tiny.vision, projected=tiny.vision, size=28)
        if made == "STYLE_MODEL":
            return node("CPTestStyleModel", seen=1280, width=self._network_of(consumer, source).text["dim"])
        raise NotSmall(f"there is no stand-in for {made} of {self.full[source]['class_type']}")

    def _latent(self, call: Mapping[str, Any]) -> dict[str, Any]:
        if call["class_type"] in LATENT_SOUND:
            return node("CPTestLatent", shape="1,8,11,16", seed=8, masked=0, nonce=0)
        if call["class_type"] == "VOIDWarpedNoise":
            return node("CPTestLatent", shape=f"1,16,2,{HEIGHT // 8},{WIDTH // 8}", seed=8, masked=0, nonce=0)
        samples = next((value for key, value in call["inputs"].items() if key in ("samples", "latent")), None)
        if samples is None:
            raise NotSmall(f"{call['class_type']} makes a LATENT of nothing that is known")
        self._node(samples[0])
        return node("LatentUpscaleBy", samples=samples, upscale_method="bilinear", scale_by=2.0)

    def _vae(self, loader: str) -> dict[str, Any]:
        """A checkpoint may hold a VAE of pictures and one of sound: the loader's class says which is meant."""
        try:
            matches = matching(VAES, f"{self._file(loader)} {self.full[loader]['class_type']}")
        except LookupError as lacking:
            raise NotSmall(str(lacking)) from None
        if isinstance(matches, str):
            return node("VAELoader", vae_name=matches)
        channels, pixels, frames = matches
        return node("CPTestVae", channels=channels, pixels=pixels, frames=frames)

    def _network(self, loader: str) -> dict[str, Any]:
        try:
            self.tiny[loader] = tiny_of(self._file(loader))
        except LookupError as lacking:
            raise NotSmall(str(lacking)) from None
        return node("UNETLoader", unet_name=self.tiny[loader].file, weight_dtype="default")

    def _network_of(self, consumer: str, source: str) -> Tiny:
        """That of the sampler with the fewest nodes upstream, this loader among them."""
        for sampler in sorted(samplers(self.full), key=lambda name: len(list(self._upstream(name)))):
            if source in set(self._upstream(sampler)):
                for loader in self._upstream(sampler, along="MODEL"):
                    if self._is_loader(loader) and not self._is_no_sampler(loader):
                        try:
                            return tiny_of(self._file(loader))
                        except LookupError as lacking:
                            raise NotSmall(str(lacking)) from None
        raise NotSmall(f"no MODEL goes with {self.full[source]['class_type']}")

    def _upstream(self, name: str, along: str = "") -> Iterator[str]:
        """This node and all that it is fed by; `along` MODEL: by links that carry a MODEL or a GUIDER alone."""
        seen: dict[str, None] = {}
        waiting = [name]
        while waiting:
            one = waiting.pop(0)
            if one in seen or one not in self.full:
                continue
            seen[one] = None
            for key, value in self.full[one]["inputs"].items():
                if _is_link(value) and (not along or self._carries_a_model(one, key, value)):
                    waiting.append(value[0])
        yield from list(seen)[1:]

    def _carries_a_model(self, name: str, key: str, link: list[Any]) -> bool:
        """A switch takes any type, and hands on a MODEL where its consumer takes one."""
        if link[0] not in self.full:
            return False
        sockets = dict(_sockets(self.info.get(self.full[name]["class_type"], {}).get("input", {})))
        return self._made(*link, sockets.get(key, "*")) in ("MODEL", "GUIDER", *ANY)

    def _files(self, name: str, kind: str, inputs: dict[str, Any]) -> None:
        """Names of files in widgets of nodes that stay."""
        made = [str(one) for one in self.info[kind]["output"]]
        for output, (widget, table) in TINY.items():
            if output in made and isinstance(inputs.get(widget), str):
                try:
                    inputs[widget] = f"{matching(table, inputs[widget])}.safetensors"
                except LookupError as lacking:
                    raise NotSmall(str(lacking)) from None
        if "lora_name" in inputs:
            loaders = [one for one in self._upstream(name, along="MODEL") if one in self.tiny]
            if not loaders:
                raise NotSmall(f"{kind} has no network that is known")
            inputs["lora_name"] = f"stock/{self.tiny[loaders[0]].name}.safetensors"


def small(graph: Graph, info: Info, name: str) -> Small:
    """Raises NotSmall where a rule is missing."""
    made = Small(copy.deepcopy(graph), info, name)
    try:
        made.drawn()
    except KeyError as missing:
        raise NotSmall(f"ComfyUI has no node {missing}") from None
    return made


def _sockets(inputs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for group in ("required", "optional"):
        for name, spec in inputs.get(group, {}).items():
            yield name, "COMBO" if isinstance(spec[0], list) else str(spec[0])


def _coarse(vae: dict[str, Any]) -> dict[str, Any]:
    """As that VAE, with 64 pixels a side in each latent pixel."""
    channels = vae["inputs"].get("channels", 16)
    moving = vae["inputs"].get("frames", 1) > 1 or vae["inputs"].get("vae_name", "").startswith("wan")
    return node("CPTestVae", channels=channels, pixels=64, frames=4 if moving else 1)


def _least(inputs: Mapping[str, Any], name: str) -> float:
    """The least value that this widget takes."""
    for group in ("required", "optional"):
        spec = inputs.get(group, {}).get(name, [])
        if len(spec) > 1 and isinstance(spec[1], dict) and "min" in spec[1]:
            return spec[1]["min"]
    return 0


def _options(inputs: Mapping[str, Any], name: str) -> list[str]:
    """The values that this widget offers; [] where it offers none."""
    for group in ("required", "optional"):
        spec = inputs.get(group, {}).get(name, [None])
        if isinstance(spec[0], list):
            return spec[0]
        if len(spec) > 1 and isinstance(spec[1], dict):
            return spec[1].get("options", [])
    return []


def _is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)


def _pictures(count: int, name: str) -> dict[str, Any]:
    return node("CPTestPictures", shape=f"{count},{HEIGHT},{WIDTH},3", seed=zlib.crc32(name.encode()) % 1000, nonce=0)
