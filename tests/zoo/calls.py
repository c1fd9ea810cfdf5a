"""What the tiny networks are asked: sizes that do not divide, prompts of odd lengths, references, masks, residuals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import remade
from .tiny import make, normal, uniform

Inputs = dict[str, Any]
TIMES, LATE = (0.3, 0.8), (300.0, 800.0)


@dataclass(frozen=True)
class Case:
    """`of` is a row of the table of networks, or what makes one."""

    of: str | Callable[[], nn.Module]
    inputs: Callable[[], Inputs]

    def network(self) -> nn.Module:
        return make(self.of) if isinstance(self.of, str) else self.of()


def times(batch: int, of: tuple[float, float] = TIMES) -> Tensor:
    return torch.linspace(*of, batch)


def padding(batch: int, length: int, valid: int) -> Tensor:
    return (torch.arange(length) < valid).long().expand(batch, -1).contiguous()


def residuals(*kinds: str, tokens: int = 108, width: int = 192, batch: int = 2) -> dict[str, list[Tensor]]:
    return {kind: [normal(batch, tokens, width) for _ in range(2)] for kind in kinds}


def references(batch: int = 2) -> list[Tensor]:
    return [normal(batch, 16, 11, 13), normal(batch, 16, 8, 6)]


def flux(text: int = 7, batch: int = 2, **more: Any) -> Inputs:
    given = dict(
        x=normal(batch, 16, 17, 23), timestep=times(batch), context=normal(batch, text, 96), y=normal(batch, 64)
    )
    return given | dict(guidance=torch.full((batch,), 3.5)) | more


def flux_redux(heads: int = 0, boolean: bool = False) -> Inputs:
    tokens = 21 + 108
    mask = uniform(2, *(heads,) * bool(heads), tokens, tokens)
    return flux(21, attention_mask=mask > 0.3 if boolean else mask.log())


def flux2(text: int = 63, batch: int = 2, **more: Any) -> Inputs:
    return flux(text, batch) | dict(x=normal(batch, 128, 9, 13)) | more


def flux2_zero() -> Inputs:
    return flux2(7, 1, ref_latents=[normal(1, 128, 5, 6)], ref_latents_method="index_timestep_zero")


def chroma(**more: Any) -> Inputs:
    return {name: value for name, value in flux(**more).items() if name != "y"}


def wan(text: int = 63, channels: int = 16, size: tuple[int, int, int] = (3, 9, 14), **more: Any) -> Inputs:
    return dict(x=normal(2, channels, *size), timestep=times(2, LATE), context=normal(2, text, 96)) | more


def wan_vace() -> Inputs:
    return wan(size=(3, 10, 14), vace_context=normal(2, 2, 96, 3, 10, 14), vace_strength=[1.0, 0.7])


def wan_camera() -> Inputs:
    given = wan(channels=32, size=(3, 10, 14), clip_fea=normal(2, 257, 1280))
    return given | dict(camera_conditions=normal(2, 24, 3, 80, 112))


def qwen(text: int = 7, batch: int = 2, **more: Any) -> Inputs:
    return dict(x=normal(batch, 16, 1, 17, 23), timestep=times(batch), context=normal(batch, text, 96)) | more


def qwen_reference(method: str) -> Inputs:
    return qwen(ref_latents=[normal(2, 16, 1, 11, 13)], ref_latents_method=method)


def lumina(text: int = 7, **more: Any) -> Inputs:
    return dict(x=normal(2, 16, 17, 23), timesteps=times(2), context=normal(2, text, 96), num_tokens=text) | more


def z_image_references() -> Inputs:
    return lumina(ref_latents=[normal(1, 16, 12, 14)], ref_contexts=[normal(1, 20, 96)])


def sd3(text: int = 7, **more: Any) -> Inputs:
    given = dict(x=normal(2, 16, 17, 23), timesteps=times(2, LATE), context=normal(2, text, 96), y=normal(2, 64))
    return given | more


def hunyuan(text: int = 7, batch: int = 2, **more: Any) -> Inputs:
    given = dict(x=normal(batch, 16, 3, 6, 10), timestep=times(batch, LATE), context=normal(batch, text, 96))
    return given | dict(y=normal(batch, 64), guidance=torch.full((batch,), 6000.0)) | more


def ltxv(**more: Any) -> Inputs:
    given = dict(x=normal(2, 128, 3, 3, 5), timestep=times(2), context=normal(2, 63, 96))
    return given | dict(attention_mask=padding(2, 63, 40)) | more


def ltxav(per_frame: bool = False) -> Inputs:
    frames = uniform(2, 3).repeat_interleave(15, 1), uniform(2, 11)
    given = dict(x=[normal(2, 128, 3, 3, 5), normal(2, 8, 11, 16)], context=normal(2, 9, 192))
    return given | dict(timestep=frames if per_frame else times(2))


def video(text: int = 63, size: tuple[int, int, int] = (3, 9, 14), **more: Any) -> Inputs:
    return dict(x=normal(2, 16, *size), timesteps=times(2), context=normal(2, text, 96)) | more


def image(text: int = 7, **more: Any) -> Inputs:
    return dict(x=normal(2, 16, 17, 23), timesteps=times(2), context=normal(2, text, 96)) | more


def hidream() -> Inputs:
    given = dict(x=normal(2, 16, 17, 23), t=times(2, LATE), y=normal(2, 64), context=normal(2, 9, 96))
    return given | dict(encoder_hidden_states_llama3=normal(2, 3, 11, 80))


def krea2(**more: Any) -> Inputs:
    return dict(x=normal(2, 16, 17, 23), timesteps=times(2), context=normal(2, 7, 192)) | more


def krea2_zero() -> Inputs:
    return krea2(ref_latents=[normal(2, 16, 8, 11)], ref_latents_method="index_timestep_zero")


def joyimage() -> Inputs:
    given = dict(hidden_states=normal(2, 16, 1, 17, 23), timestep=times(2, LATE), context=normal(2, 7, 96))
    return given | dict(ref_latents=[normal(2, 16, 1, 8, 11)])


def lens() -> Inputs:
    mask = padding(2, 24, 11).bool()
    return dict(x=normal(2, 128, 9, 13), timestep=times(2), context=normal(2, 24, 192), attention_mask=mask)


def ernie_image(text: int = 7) -> Inputs:
    return dict(x=normal(2, 128, 9, 13), timesteps=times(2, LATE), context=normal(2, text, 96))


def wan_scail() -> Inputs:
    given = dict(reference_latent=normal(2, 20, 1, 9, 14), pose_latents=normal(2, 20, 3, 5, 7))
    return wan(channels=20, clip_fea=normal(2, 257, 1280)) | given


def wan_scail2() -> Inputs:
    masks = dict(ref_mask_latents=normal(2, 28, 4, 9, 14), sam_latents=normal(2, 28, 3, 5, 7))
    return wan_scail() | masks | dict(ref_mask_flag=False)


def wan_animate() -> Inputs:
    given = wan(channels=36, size=(3, 10, 14), clip_fea=normal(2, 257, 1280))
    return given | dict(pose_latents=normal(2, 16, 2, 10, 14), face_pixel_values=normal(2, 3, 4, 32, 32))


def wan_s2v(**more: Any) -> Inputs:
    return wan(size=(3, 10, 14), audio_embed=normal(2, 25, 48, 12), reference_latent=normal(2, 16, 1, 10, 14)) | more


def wan_s2v_motion() -> Inputs:
    return wan_s2v(reference_motion=normal(2, 16, 19, 10, 14), control_video=normal(2, 16, 3, 10, 14))


def wan_humo() -> Inputs:
    return wan(size=(3, 10, 14), audio_embed=normal(2, 3, 8, 5, 1280), reference_latent=normal(2, 16, 1, 10, 14))


def wan_dancer(fps: int) -> Inputs:
    given = wan(channels=36, size=(3, 10, 16), clip_fea=normal(2, 257, 1280), audio_embed=normal(2, 10, 35))
    return given | dict(clip_fea_ref=normal(2, 257, 1280), fps=fps, audio_inject_scale=0.8)


def hunyuan_dit(**more: Any) -> Inputs:
    masks = dict(text_embedding_mask=padding(2, 7, 5), text_embedding_mask_t5=padding(2, 9, 4))
    given = dict(x=normal(2, 4, 17, 23), t=times(2, LATE), context=normal(2, 7, 96))
    size = torch.tensor([[1024.0, 768.0, 1024.0, 768.0, 0.0, 0.0]] * 2)
    return given | masks | dict(encoder_hidden_states_t5=normal(2, 9, 128), image_meta_size=size) | more


def hunyuan_3d(time: str = "timestep") -> Inputs:
    return {"x": normal(2, 64, 35), time: times(2), "context": normal(2, 7, 96)}


def triposplat(**more: Any) -> Inputs:
    return dict(x=[normal(2, 37, 16), normal(2, 1, 5)], t=times(2), context=normal(2, 23, 96)) | more


def pixels(**more: Any) -> Inputs:
    return dict(x=normal(2, 3, 33, 45), timesteps=times(2), context=normal(2, 7, 96)) | more


def renamed(given: Inputs, **names: str) -> Inputs:
    return {names.get(name, name): value for name, value in given.items()}


def radiance() -> Inputs:
    return renamed(pixels(x=normal(2, 3, 36, 44), guidance=torch.zeros(2)), timesteps="timestep")


def mage_flow() -> Inputs:
    mask, references = padding(2, 7, 5), [normal(2, 128, 5, 6)]
    return dict(x=normal(2, 128, 9, 13), timestep=times(2), context=normal(2, 7, 96)) | dict(
        attention_mask=mask, ref_latents=references
    )


def ideogram4(text: int = 11, batch: int = 2, **more: Any) -> Inputs:
    return dict(x=normal(batch, 128, 9, 13), timesteps=times(batch), context=normal(batch, text, 96)) | more


def mochi(valid: int = 17) -> Inputs:
    given = dict(x=normal(1, 12, 3, 10, 14), timestep=times(1), context=normal(1, 24, 96))
    return given | dict(attention_mask=padding(1, 24, valid).bool(), num_tokens=valid)


def minimax_h3(text: int = 7, **more: Any) -> Inputs:
    sizes = normal(1, 24, 3, 5, 7), normal(1, 32, 2, 11)
    return dict(x=list(sizes), timestep=times(1, (700.0, 700.0)), context=normal(1, text, 96)) | more


def minimax_h3_masks() -> Inputs:
    """With the layout that ComfyUI makes of the sizes, once a run."""
    from comfy.ldm.minimax.model import PackedLayout

    masks = dict(denoise_mask=uniform(1, 1, 3, 5, 7).round(decimals=1), audio_denoise_mask=uniform(1, 1, 1, 22))
    return minimax_h3(minimax_payload={"audio_scale": 2.0, "layout": PackedLayout(7, 3, 6, 8, 11)}, **masks)


def minimax_h3_keyframes() -> Inputs:
    """The first frame, and a clip with its sound from the fifth on."""
    frames = normal(1, 24, 1, 6, 8), normal(1, 24, 2, 6, 8)
    sound = normal(1, 32, 2, 3)
    keyframes = [
        dict(resolved_frame_index=0, latent=frames[0]),
        dict(resolved_frame_index=4, latent=frames[1], audio_latent=sound),
    ]
    tags = torch.tensor([1, 0, 0, 1, 2, 1, 1])
    payload = dict(
        keyframes=keyframes, cond_video_latents=[*frames], cond_audio_latents=[sound], text_token_tags=tags, seed=3
    )
    return minimax_h3(minimax_payload=payload)


def minimax_h3_references() -> Inputs:
    """A picture, a video with its sound, and sound."""
    seen, sounds = (normal(1, 24, 1, 4, 6), normal(1, 24, 2, 4, 4)), (normal(1, 32, 2, 3), normal(1, 32, 2, 5))
    refs = [
        dict(kind="image", latent_h=4, latent_w=6),
        dict(kind="video_audio", latent_t=2, latent_h=4, latent_w=4, ref_audio_t=3),
        dict(kind="audio", ref_audio_t=5),
    ]
    return minimax_h3(minimax_payload=dict(refs=refs, cond_video_latents=[*seen], cond_audio_latents=[*sounds]))


def hidream_o1(text: int = 9) -> Inputs:
    from comfy.ldm.hidream_o1.conditioning import build_extra_conds

    picture = normal(2, 3, 160, 224)
    ids = torch.randint(0, 1000, (1, text), generator=torch.Generator().manual_seed(3))
    ids[:, -1] = 151673  # the time's token
    return dict(x=picture, timesteps=times(2, LATE)) | build_extra_conds(ids, picture)


def stable_audio(**more: Any) -> Inputs:
    given = dict(x=normal(2, 16, 37), timestep=times(2), context=normal(2, 7, 64), global_embed=normal(2, 64))
    return given | more


def ace_step() -> Inputs:
    given = dict(x=normal(2, 8, 16, 37), timestep=times(2), context=normal(2, 7, 96), speaker_embeds=normal(2, 512))
    return given | dict(lyric_token_idx=torch.tensor([[3, 9, 4, 12, 7], [8, 1, 2, 6, 49]]))


def ace_step15() -> Inputs:
    given = dict(x=normal(2, 64, 35), timestep=times(2), context=normal(2, 7, 96))
    return given | dict(lyric_embed=normal(2, 9, 96), refer_audio=normal(2, 64, 40))


def minimax_music(length: int) -> Inputs:
    given = dict(x=normal(1, 128, length), timestep=times(1), context=normal(1, 20, 8 * 4096))
    return given | dict(conditioning_scale=torch.ones(1, 1, 1))


def seedvr2() -> Inputs:
    """Three videos of two prompts, as ComfyUI joins them."""
    video, condition = normal(3, 16, 2, 6, 8), normal(3, 17, 2, 6, 8)
    given = dict(x=video.repeat(2, 1, 1, 1, 1), timestep=times(1, (500.0, 500.0)).repeat(6))
    return given | dict(context=normal(6, 7, 5120), condition=condition.repeat(2, 1, 1, 1, 1))


def trellis2(mode: str, **more: Any) -> Inputs:
    """Two shapes of 9 and 13 voxels, all of them in one table."""
    counts = torch.tensor([9, 13])
    voxels = torch.randint(0, 32, (22, 3), generator=torch.Generator().manual_seed(3))
    coords = torch.cat([torch.arange(2).repeat_interleave(counts)[:, None], voxels], 1).int()
    tables = dict(trellis2_coords=coords, trellis2_coord_counts=counts, trellis2_generation_mode=mode)
    given = dict(x=normal(2, 32, 13, 1), timestep=times(2, LATE), context=normal(2, 5, 32), embeds=normal(2, 5, 32))
    return given | tables | more


NARROW = dict(io_channels=16, cond_token_dim=64, project_cond_tokens=False, global_cond_dim=64)
hunyuan_15 = partial(make, "hunyuan_15", in_channels=16, out_channels=16)

CASES: dict[str, Case] = {
    "flux": Case("flux", flux),
    "flux, 63 text tokens": Case("flux", partial(flux, 63)),
    "flux, 1 text token": Case("flux", partial(flux, 1)),
    "flux fill": Case(partial(make, "flux", in_channels=24), lambda: flux() | dict(x=normal(2, 24, 17, 23))),
    "flux kontext": Case("flux", lambda: flux(ref_latents=references())),
    "flux uso": Case("flux", lambda: flux(ref_latents=references(), ref_latents_method="uxo")),
    "flux redux": Case("flux", flux_redux),
    "flux redux, a mask for each head": Case("flux", partial(flux_redux, heads=3)),
    "flux redux, hidden pairs": Case("flux", partial(flux_redux, boolean=True)),
    "flux residuals": Case("flux", lambda: flux(control=residuals("input", "output"))),
    "flux residuals and references": Case(
        "flux", lambda: flux(control=residuals("input", "output"), ref_latents=references())
    ),
    "flux 2": Case("flux2", flux2),
    "flux 2 references": Case("flux2", lambda: flux2(ref_latents=[normal(2, 128, 5, 6)], ref_latents_method="index")),
    "flux 2 references at time zero": Case("flux2_klein", flux2_zero),
    "chroma": Case("chroma", chroma),
    "chroma residuals": Case("chroma", lambda: chroma(control=residuals("input", "output", width=96))),
    "wan": Case("wan", wan),
    "wan, one frame": Case("wan", partial(wan, 7, size=(1, 9, 14))),
    "wan i2v": Case("wan_i2v", lambda: wan(channels=36, clip_fea=normal(2, 257, 1280))),
    "wan first and last frame": Case(
        "wan_first_and_last_frame",
        lambda: wan(channels=36, clip_fea=normal(2, 514, 1280)),
    ),
    "wan 5b": Case(
        "wan_5b", lambda: wan(channels=48, timestep=torch.tensor([[0.0, 500.0, 500.0], [0.0, 800.0, 800.0]]))
    ),
    "wan fun control": Case(
        partial(make, "wan", in_dim_ref_conv=16), lambda: wan(reference_latent=normal(2, 16, 10, 14))
    ),
    "wan phantom": Case("wan", lambda: wan(time_dim_concat=normal(2, 16, 2, 9, 14))),
    "wan context latents": Case("wan", lambda: wan(context_latents=[normal(2, 16, 2, 6, 8), normal(2, 16, 1, 4, 4)])),
    "wan vace": Case("wan_vace", wan_vace),
    "wan camera": Case("wan_camera", wan_camera),
    "qwen image": Case("qwen", qwen),
    "qwen image mask": Case("qwen", lambda: qwen(63, 1, attention_mask=padding(1, 63, 40))),
    "qwen image edit": Case("qwen", partial(qwen_reference, "index")),
    "qwen image edit 2511": Case("qwen", partial(qwen_reference, "index_timestep_zero")),
    "qwen image residuals": Case("qwen", lambda: qwen(control=residuals("input"))),
    "z-image": Case("z_image", lumina),
    "z-image references": Case("z_image", z_image_references),
    "lumina 2": Case("lumina2", partial(lumina, 63)),
    "sd3.5 large": Case("sd35_large", partial(sd3, 63)),
    "sd3.5 medium": Case("sd35_medium", sd3),
    "sd3.5 residuals": Case("sd35_medium", lambda: sd3(control=residuals("output"))),
    "hunyuan video": Case("hunyuan", hunyuan),
    "hunyuan video mask": Case("hunyuan", lambda: hunyuan(24, 1, attention_mask=padding(1, 24, 11))),
    "hunyuan video i2v": Case("hunyuan", lambda: hunyuan(batch=1, ref_latent=normal(1, 16, 1, 6, 10))),
    "hunyuan video i2v, guiding frame": Case(
        partial(make, "hunyuan", guidance_embed=False),
        lambda: hunyuan(batch=1, guiding_frame_index=torch.tensor([0.0])),
    ),
    "hunyuan video residuals": Case("hunyuan", lambda: hunyuan(control=residuals("input", tokens=45) | {"output": []})),
    "hunyuan video residuals of both kinds": Case(
        "hunyuan", lambda: hunyuan(control=residuals("input", "output", tokens=45))
    ),
    "hunyuan video 1.5": Case(hunyuan_15, lambda: hunyuan(txt_byt5=normal(2, 9, 1472), clip_fea=normal(2, 12, 48))),
    "ltx-video": Case("ltxv", ltxv),
    "ltx-video, a time for each token": Case("ltxv", lambda: ltxv(timestep=uniform(2, 45))),
    "ltx-2": Case("ltx2", ltxav),
    "ltx-2, a time for each frame": Case("ltx2", partial(ltxav, per_frame=True)),
    "cosmos predict2": Case("cosmos_predict2", video),
    "cosmos predict2, a time for each frame": Case("cosmos_predict2", lambda: video(timesteps=uniform(2, 3))),
    "cosmos predict2 image": Case("cosmos_predict2", partial(video, size=(1, 17, 23))),
    "anima": Case("anima", lambda: video(size=(1, 17, 23)) | dict(context=normal(2, 40, 1024))),
    "hidream i1": Case("hidream", hidream),
    "kandinsky 5": Case("kandinsky5_image", lambda: wan(7) | dict(y=normal(2, 64))),
    "omnigen 2": Case("omnigen2", lambda: image(num_tokens=7)),
    "omnigen 2 references": Case("omnigen2", lambda: image(num_tokens=7, ref_latents=[normal(2, 16, 8, 11)])),
    "boogu": Case("boogu", lambda: image(num_tokens=7)),
    "boogu references": Case("boogu", lambda: image(num_tokens=7, ref_latents=[normal(2, 16, 8, 11)])),
    "krea 2": Case("krea2", krea2),
    "krea 2 references at time zero": Case("krea2", krea2_zero),
    "joyimage references": Case("joyimage", joyimage),
    "cogvideox": Case("cogvideox", partial(wan, 7)),
    "lens": Case("lens", lens),
    "ernie image": Case("ernie_image", ernie_image),
    "ernie image, 1 text token": Case("ernie_image", partial(ernie_image, 1)),
    "wan scail": Case("wan_scail", wan_scail),
    "wan scail 2": Case("wan_scail_2", wan_scail2),
    "wan animate": Case(remade.wan_animate, wan_animate),
    "wan s2v": Case("wan_s2v", wan_s2v),
    "wan s2v with motion": Case("wan_s2v", wan_s2v_motion),
    "humo": Case("humo", wan_humo),
    "wandancer": Case("wandancer", partial(wan_dancer, 30)),
    "wandancer, all of the dance": Case("wandancer", partial(wan_dancer, 15)),
    "chroma radiance": Case("chroma_radiance", radiance),
    "aura flow": Case("aura_flow", lambda: renamed(image(), timesteps="timestep") | dict(x=normal(2, 4, 17, 23))),
    "pixart": Case("pixart", lambda: image() | dict(x=normal(2, 4, 34, 46))),
    "hunyuan dit": Case("hunyuan_dit", hunyuan_dit),
    "hunyuan dit residuals": Case("hunyuan_dit", lambda: hunyuan_dit(control=residuals("output"))),
    "hunyuan 3d": Case("hunyuan_3d", hunyuan_3d),
    "hunyuan 3d 2.1": Case("hunyuan_3d_21", partial(hunyuan_3d, "t")),
    "triposplat": Case("triposplat", triposplat),
    "triposplat with a reference": Case("triposplat", partial(triposplat, ref_latents=[normal(2, 128, 3, 6)])),
    "mage-flow references": Case("mage_flow", mage_flow),
    "z-image in pixels": Case("z_image_pixels", lambda: pixels(num_tokens=7)),
    "ideogram 4": Case("ideogram4", partial(ideogram4, attention_mask=None)),
    "ideogram 4, padded": Case("ideogram4", lambda: ideogram4(attention_mask=padding(2, 11, 6))),
    "ideogram 4, the image alone": Case("ideogram4", lambda: ideogram4(context=None)),
    "pixeldit": Case("pixeldit", pixels),
    "pid": Case("pid", lambda: pixels(lq_latent=normal(2, 16, 5, 6), degrade_sigma=torch.tensor([0.4]))),
    "cosmos 1": Case("cosmos1", lambda: video(size=(3, 10, 14))),
    "mochi": Case("mochi", mochi),
    "mochi, 1 text token": Case("mochi", partial(mochi, 1)),
    "minimax h3": Case("minimax_h3", minimax_h3),
    "minimax h3 masks": Case("minimax_h3", minimax_h3_masks),
    "minimax h3 keyframes": Case("minimax_h3", minimax_h3_keyframes),
    "minimax h3 references": Case("minimax_h3", minimax_h3_references),
    "hidream o1": Case(remade.hidream_o1_without_keys, hidream_o1),
    "hidream o1, a later step": Case("hidream_o1", partial(hidream_o1, 19)),
    "stable audio": Case(partial(make, "stable_audio", **NARROW), stable_audio),
    "stable audio 3": Case(
        partial(make, "stable_audio_3", local_add_cond_dim=17, **NARROW),
        lambda: stable_audio(local_add_cond=normal(2, 17, 37)),
    ),
    "causal wan": Case("causal_wan", wan),
    "ace-step": Case(remade.ace_step, ace_step),
    "ace-step 1.5": Case("ace_step_15", ace_step15),
    "minimax music": Case(remade.minimax_music, partial(minimax_music, 37)),
    "minimax music, two windows": Case(remade.minimax_music, partial(minimax_music, 900)),
}

UNDIVIDED: dict[str, Case] = {  # networks without a plan, and the prompts of their batches
    "seedvr2": Case("seedvr2", seedvr2),
    "trellis2 shapes": Case(remade.trellis2, partial(trellis2, "shape_generation_512")),
    "trellis2 textures": Case(
        remade.trellis2, lambda: trellis2("texture_generation", trellis2_shape_slat=normal(22, 32))
    ),
}
