"""The workflows that make videos."""

from __future__ import annotations

from . import files
from .edits import EXAMPLE
from .graph import File, Node, Template
from .parts import config, film, model, sampler, save, text

SEA = "A small boat crosses a calm bay at sunrise, the camera follows slowly, gulls above the water"
BAD = "static, blurry, overexposed, low quality, jpeg artefacts, deformed"


def wan(t: Template, file: File) -> Node:
    return t.add("ModelSamplingSD3", 1, model=model(t, file), shift=8.0)


def wan_text(t: Template) -> tuple[Node, Node, Node]:
    """VAE, positive and negative prompt of Wan."""
    clip = t.add("CLIPLoader", 0, clip_name=files.UMT5, type="wan")
    vae = t.add("VAELoader", 0, vae_name=files.WAN_VAE)
    return vae, text(t, clip, SEA), text(t, clip, BAD, title="Negative prompt")


def wan_t2v() -> Template:
    about = "Videos have the most tokens: they gain most from several GPUs."
    t = Template(name="cp_wan_t2v", title="Wan 2.1", kind="text to video", about=about, size=10)
    network = wan(t, files.WAN_T2V)
    vae, positive, negative = wan_text(t)
    latent = t.add("EmptyHunyuanLatentVideo", 2, width=832, height=480, length=81, batch_size=1)
    out = sampler(t, 3, model=network, positive=positive, negative=negative, latent_image=latent,
                  cp_config=config(t), steps=30, cfg=6.0, sampler_name="uni_pc")  # fmt: skip
    film(t, 4, out, vae, fps=16.0)
    return t


def wan_22() -> Template:
    about = "Two networks, one for the first steps and one for the last. The workers keep both if memory suffices."
    t = Template(name="cp_wan_22", title="Wan 2.2 A14B", kind="text to video, two samplers", about=about, size=36)
    high = wan(t, files.WAN_HIGH)
    low = wan(t, files.WAN_LOW)
    vae, positive, negative = wan_text(t)
    latent = t.add("EmptyHunyuanLatentVideo", 2, width=832, height=480, length=81, batch_size=1)
    cut = config(t)
    half = {"noise_seed": 1, "steps": 20, "cfg": 3.5, "sampler_name": "euler", "scheduler": "simple"}
    first = t.add(
        "CPSamplerAdvanced", 3, title="High noise", model=high, add_noise="enable", **half, positive=positive,
        negative=negative, latent_image=latent, start_at_step=0, end_at_step=10, cp_config=cut,
        return_with_leftover_noise="enable",
    )  # fmt: skip
    last = t.add(
        "CPSamplerAdvanced", 4, title="Low noise", model=low, add_noise="disable", **half, positive=positive,
        negative=negative, latent_image=first, start_at_step=10, end_at_step=10000, cp_config=cut,
        return_with_leftover_noise="disable",
    )  # fmt: skip
    film(t, 5, last, vae, fps=16.0)
    return t


def wan_i2v() -> Template:
    about = "With CP VAE all GPUs encode the picture and decode the video together, each a part of the rows, exactly."
    t = Template(name="cp_wan_i2v_vae", title="Wan 2.1 with CP VAE", kind="image to video", about=about, size=41)
    network = wan(t, files.WAN_I2V)
    vae, positive, negative = wan_text(t)
    cut = config(t, 1)
    parallel = t.add("CPVAE", 2, vae=vae, cp_config=cut)
    image = t.add("LoadImage", 0, image=EXAMPLE)
    seen = t.add(
        "CLIPVisionEncode", 2, clip_vision=t.add("CLIPVisionLoader", 1, clip_name=files.CLIP_VISION), image=image,
        crop="none",
    )  # fmt: skip
    start = t.add(
        "WanImageToVideo", 3, positive=positive, negative=negative, vae=parallel, width=832, height=480, length=81,
        batch_size=1, clip_vision_output=seen, start_image=image,
    )  # fmt: skip
    out = sampler(t, 4, model=network, positive=start, negative=start[1], latent_image=start[2], cp_config=cut,
                  steps=20, cfg=6.0, sampler_name="uni_pc")  # fmt: skip
    film(t, 5, out, parallel, fps=16.0)
    return t


def vace() -> Template:
    about = "VACE's second stack of blocks is split like the first. A reference picture guides the video."
    t = Template(name="cp_wan_vace", title="Wan VACE", kind="video by a reference picture", about=about, size=42)
    network = wan(t, files.WAN_VACE)
    vae, positive, negative = wan_text(t)
    steered = t.add(
        "WanVaceToVideo", 2, positive=positive, negative=negative, vae=vae, width=832, height=480, length=81,
        batch_size=1, strength=1.0, reference_image=t.add("LoadImage", 1, image=EXAMPLE),
    )  # fmt: skip
    out = sampler(t, 3, model=network, positive=steered, negative=steered[1], latent_image=steered[2],
                  cp_config=config(t), steps=20, cfg=6.0, sampler_name="uni_pc")  # fmt: skip
    trimmed = t.add("TrimVideoLatent", 4, samples=out, trim_amount=steered[3])
    film(t, 5, trimmed, vae, fps=16.0)
    return t


