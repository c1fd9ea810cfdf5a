"""Prints, for models of video, which part of a run is where, and its share of the time from the prompt to the file: the
table of docs/your-gpus.md. Reckoned from the networks' sizes, nothing is measured: FLOP over the FLOP/s of the cards of
tests/planning/your_gpus.py, and once the bytes of a text encoder over 20 GB/s from main memory.

    python -m tests.bench.parts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallel_runtime.architectures import ARCHITECTURES
from parallel_runtime.architectures.autoencoders import COMPARED, ENGINE, HUNYUAN, LTX, MINIMAX_H3

from ..planning.your_gpus import MACHINES, Machine

MAIN_MEMORY = 2e10  # bytes a second to a GPU
PROMPT = 512  # tokens, about
PCIE, NVLINK = MACHINES[0], MACHINES[-1]
RUNS = (  # the machine, how many of its GPUs, and whether with a LoRA or a file for few steps
    (PCIE, 1, False), (PCIE, PCIE.gpus, False), (NVLINK, NVLINK.gpus, False), (NVLINK, NVLINK.gpus, True),
)  # fmt: skip
LIMIT = 0.1  # of the time: a part on one GPU that takes more has its reason in the docs


@dataclass(frozen=True, kw_only=True)
class WorkPart:
    """`kind` is ComfyUI's class where it may be divided, `few_flop` with few steps. `moved_bytes` go to a GPU first."""

    name: str
    flop: float
    few_flop: float
    kind: str = ""
    moved_bytes: float = 0.0

    @property
    def where(self) -> str:
        if any(self.kind in architecture.kinds for architecture in ARCHITECTURES):
            return "all GPUs, by tokens"
        if (compared := COMPARED.get(self.kind)) is not None:
            return f"all GPUs with CP VAE, by {'tiles' if compared.tiles else 'rows'}"
        return "one GPU; with CP CLIP that with most room" if self.moved_bytes else "one GPU"

    def seconds(self, machine: Machine, gpus: int, few: bool) -> float:
        flop = self.few_flop if few else self.flop
        return flop / machine.flops / (gpus if self.where.startswith("all") else 1) + self.moved_bytes / MAIN_MEMORY


@dataclass(frozen=True, kw_only=True)
class Film:
    name: str
    parts: tuple[WorkPart, ...]

    def shares(self, part: WorkPart) -> list[float]:
        """Returns the share of the time that `part` takes in each of RUNS."""
        return [part.seconds(*run) / sum(one.seconds(*run) for one in self.parts) for run in RUNS]


def encoder(name: str, weights: float, gigabytes: float, prompts: int) -> WorkPart:
    """A text encoder, whose file of so many GB is moved once. With few steps there is no negative prompt."""
    flop = 2 * weights * PROMPT
    return WorkPart(name=f"text encoder, {name}", flop=prompts * flop, few_flop=flop, moved_bytes=gigabytes * 1e9)


def sampled(
    kind: str, weights: float, tokens: int, width: int, layers: int, *, times: int, few: int, name: str = "network"
) -> WorkPart:
    """A network that multiplies each token by `weights`, evaluated so many times, each prompt counted."""
    flop = 2 * weights * tokens + 4 * tokens**2 * width * layers
    return WorkPart(name=name, kind=f"comfy.ldm.{kind}", flop=times * flop, few_flop=few * flop)


def once(name: str, flop: float, kind: str = "") -> WorkPart:
    return WorkPart(name=name, kind=kind, flop=flop, few_flop=flop)


WAN_VAE, LTX_AV = "comfy.ldm.wan.vae", "lightricks.av_model:LTXAVModel"
FILMS = (
    Film(
        name="MiniMax H3, 1344 x 768, 124 frames, 20 steps or 4",
        parts=(
            encoder("Qwen3-VL 32B in nvfp4", 24.4e9, 16.5, 1),
            sampled("minimax.model:MiniMaxH3Model", 20.2e9, 38_000, 7168, 50, times=20, few=4),
            once("VAE", 196 * 9.66e12, MINIMAX_H3),
            once("audio VAE", 0.51e12),
        ),
    ),
    Film(
        name="LTX-2 19B, 768 x 512, 121 frames, 20 steps or 8, then 3 at twice the size",
        parts=(
            encoder("Gemma 3 12B in bf16", 12e9, 24, 2),
            sampled(LTX_AV, 14e9, 6270, 4096, 48, times=40, few=8),
            once("latent upscaler", 14.6e12),
            sampled(LTX_AV, 14e9, 24_700, 4096, 48, times=3, few=3, name="network, second size"),
            once("VAE", 16 * 32 * 48 * 9.8e9, f"{LTX}.VideoVAE({LTX}.Encoder, {LTX}.Decoder)"),
            once("audio VAE", 1e12),  # as of twice H3's
        ),
    ),
    Film(
        name="Wan 2.2 A14B, 832 x 480, 81 frames, 20 steps or 4",
        parts=(
            encoder("UMT5 XXL in fp8", 5.7e9, 6.7, 2),
            sampled("wan.model:WanModel", 14.3e9, 32_760, 5120, 40, times=40, few=4, name="network, both files"),
            once("VAE", 21 * 60 * 104 * 2.07e9, f"{WAN_VAE}.WanVAE({WAN_VAE}.Encoder3d, {WAN_VAE}.Decoder3d)"),
        ),
    ),
    Film(
        name="HunyuanVideo 1.5, 1280 x 720, 121 frames, 20 steps or 8",
        parts=(
            encoder("Qwen2.5-VL 7B in fp8", 7.6e9, 9.4, 2),
            sampled("hunyuan_video.model:HunyuanVideo", 8.3e9, 111_600, 2048, 54, times=40, few=8),
            once(
                "VAE",
                31 * 45 * 80 * 2.5e10,
                f"{ENGINE}({HUNYUAN}.vae_refiner.Encoder, {HUNYUAN}.vae_refiner.Decoder)",
            ),
        ),
    ),
)


def rows() -> Iterator[str]:
    columns = [f"{gpus} x {machine.name.split()[2].strip(',')}" for machine, gpus, _ in RUNS]
    yield f"| model and part | where | {' | '.join(columns)}, few steps |"
    yield "|---" * (len(columns) + 2) + "|"
    for film in FILMS:
        yield f"| **{film.name}** |" + " |" * (len(columns) + 1)
        for part in film.parts:
            shares = [f"{share:.0%}" if share >= 0.01 else "below 1%" for share in film.shares(part)]
            yield f"| {part.name} | {part.where} | {' | '.join(shares)} |"


if __name__ == "__main__":
    print("\n".join(rows()))
