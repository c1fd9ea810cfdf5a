"""What CP nodes do with a workflow, read off the workflow alone: its network by its file's name, patches by their
nodes.

What is not known here is said to be unknown, so that a newer package of workflows cannot pass for an older one.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from parallel_runtime.architectures import ARCHITECTURES
from parallel_runtime.commands.migrate import REPLACEMENTS

from .stock_canvas import BYPASSED, Canvas, Place

Outcome = Literal["not known", "undivided", "by groups", "divided"]
WORST_FIRST = get_args(Outcome)
OURS = set(REPLACEMENTS.values())
PLANNED = {kind.partition(":")[2] for network in ARCHITECTURES for kind in network.kinds}

LOADERS = {
    "UNETLoader", "CheckpointLoaderSimple", "ImageOnlyCheckpointLoader", "unCLIPCheckpointLoader", "CheckpointLoader",
}  # fmt: skip
FILES: tuple[tuple[str, str], ...] = (  # the class of ComfyUI's that files of such names hold; the first that fits
    (r"hidream_o1", "HiDreamO1Transformer"),
    (r"hidream", "HiDreamImageTransformer2DModel"),
    (r"^pid_", "PidNet"),
    (r"pixeldit", "PixDiT_T2I"),
    (r"chroma.?radiance", "ChromaRadiance"),
    (r"chroma", "Chroma"),
    (r"krea.?2", "SingleStreamDiT"),
    (r"qwen.image.2\.1", "QwenImage21Transformer2DModel"),
    (r"qwen.image|firered", "QwenImageTransformer2DModel"),
    (r"ming_image|z_image|newbie|netayume|lumina", "NextDiT"),
    (r"anima-|anima_", "Anima"),
    (r"animate.?2", "WanAnimate2Model"),
    (r"wan.*animate", "AnimateWanModel"),
    (r"scail_?2", "SCAIL2WanModel"),
    (r"scail", "SCAILWanModel"),
    (r"s2v", "WanModel_S2V"),
    (r"humo", "HumoWanModel"),
    (r"dancer", "WanDancerModel"),
    (r"vace", "VaceWanModel"),
    (r"wan.*camera", "CameraWanModel"),
    (r"causal_forcing|self_forcing", "CausalWanModel"),
    (r"wan|chrono_edit", "WanModel"),
    (r"void_pass", "CogVideoXTransformer3DModel"),
    (r"minimax_h3|fasth3", "MiniMaxH3Model"),
    (r"sensenova", "SenseNovaU15"),
    (r"pixal3d|trellis", "Trellis2"),
    (r"minimax_music", "MiniMaxMusic3DiT"),
    (r"hunyuan.?3d.*2\.1", "HunYuanDiTPlain"),
    (r"hunyuan.?3d", "Hunyuan3Dv2"),
    (r"hunyuan_?video|capybara", "HunyuanVideo"),
    (r"kandinsky5", "Kandinsky5"),
    (r"ernie.image", "ErnieImageModel"),
    (r"boogu", "BooguTransformer2DModel"),
    (r"omnigen2", "OmniGen2Transformer2DModel"),
    (r"lens", "LensTransformer2DModel"),
    (r"ideogram4", "Ideogram4Transformer2DModel"),
    (r"mage_flow", "MageFlowTransformer2DModel"),
    (r"joyai", "JoyImageTransformer3DModel"),
    (r"ltx-2", "LTXAVModel"),
    (r"ltx", "LTXVModel"),
    (r"ace_?step_v?1\.5", "AceStepConditionGenerationModel"),
    (r"ace_?step", "ACEStepTransformer2DModel"),
    (r"stable.audio", "AudioDiffusionTransformer"),
    (r"seedvr2", "NaDiT"),
    (r"triposplat", "LatentSeqMMFlowModel"),
    (r"sd3", "OpenAISignatureMMDITWrapper"),
    (r"flux.?3", "FLUX.3 Klein"),  # this and three more: the name of the class is not known here
    (r"moss_image", "MOSS-Image"),
    (r"fibo2", "FIBO 2"),
    (r"yue2", "YuE2"),
    (r"flux|longcat|ovis", "Flux"),
    (r"sd_?xl|svd|lotus|v1-5|sd1|sd2|dreamshaper", "UNetModel"),
)

HONOURED = {  # on the way of a MODEL: the workers have what they put there
    "LoraLoaderModelOnly", "LoraLoader", "ModelSamplingSD3", "ModelSamplingAuraFlow", "ModelSamplingFlux",
    "ModelNoiseScale", "CFGNorm", "CFGZeroStar", "CFGOverride", "EasyCache", "DifferentialDiffusion",
    "LatentApplyOperationCFG", "SkipLayerGuidanceDiT", "SkipLayerGuidanceDiTSimple", "VideoLinearCFGGuidance",
    "UNetTemporalAttentionMultiply", "ScaleROPE", "ContextWindowsManual", "ChromaRadianceOptions",
    "HiDreamO1PatchSeamSmoothing", "LTXVReferenceAudio", "WanAnimate2Cache", "ARVideoI2V", "USOStyleReference",
    "QwenImageDiffsynthControlnet", "ZImageFunControlnet", "AnimaLLLiteApply", "NAGuidance", "ModelAttentionBackend",
    "TripoSplatSamplingPreview", "ComfySwitchNode", "Reroute", "RescaleCFG", "TemporalScoreRescaling",
    "QwenImage21Cache", "BlockSparseAttention", "MiniMaxH3SigmaShift", "MiniMaxH3FunControlNetApply",
}  # fmt: skip
WHOLE = {
    "FluxKVCache": "attn1_patch of KV_Attn_Input",
    "WanInfiniteTalkToVideo": "attn1_patch of MultiTalkGetAttnMapPatch, for two speakers",
    "HyperTile": "attn1_patch of HyperTile",
    "SamplerARVideo": "sample_ar_video keeps keys of earlier frames",
}
GUIDES_ALONE = {"BasicGuider"}  # one prompt
# Which of a node's widgets it is.
CFG = {"CPSampler": 3, "CPSamplerAdvanced": 4, "CPSamplerCustomBasic": 3, "CFGGuider": 0}


@dataclass(frozen=True, order=True)
class Verdict:
    """Of one sampler; the worst of a workflow's sorts first."""

    rank: int
    network: str
    why: str = ""

    @property
    def outcome(self) -> Outcome:
        return WORST_FIRST[self.rank]


