"""CP Load Diffusion Model, CP Load CLIP, CP CLIP and CP VAE: a MODEL, CLIP or VAE, for every node, whose weights are in
the workers; and three small nodes of the embedded demo model: its MODEL, words to CONDITIONING, LATENT to IMAGE."""

from collections.abc import Sequence
from typing import Any

import comfy.sd
import folder_paths
from comfy_api.latest import io
from nodes import NODE_CLASS_MAPPINGS, CLIPLoader, DualCLIPLoader, UNETLoader  # type: ignore[attr-defined]  # ComfyUI's
from safetensors import SafetensorError, safe_open

from ...parallel_runtime.demo import MODEL, words_and_pictures
from ...parallel_runtime.errors import Refused
from ...parallel_runtime.loading.mapped import Mapped, calls_loader, load_by_node, load_mapped, with_views
from ...parallel_runtime.request import ParallelRequest
from ..describe import model_source
from ..describe.host import announce_refusals, request_from
from ..remote.remote_encoder import parallel_clip
from ..remote.remote_vae import checked_request, parallel_vae
from ..remote.sampling_run import model_described_late
from .cp_sampler import CATEGORY, WORKERS_INPUT, CPConfig

GGUF_NODE = "UnetLoaderGGUF"
SAFETENSORS = (".safetensors", ".sft")
NONE = "none"


class CPLoadDiffusionModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        installed = GGUF_NODE in NODE_CLASS_MAPPINGS and "unet_gguf" in folder_paths.folder_names_and_paths
        gguf = folder_paths.get_filename_list("unet_gguf") if installed else []
        return io.Schema(
            node_id="CPLoadDiffusionModel",
            display_name="CP Load Diffusion Model",
            category=CATEGORY,
            description="A MODEL whose weights are in the workers only: every sampler node, of any pack, samples it "
            "there.",
            search_aliases=["load diffusion model", "unet loader", "gguf", "multi gpu"],
            inputs=[
                io.Combo.Input(
                    "unet_name", options=[*folder_paths.get_filename_list("diffusion_models"), *gguf],
                    tooltip="A file in ComfyUI's folder diffusion_models; also .gguf files, if ComfyUI-GGUF is "
                    "installed.",
                ),
                io.Combo.Input(
                    "weight_dtype", options=UNETLoader.INPUT_TYPES()["required"]["weight_dtype"][0], optional=True,
                    advanced=True, tooltip="As in Load Diffusion Model. A .gguf file has its own.",
                ),
                CPConfig.Input(
                    "cp_config", optional=True, tooltip="For other samplers; a CP sampler uses its own cp_config."
                ),
            ],
            outputs=[io.Model.Output(tooltip="For CP samplers, and for every other one.")],
        )  # fmt: skip

    @classmethod
    @announce_refusals()
    def execute(
        cls, unet_name: str, weight_dtype: str = "default", cp_config: ParallelRequest | None = None
    ) -> io.NodeOutput:
        model = load_for_workers(unet_name, weight_dtype)
        return io.NodeOutput(model_described_late(model, request_from(cp_config), check=False))


def load_for_workers(name: str, weight_dtype: str) -> Mapped:
    """Returns ComfyUI's MODEL of a file, as Load Diffusion Model does; its weights are views of the mapped file."""
    if name.endswith(".gguf"):
        if weight_dtype != "default":
            raise Refused("file.gguf.dtype", "weight_dtype", {"weight_dtype": "default"}, dtype=weight_dtype)
        inputs = {"unet_name": name}
        (patcher,) = load_by_node(Mapped, NODE_CLASS_MAPPINGS[GGUF_NODE], inputs)
        model_source.note_call(patcher.model, GGUF_NODE, inputs)
        return patcher
    path = folder_paths.get_full_path_or_raise("diffusion_models", name)
    check_file(path)
    try:
        return load_mapped(Mapped, UNETLoader().load_unet, (name, weight_dtype), 0)
    except RuntimeError as error:  # ComfyUI's loader raises it for a file that it cannot use
        raise Refused("file.unloadable", path=path, reason=" ".join(str(error).split())) from None


