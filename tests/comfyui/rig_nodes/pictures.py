"""Pictures in and out of a test graph, as numbers; and what nodes made of them on the way to a CONDITIONING."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.clip_vision
import folder_paths
import safetensors.torch
import torch
from comfy_api.latest import io

CATEGORY = "cp test"


class Pictures(io.ComfyNode):
    """Seeded random ones; a new `nonce` makes ComfyUI run again what it has cached."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestPictures",
            category=CATEGORY,
            is_dev_only=True,
            inputs=[io.String.Input("shape"), io.Int.Input("seed"), io.Int.Input("nonce", min=0, max=2**31)],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, shape: str, seed: int, nonce: int) -> io.NodeOutput:
        sizes = [int(size) for size in shape.split(",")]
        return io.NodeOutput(torch.rand(sizes, generator=torch.Generator().manual_seed(seed)))


class Seen(io.ComfyNode):
    """What a vision encoder of 27 layers made of a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestSeen",
            category=CATEGORY,
            is_dev_only=True,
            inputs=[io.Int.Input("tokens"), io.Int.Input("width")],
            outputs=[io.ClipVisionOutput.Output()],
        )

    @classmethod
    def execute(cls, tokens: int, width: int) -> io.NodeOutput:
        seen = comfy.clip_vision.Output()
        seen.all_hidden_states = torch.randn(1, 27, tokens, width, generator=torch.Generator().manual_seed(2))
        seen.penultimate_hidden_states = seen.all_hidden_states[:, -2]
        return io.NodeOutput(seen)


class Heard(io.ComfyNode):
    """What an audio encoder made of some seconds of sound, of `layers` of this `width`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestHeard",
            category=CATEGORY,
            is_dev_only=True,
            inputs=[
                io.Int.Input("steps"),
                io.Int.Input("seed"),
                io.Int.Input("layers", default=12, optional=True),
                io.Int.Input("width", default=768, optional=True),
            ],
            outputs=[io.AudioEncoderOutput.Output()],
        )

    @classmethod
    def execute(cls, steps: int, seed: int, layers: int = 12, width: int = 768) -> io.NodeOutput:
        dice = torch.Generator().manual_seed(seed)
        made = [torch.randn(1, steps, width, generator=dice) for _ in range(layers + 1)]
        return io.NodeOutput({"encoded_audio_all_layers": made, "audio_samples": 320 * steps})


class SavePictures(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestSavePictures",
            category=CATEGORY,
            is_dev_only=True,
            is_output_node=True,
            inputs=[io.Image.Input("images"), io.String.Input("name")],
        )

    @classmethod
    def execute(cls, images: torch.Tensor, name: str) -> io.NodeOutput:
        return _saved(images, name)


class SaveConcat(io.ComfyNode):
    """What an image-to-video node encoded into its CONDITIONING."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestSaveConcat",
            category=CATEGORY,
            is_dev_only=True,
            is_output_node=True,
            inputs=[io.Conditioning.Input("conditioning"), io.String.Input("name")],
        )

    @classmethod
    def execute(cls, conditioning: list[list[Any]], name: str) -> io.NodeOutput:
        return _saved(conditioning[0][1]["concat_latent_image"], name)


class Draw(io.ComfyNode):
    """A random number from where the global generator stands, after `after`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestDraw",
            category=CATEGORY,
            is_dev_only=True,
            is_output_node=True,
            inputs=[io.Image.Input("after"), io.String.Input("name")],
        )

    @classmethod
    def execute(cls, after: torch.Tensor, name: str) -> io.NodeOutput:
        return _saved(torch.rand(4), name)


class Seed(io.ComfyNode):
    """Sets the global generator before `latent` goes on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestSeed",
            category=CATEGORY,
            is_dev_only=True,
            inputs=[io.Latent.Input("latent"), io.Int.Input("seed"), io.Int.Input("nonce", min=0, max=2**31)],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, latent: dict[str, Any], seed: int, nonce: int) -> io.NodeOutput:
        torch.manual_seed(seed)
        return io.NodeOutput(latent)


def _saved(tensor: torch.Tensor, name: str) -> io.NodeOutput:
    path = Path(folder_paths.get_output_directory()) / f"{name}.safetensors"
    safetensors.torch.save_file({"samples": tensor.contiguous().cpu()}, path)
    return io.NodeOutput(ui={"cp_test": [{"path": str(path)}]})