def verdicts(workflow: dict[str, Any]) -> list[Verdict]:
    """Of every CP sampler in a workflow that was swapped, the worst first."""
    canvas = Canvas.of(workflow)
    return sorted(_verdict(canvas, place) for place in canvas.of_type(OURS))


def class_of(file: str) -> str:
    """Of the network in a file of this name; "" where that does not tell."""
    name = os.path.basename(file.replace("\\", "/")).lower()
    return next((kind for pattern, kind in FILES if re.search(pattern, name)), "")


def _verdict(canvas: Canvas, sampler: Place) -> Verdict:
    guiders = list(canvas.feeding(sampler, "guider"))
    behind = [place for guider in guiders for place in canvas.feeding(guider, "model", "model_negative")]
    models = canvas.upstream(iter([*canvas.feeding(sampler, "model"), *behind]), "MODEL")
    model_types = _types(canvas, models)
    files = [_file(canvas, place) for place in models if canvas.nodes[place]["type"] in LOADERS]
    kinds = sorted({class_of(file) or f"? ({file})" for file in files}) or ["?"]
    network = " and ".join(kinds)

    def verdict(outcome: Outcome, why: str = "") -> Verdict:
        return Verdict(WORST_FIRST.index(outcome), network, why)

    prompts = canvas.upstream(_prompts(canvas, sampler, guiders), "CONDITIONING")
    algorithms = list(canvas.feeding(sampler, "sampler"))
    everything = {*model_types, *_types(canvas, [*prompts, *algorithms, *guiders])}
    if strangers := sorted(model_types - HONOURED - LOADERS - WHOLE.keys()):
        return verdict("not known", f"{', '.join(strangers)} on the way of MODEL")
    if any(kind.startswith("?") for kind in kinds):
        return verdict("not known", "the file's name does not tell its network")
    whole = sorted(everything & WHOLE.keys() if kinds != ["UNetModel"] else ())  # patches there see all rows
    unplanned = [kind for kind in kinds if kind not in PLANNED]
    if whole or unplanned:
        why = f"{unplanned[0]} has no plan" if unplanned else WHOLE[whole[0]]
        by_groups = not whole and _guided(canvas, sampler, guiders)
        return verdict("by groups" if by_groups else "undivided", why)
    return verdict("divided")


def _prompts(canvas: Canvas, sampler: Place, guiders: list[Place]) -> Any:
    names = ("positive", "negative", "conditioning", "cond1", "cond2")
    return (source for place in (sampler, *guiders) for source in canvas.feeding(place, *names))


def _types(canvas: Canvas, places: list[Place]) -> set[str]:
    return {canvas.nodes[place]["type"] for place in places if canvas.nodes[place].get("mode") != BYPASSED}


def _file(canvas: Canvas, loader: Place) -> str:
    values = canvas.nodes[loader].get("widgets_values") or ["?"]
    return str(next(iter(values.values())) if isinstance(values, dict) else values[0])


def _guided(canvas: Canvas, sampler: Place, guiders: list[Place]) -> bool:
    """Are several prompts evaluated a step? Where a link brings the cfg, they may be."""
    for place in guiders or [sampler]:
        node = canvas.nodes[place]
        if node["type"] in GUIDES_ALONE:
            continue
        values, at = node.get("widgets_values") or [], CFG.get(node["type"])
        if at is None or not isinstance(values, list) or at >= len(values) or values[at] != 1:
            return True
    return False