def hunyuan() -> Template:
    about = "The workers share the video's tokens; the text encoders and the VAE stay in ComfyUI's process."
    t = Template(name="cp_hunyuan_video_15", title="HunyuanVideo 1.5", kind="text to video", about=about, size=29)
    network = t.add("ModelSamplingSD3", 1, model=model(t, files.HUNYUAN_T2V), shift=7.0)
    clip = t.add(
        "DualCLIPLoader", 0, clip_name1=files.QWEN_TEXT, clip_name2=files.HUNYUAN_TEXT, type="hunyuan_video_15"
    )
    vae = t.add("VAELoader", 0, vae_name=files.HUNYUAN_VAE)
    positive, negative = text(t, clip, SEA), text(t, clip, "", title="Negative prompt")
    latent = t.add("EmptyHunyuanVideo15Latent", 2, width=1280, height=720, length=121, batch_size=1)
    out = sampler(t, 3, model=network, positive=positive, negative=negative, latent_image=latent,
                  cp_config=config(t), steps=20, cfg=6.0)  # fmt: skip
    film(t, 4, out, vae, fps=24.0)
    return t


def ltx_2() -> Template:
    about = "Sound and picture are sampled together; the workers split the tokens of both."
    t = Template(name="cp_ltx_2", title="LTX-2", kind="text to video with sound", about=about, size=68)
    loaded = t.add("CheckpointLoaderSimple", 0, ckpt_name=files.LTX_2)
    clip = t.add("LTXAVTextEncoderLoader", 0, text_encoder=files.GEMMA, ckpt_name=files.LTX_2)
    voice = t.add("LTXVAudioVAELoader", 0, ckpt_name=files.LTX_2)
    positive, negative = (
        text(t, clip, f"{SEA}. Quiet waves, distant gulls"),
        text(t, clip, BAD, title="Negative prompt"),
    )
    timed = t.add("LTXVConditioning", 2, positive=positive, negative=negative, frame_rate=24.0)
    picture = t.add("EmptyLTXVLatentVideo", 1, width=768, height=512, length=121, batch_size=1)
    sound = t.add("LTXVEmptyLatentAudio", 1, frames_number=121, frame_rate=24, batch_size=1, audio_vae=voice)
    both = t.add("LTXVConcatAVLatent", 2, video_latent=picture, audio_latent=sound)
    out = t.add(
        "CPSamplerCustom", 4, noise=t.add("RandomNoise", 3, noise_seed=1),
        guider=t.add("CFGGuider", 3, model=loaded, positive=timed, negative=timed[1], cfg=4.0),
        sampler=t.add("KSamplerSelect", 3, sampler_name="euler"),
        sigmas=t.add("LTXVScheduler", 3, steps=20, max_shift=2.05, base_shift=0.95, terminal=0.1, latent=both),
        latent_image=both, cp_config=config(t, 2),
    )  # fmt: skip
    apart = t.add("LTXVSeparateAVLatent", 5, av_latent=out)
    heard = t.add("LTXVAudioVAEDecode", 6, samples=apart[1], audio_vae=voice)
    seen = t.add("VAEDecode", 6, samples=apart, vae=loaded[2])
    save(t, 7, seen, fps=24.0, audio=heard)
    return t


def minimax_h3_t2v() -> Template:
    about = (
        "From the prompt to the video on all GPUs: the text encoder on the one with most room, picture and sound "
        "sampled together, and with CP VAE the tiles of the video shared out, to the same bits. The sound is decoded "
        "on one GPU."
    )
    t = Template(name="cp_minimax_h3_t2v", title="MiniMax H3", kind="text to video with sound", about=about, size=44)
    minimax_h3(t)
    return t


def minimax_h3_i2v() -> Template:
    about = (
        "The video begins with the picture; a last frame can be given too. With CP VAE all GPUs encode the frames and "
        "decode the video, each some of the tiles, to the same bits."
    )
    t = Template(name="cp_minimax_h3_i2v", title="MiniMax H3", kind="image to video with sound", about=about, size=44)
    minimax_h3(t, first_frame=t.add("LoadImage", 1, image=EXAMPLE))
    return t


def minimax_h3(t: Template, **frames: Node) -> None:
    cut = config(t, 1)
    network = model(t, files.MINIMAX_H3)
    clip = t.add("CPCLIP", 2, cp_config=cut, clip=t.add("CLIPLoader", 0, clip_name=files.QWEN_3_VL, type="minimax"))
    vae = t.add("CPVAE", 2, cp_config=cut, vae=t.add("VAELoader", 0, vae_name=files.MINIMAX_VAE))
    voice = t.add("VAELoader", 0, vae_name=files.MINIMAX_AUDIO_VAE)
    start = t.add(
        "MiniMaxH3ImageToVideo", 3, clip=clip, vae=vae, prompt=f"{SEA}. Audio: quiet waves, distant gulls", width=1344,
        height=768, length=124, **frames,
    )  # fmt: skip
    out = t.add(
        "CPSamplerCustom", 5, noise=t.add("RandomNoise", 4, noise_seed=1),
        guider=t.add("BasicGuider", 4, model=network, conditioning=start),
        sampler=t.add("KSamplerSelect", 4, sampler_name="res_multistep"),
        sigmas=t.add("BasicScheduler", 4, model=network, scheduler="simple", steps=20, denoise=1.0),
        latent_image=start[1], cp_config=cut,
    )  # fmt: skip
    seen = t.add("VAEDecode", 6, samples=out, vae=vae)
    heard = t.add("VAEDecodeAudio", 6, samples=out, vae=voice)
    save(t, 7, seen, fps=24.0, audio=heard)
