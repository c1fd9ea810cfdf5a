"""A graph around one node of ComfyUI's: every socket has its source, every widget its default, and what the node makes
goes to a sampler, KSampler or ours."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .client import Graph
from .graphs import Parallel

Info = Mapping[str, Any]  # of a node, from /object_info
MADE = ("MODEL", "CONDITIONING", "LATENT", "GUIDER", "SAMPLER", "SIGMAS", "NOISE")
FOR_A_GUIDER = ("GUIDER", "SAMPLER", "SIGMAS", "NOISE")  # what KSampler has no socket for
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "FLOAT,INT")
HEIGHT, WIDTH, STEPS, TEXT = 128, 192, 3, "a lighthouse in the rain"
SMALL: dict[str, Any] = {  # widgets whose defaults are too large for a test, or name layers that a tiny network lacks
    **dict.fromkeys(("width", "target_width", "ref_max_size", "target_resolution", "resolution"), WIDTH),
    **dict.fromkeys(("height", "target_height"), HEIGHT),
    **dict.fromkeys(("length", "video_frames", "frames_number"), 5),
    **dict.fromkeys(("layers", "double_layers", "single_layers"), "1"),
    **dict.fromkeys(("seconds", "duration"), 2.0),
    "batch_size": 2, "steps": STEPS, "step": 1, "num_gaussians": 256, "block_number": 1, "blocks": "0",
    "start_frame_count": 1, "reference_frame_count": 2,
}  # fmt: skip
KINDS = {int: "INT", float: "FLOAT", str: "STRING"}
_nonces = itertools.count(1)


class Lacking(Exception):
    """No bench has a source of this type."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Bench:
    """A network with what belongs to it. `loader` makes its MODEL, `text` is the `spec` of CPTestConditioning without
    its tokens, `gives` are sources by type, or by type and socket; `widgets` are values for widgets of these names."""

    name: str
    loader: dict[str, Any]
    text: Mapping[str, Any]
    latent: str
    parallel: Parallel
    tokens: tuple[int, int] = (7, 12)
    cfg: float = 2.0
    gives: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    widgets: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One node on one bench; `filled`: its optional sockets have sources, too."""

    node: str
    bench: Bench
    filled: bool = True

    def graph(self, info: Info, parallel: Parallel | None, *, moved: bool = False) -> Graph:
        """Natively where there is no `parallel`; `moved`: with noise and latent moved by one unit in the last place."""
        return _Drawing(self, info).drawn(parallel, moved)


def wanted(info: Info) -> list[str]:
    """ComfyUI's own nodes that make something that goes into a sampler."""
    own = (name for name, node in info.items() if not node["python_module"].startswith("custom_nodes."))
    return sorted(name for name in own if set(MADE) & {str(made) for made in info[name]["output"]})


def covering(info: Info, trials: Sequence[Trial]) -> list[Trial]:
    """Few of them, with every kind of socket that goes into or out of any of them, on every bench."""
    chosen: list[Trial] = []
    kinds = {trial: {(trial.bench.name, *kind) for kind in _kinds(info[trial.node])} for trial in trials}
    missing = set().union(*kinds.values())
    while missing:
        best = max(trials, key=lambda trial: len(kinds[trial] & missing))
        missing -= kinds[best]
        chosen.append(best)
    return sorted(chosen, key=trials.index)


def _kinds(node: Info) -> set[tuple[str, str]]:
    """Of sockets, with the side that they are on."""
    specs = [spec for group in ("required", "optional") for spec in node["input"].get(group, {}).values()]
    grown = [next(iter(spec[1]["template"]["input"]["required"].values())) for spec in specs if "template" in spec[-1]]
    taken = {str(spec[0]) for spec in [*specs, *grown] if not isinstance(spec[0], list) and spec[0] not in WIDGETS}
    return {("taken", kind) for kind in taken} | {("made", str(kind)) for kind in node["output"]}


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