class CPLoadCLIP(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        files = folder_paths.get_filename_list("text_encoders")
        loaders = CLIPLoader, DualCLIPLoader
        types = [type for loader in loaders for type in loader.INPUT_TYPES()["required"]["type"][0]]
        more = [
            io.Combo.Input(f"clip_name{number}", options=[NONE, *files], optional=True, tooltip="As in DualCLIPLoader, "
                           "TripleCLIPLoader and QuadrupleCLIPLoader; none for a CLIP of fewer files.")
            for number in (2, 3, 4)
        ]  # fmt: skip
        return io.Schema(
            node_id="CPLoadCLIP",
            display_name="CP Load CLIP",
            category=CATEGORY,
            description="A CLIP whose weights are in the workers only: every node that takes a CLIP encodes there.",
            search_aliases=["load clip", "dual clip loader", "text encoder", "multi gpu", "t5", "qwen"],
            inputs=[
                io.Combo.Input("clip_name1", options=files, tooltip="A file in ComfyUI's folder text_encoders."),
                io.Combo.Input(
                    "type", options=[*dict.fromkeys(types)],
                    tooltip="As in Load CLIP for one file, in DualCLIPLoader for two. Three and four files have one "
                    "type only, whatever stands here.",
                ),
                *more,
                CPConfig.Input("cp_config", optional=True, tooltip="Which workers, as in CP CLIP."),
            ],
            outputs=[io.Clip.Output(tooltip="For every node that takes a CLIP.")],
        )  # fmt: skip

    @classmethod
    @announce_refusals()
    def execute(
        cls, clip_name1: str, type: str, clip_name2: str = NONE, clip_name3: str = NONE, clip_name4: str = NONE,
        cp_config: ParallelRequest | None = None,
    ) -> io.NodeOutput:  # fmt: skip
        request = checked_request(cp_config)
        names = [name for name in (clip_name1, clip_name2, clip_name3, clip_name4) if name != NONE]
        return io.NodeOutput(parallel_clip(load_clip_for_workers(names, type), request))


def load_clip_for_workers(names: Sequence[str], kind: str) -> comfy.sd.CLIP:
    """Returns ComfyUI's CLIP of these files, as Load CLIP does; its weights are views of the mapped files."""
    paths = [folder_paths.get_full_path_or_raise("text_encoders", name) for name in names]
    for path in paths:
        check_file(path)
    try:
        with calls_loader(Mapped):
            clip = comfy.sd.load_clip(
                ckpt_paths=paths,
                embedding_directory=folder_paths.get_folder_paths("embeddings"),
                clip_type=getattr(comfy.sd.CLIPType, kind.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION),
            )
    except (RuntimeError, LookupError, ValueError) as error:  # files that are no text encoders, or not together
        raise Refused("clip.unloadable", path=", ".join(paths), reason=" ".join(str(error).split())) from None
    with_views(clip.patcher)
    return clip


def check_file(path: str) -> None:
    """Raises Refused for a damaged file, or one of another format, under the name of a safetensors file."""
    if not path.endswith(SAFETENSORS):
        return
    with open(path, "rb") as file:
        if file.read(4) == b"GGUF":
            raise Refused("file.gguf", path=path)
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise Refused("file.unsound", path=path, error=str(error)) from None


class CPVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPVAE",
            display_name="CP VAE",
            category=CATEGORY,
            description="Makes any VAE node run on all GPUs: each decodes or encodes a share of the rows, in a share "
            "of the memory, with the same result.",
            search_aliases=["vae decode", "vae encode", "multi gpu", "parallel vae", "tiled vae", "context parallel"],
            inputs=[
                io.Vae.Input("vae", tooltip="From Load VAE or Load Checkpoint."),
                WORKERS_INPUT,
            ],
            outputs=[io.Vae.Output(tooltip="For every node that takes a VAE.")],
        )

    @classmethod
    @announce_refusals()
    def execute(cls, vae: Any, cp_config: ParallelRequest | None = None) -> io.NodeOutput:
        return io.NodeOutput(parallel_vae(vae, checked_request(cp_config)))


class CPCLIP(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPCLIP",
            display_name="CP CLIP",
            category=CATEGORY,
            description="Makes any node that encodes a prompt use a text encoder in the workers, on the GPU with the "
            "most room beside the network, with the same result.",
            search_aliases=["clip text encode", "text encoder", "multi gpu", "t5", "qwen", "context parallel"],
            inputs=[
                io.Clip.Input("clip", tooltip="From Load CLIP, DualCLIPLoader or Load Checkpoint."),
                WORKERS_INPUT,
            ],
            outputs=[io.Clip.Output(tooltip="For every node that takes a CLIP.")],
        )

    @classmethod
    @announce_refusals()
    def execute(cls, clip: Any, cp_config: ParallelRequest | None = None) -> io.NodeOutput:
        if clip is None:
            raise Refused("clip.none")
        return io.NodeOutput(parallel_clip(clip, checked_request(cp_config)))


class CPDemoModel(io.ComfyNode):
    """Loads the embedded model, which ComfyUI does not list: a workflow could choose it by accident."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPDemoModel",
            display_name="CP Demo Model",
            category=f"{CATEGORY}/demo",
            description="The small model that comes with this pack: 128 x 128 pixels, drawn shapes, no download.",
            inputs=[],
            outputs=[io.Model.Output(tooltip="For every sampler, with CP Demo Conditioning and CP Demo Decode.")],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput(comfy.sd.load_diffusion_model(str(MODEL)))


class CPDemoConditioning(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPDemoConditioning",
            display_name="CP Demo Conditioning",
            category=f"{CATEGORY}/demo",
            description="Words that the embedded demo model knows, such as: a red circle on a white background.",
            inputs=[
                io.String.Input(
                    "text", default="a red circle", multiline=True, tooltip="What to draw: size, colour, shape, where."
                )
            ],
            outputs=[io.Conditioning.Output(tooltip="For the demo model only.")],
        )

    @classmethod
    def execute(cls, text: str) -> io.NodeOutput:
        cross_attn, pooled = words_and_pictures.encode(text)
        return io.NodeOutput([[cross_attn, {"pooled_output": pooled}]])


class CPDemoDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPDemoDecode",
            display_name="CP Demo Decode",
            category=f"{CATEGORY}/demo",
            description="Turns the embedded demo model's LATENT into an IMAGE.",
            inputs=[io.Latent.Input("samples", tooltip="A latent of the demo model.")],
            outputs=[io.Image.Output(tooltip="The picture.")],
        )

    @classmethod
    def execute(cls, samples: dict[str, Any]) -> io.NodeOutput:
        return io.NodeOutput(words_and_pictures.decode(samples["samples"]))
