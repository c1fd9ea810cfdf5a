"""Networks that differ from the table by more than a config, or whose class fixes a width. In ComfyUI's python."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .tiny import filled, kind_of, make, settings


class _Faces(nn.Module):
    """In place of the encoder of faces, 25 million weights on pictures of 512 pixels, which runs before any cut."""

    def get_motion(self, pictures: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(pictures[:, :2], 16).flatten(1)


def wan_animate() -> nn.Module:
    network = make("wan_animate")
    network.motion_encoder = _Faces()
    return network


def hidream_o1_without_keys() -> nn.Module:
    """It forgets, before each call, the keys of what comes before the picture."""
    network = make("hidream_o1")
    network.register_forward_pre_hook(lambda net, _: net.clear_kv_cache())
    return network


def ace_step() -> nn.Module:
    """ComfyUI fixes the width of its encoder of lyrics."""
    network = kind_of("ldm.ace.model:ACEStepTransformer2DModel")(
        num_layers=2, attention_head_dim=32, num_attention_heads=3, text_embedding_dim=96, lyric_encoder_vocab_size=50,
        lyric_hidden_size=48, ssl_encoder_depths=[1, 1], ssl_latent_dims=[16, 12], max_position=64, **settings(),
    )  # fmt: skip
    network.lyric_encoder = kind_of("ldm.ace.lyric_encoder:ConformerEncoder")(
        48, 48, 3, 64, 1, static_chunk_size=0, **settings()
    )
    return filled(network.eval())


def minimax_music() -> nn.Module:
    """ComfyUI fixes all its widths."""
    network = kind_of("ldm.minimax_music.dit:MiniMaxMusic3DiT")(**settings("meta"))
    inner, transformer = network.diffusion_transformer, network.diffusion_transformer.transformer
    block = type(transformer.layers[0])
    transformer.layers = nn.ModuleList(block(192, 64, 256, **settings()) for _ in range(2))
    transformer.project_in, transformer.project_out = nn.Linear(2304, 192, bias=False), nn.Linear(192, 128, bias=False)
    inner.to_timestep_embed = nn.Sequential(nn.Linear(256, 192), nn.SiLU(), nn.Linear(192, 192))
    return filled(network.to_empty(device="cpu").eval())


def trellis2() -> nn.Module:
    """Its config fixes the number of its networks' heads and their widths together."""
    sizes = dict(resolution=64, model_channels=96, cond_channels=32, num_blocks=2, num_heads=3)
    return filled(kind_of("ldm.trellis2.model:Trellis2")(**sizes, init_txt_model=True, **settings()).eval())


def lllite(width: int) -> nn.Module:
    """The network of Anima LLLite, which says by its weights how large it is."""
    import comfy.ops
    from comfy.ldm.anima.lllite import AnimaLLLite

    modules = [f"lllite_dit_blocks_{n}_{part}" for n in range(2) for part in ("self_attn_q_proj", "self_attn_k_proj")]
    modules += ["lllite_dit_blocks_0_self_attn_v_proj", "lllite_dit_blocks_1_cross_attn_q_proj",
                "lllite_dit_blocks_0_mlp_layer1"]  # fmt: skip
    sizes: dict[str, Tensor] = {
        "lllite_conditioning1.conv1.weight": torch.empty(8, 3, 4, 4),
        "lllite_conditioning1.conv3.weight": torch.empty(16, 8, 4, 4),
        "lllite_conditioning1.proj.weight": torch.empty(24, 16, 1, 1),
    }
    for name in modules:
        sizes[f"{name}.down.weight"] = torch.empty(12, width)
        sizes[f"{name}.cond_to_film.weight"] = torch.empty(24, 24)
    return filled(AnimaLLLite(sizes, None, device="cpu", dtype=torch.float32, operations=comfy.ops.manual_cast))