class _Drawing:
    """The graph of one trial, as it grows."""

    def __init__(self, trial: Trial, info: Info) -> None:
        self.trial, self.bench, self.info = trial, trial.bench, info
        self.graph: Graph = {"MODEL": self.bench.loader}
        self.counts: dict[str, int] = {}

    def drawn(self, parallel: Parallel | None, moved: bool) -> Graph:
        made = self._made()
        if moved and "GUIDER" in made:
            self.graph |= {"loaded": self.bench.loader, "MODEL": node("CPTestOneUlp", model=["loaded", 0])}
        self.graph["tried"] = node(self.trial.node, **dict(self._inputs(self.info[self.trial.node]["input"])))
        model = made.get("MODEL", [["MODEL", 0]])[0]
        if moved and "GUIDER" not in made:
            self.graph["moved"], model = node("CPTestOneUlp", model=model), ["moved", 0]
        texts = made.get("CONDITIONING", [])
        ends = {
            "model": model,
            "positive": texts[0] if texts else self._text("positive"),
            "negative": texts[1] if len(texts) > 1 else self._text("negative"),
            "latent_image": made["LATENT"][0] if "LATENT" in made else self._source("LATENT", "latent_image"),
        }
        custom = any(kind in made for kind in FOR_A_GUIDER)
        inputs = self._advanced(made, ends) if custom else ends | _WIDGETS_OF_KSAMPLER | {"cfg": self.bench.cfg}
        names = ("SamplerCustomAdvanced", "CPSamplerCustom") if custom else ("KSampler", "CPSampler")
        if parallel:
            self.graph["config"] = node("CPParallelConfig", **vars(parallel))
            inputs["cp_config"] = ["config", 0]
        self.graph["sampler"] = node(names[parallel is not None], **inputs)
        name = f"swept_{next(_nonces)}"
        self.graph["save"] = node("CPTestSaveLatent", samples=["sampler", 0], name=name)
        return self.graph

    def _made(self) -> dict[str, list[Any]]:
        """Where the node's outputs are, by type."""
        made: dict[str, list[Any]] = {}
        for index, kind in enumerate(self.info[self.trial.node]["output"]):
            made.setdefault(str(kind), []).append(["tried", index])
        return made

    def _advanced(self, made: dict[str, list[Any]], ends: dict[str, Any]) -> dict[str, Any]:
        guider = node(
            "CFGGuider", model=ends["model"], positive=ends["positive"], negative=ends["negative"], cfg=self.bench.cfg
        )
        others = {
            "noise": node("RandomNoise", noise_seed=7),
            "guider": guider,
            "sampler": node("KSamplerSelect", sampler_name="euler"),
            "sigmas": node("BasicScheduler", model=ends["model"], scheduler="simple", steps=STEPS, denoise=1.0),
        }
        inputs: dict[str, Any] = {"latent_image": ends["latent_image"]}
        for name, source in others.items():
            if name.upper() in made:
                inputs[name] = made[name.upper()][0]
            else:
                self.graph[f"{name} of the sampler"], inputs[name] = source, [f"{name} of the sampler", 0]
        return inputs

    def _inputs(self, sockets: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for name, spec in sockets.get("required", {}).items():
            yield from self._input(prefix + name, name, spec, needed=True)
        for name, spec in sockets.get("optional", {}).items():
            try:
                yield from list(self._input(prefix + name, name, spec, needed=False))
            except Lacking:
                continue

    def _input(self, key: str, name: str, spec: list[Any], *, needed: bool) -> Iterator[tuple[str, Any]]:
        kind, options = spec[0], spec[1] if len(spec) > 1 else {}
        if kind == "COMFY_DYNAMICCOMBO_V3":
            first = options["options"][0]
            yield key, first["key"]
            yield from self._inputs(first["inputs"], f"{key}.")
        elif kind == "COMFY_AUTOGROW_V3":
            yield from self._grown(key, options["template"])
        elif isinstance(kind, list) or kind in WIDGETS:
            yield key, self._widget(name, kind, options)
        elif needed or self.trial.filled:
            yield key, self._source(kind, name)

    def _grown(self, key: str, template: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """As many sockets as are needed, or two."""
        ((_, spec),) = template["input"]["required"].items()
        count = max(template["min"], 2 if self.trial.filled else 0)
        names = template.get("names") or [f"{template['prefix']}{index}" for index in range(count)]
        for name in names[:count]:
            yield f"{key}.{name}", self._source(spec[0], name)

    def _widget(self, name: str, kind: Any, options: dict[str, Any]) -> Any:
        if name in self.bench.widgets:
            return self.bench.widgets[name]
        choices = kind if isinstance(kind, list) else options.get("options")
        if choices is not None:
            if not choices:
                raise Lacking(f"a file for {name}")
            return options.get("default", choices[0])
        if name in SMALL and kind == KINDS[type(SMALL[name])]:
            return max(SMALL[name], options.get("min", SMALL[name]))
        return options.get("default", TEXT if kind == "STRING" else 0)

    def _source(self, kind: str, name: str) -> list[Any]:
        """A link to a source of that type: texts and latents are others for every socket."""
        if kind == "CONDITIONING":
            return self._text(name)
        count = self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind == "LATENT" and f"{kind} {name}" not in self.bench.gives:
            self.graph[f"LATENT {count}"] = node(
                "CPTestLatent", shape=self.bench.latent, seed=count, masked=False, nonce=0
            )
            return [f"LATENT {count}", 0]
        own = f"{kind} {name}"
        key = own if own in self.bench.gives else kind
        if key not in self.graph:
            self.graph[key] = self._linked(self.bench.gives.get(key) or SOURCES.get(key) or self._lacking(kind))
        return [key, 0]

    def _linked(self, source: dict[str, Any]) -> dict[str, Any]:
        """The source, with sources for the types that it links to."""
        inputs = source["inputs"].items()
        linked = {name: self._source(value[0], name) if isinstance(value, list) else value for name, value in inputs}
        return node(source["class_type"], **linked)

    def _lacking(self, kind: str) -> dict[str, Any]:
        raise Lacking(f"a source of {kind}")

    def _text(self, name: str) -> list[Any]:
        count = self.counts["CONDITIONING"] = self.counts.get("CONDITIONING", 0) + 1
        spec = dict(self.bench.text) | {"tokens": self.bench.tokens["negative" in name]}
        self.graph[f"text {name}"] = node("CPTestConditioning", spec=json.dumps(spec), seed=1000 * count)
        return [f"text {name}", 0]


_WIDGETS_OF_KSAMPLER = {
    "seed": 7, "steps": STEPS, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
}  # fmt: skip
SOURCES: dict[str, dict[str, Any]] = {
    "IMAGE": node("CPTestPictures", shape=f"2,{HEIGHT},{WIDTH},3", seed=6, nonce=0),
    "MASK": node("ImageToMask", image=["IMAGE", 0], channel="red"),
    "AUDIO": node("CPTestSound", seconds=2.0, rate=16000, seed=3),
    "AUDIO_ENCODER_OUTPUT": node("CPTestHeard", steps=30, seed=4),
    "LATENT_OPERATION": node("LatentOperationSharpen", sharpen_radius=9, sigma=1.0, alpha=0.1),
    "TIMESTEPS_RANGE": node("ConditioningTimestepsRange", start_percent=0.2, end_percent=0.8),
    "WAN_CAMERA_EMBEDDING": node(
        "WanCameraEmbedding", camera_pose="Pan Up", width=WIDTH, height=HEIGHT, length=5, speed=1.0, fx=0.5, fy=0.5,
        cx=0.5, cy=0.5,
    ),
    "GUIDER": node(
        "CFGGuider", model=["MODEL", 0], positive=["CONDITIONING", 0], negative=["CONDITIONING", 0], cfg=2.0
    ),
    "SAMPLER": node("KSamplerSelect", sampler_name="euler"),
    "SIGMAS": node("BasicScheduler", model=["MODEL", 0], scheduler="simple", steps=STEPS, denoise=1.0),
    "NOISE": node("RandomNoise", noise_seed=9),
    "CONTROL_NET": node("CPTestControlNet", model=["MODEL", 0]),
}  # fmt: skip
