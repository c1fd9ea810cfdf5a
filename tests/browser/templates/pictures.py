"""The workflows that make pictures from text."""

from __future__ import annotations

from . import files
from .graph import Template
from .parts import config, empty, flux_text, guided, model, nothing, on_workers, picture, qwen_text, sampler, text

FOX = "A red fox asleep in fresh snow under a pine, soft morning light, 85 mm photograph"
POSTER = 'A hand-painted shop sign that reads "OPEN UNTIL LATE", rain on the window, warm light behind it'


def flux_dev() -> Template:
    about = "CP Sampler replaces KSampler. Without the CP Parallel Config every GPU is used."
    t = Template(name="cp_flux_dev", title="FLUX.1 dev", kind="text to image", about=about, size=34)
    network = model(t, files.FLUX_DEV)
    vae, prompt = flux_text(t, FOX)
    positive, negative = guided(t, prompt, 3.5)
    latent = empty(t, 1024, 1024)
    cut = config(t)
    out = sampler(t, 3, model=network, positive=positive, negative=negative, latent_image=latent, cp_config=cut,
                  steps=20, cfg=1.0)  # fmt: skip
    picture(t, 4, out, vae)
    return t


def flux_2() -> Template:
    about = (
        "FLUX.2 samples with a guider and its own scheduler: CP Sampler Custom (Advanced) replaces "
        "SamplerCustomAdvanced. CP CLIP keeps the large text encoder in the workers, beside the model."
    )
    t = Template(name="cp_flux_2", title="FLUX.2 dev", kind="text to image", about=about, size=71)
    network = model(t, files.FLUX_2)
    cut = config(t, 0)
    clip = on_workers(t, t.add("CLIPLoader", 0, clip_name=files.MISTRAL, type="flux2"), cut)
    vae = t.add("VAELoader", 0, vae_name=files.FLUX_2_VAE)
    prompt = t.add("FluxGuidance", 3, conditioning=text(t, clip, FOX, column=2), guidance=4.0)
    size = {"width": 1248, "height": 832}
    latent = t.add("EmptyFlux2LatentImage", 1, **size, batch_size=1)
    guider = t.add("BasicGuider", 4, model=network, conditioning=prompt)
    sigmas = t.add("Flux2Scheduler", 2, steps=20, **size)
    out = t.add(
        "CPSamplerCustom", 5, noise=t.add("RandomNoise", 3, noise_seed=1), guider=guider, sigmas=sigmas,
        sampler=t.add("KSamplerSelect", 3, sampler_name="euler"), latent_image=latent, cp_config=cut,
    )  # fmt: skip
    picture(t, 6, out, vae)
    return t


def qwen_image() -> Template:
    about = (
        "With a negative prompt, auto gives each half of the workers one of the two prompts. CP CLIP keeps the text "
        "encoder in the workers, beside the model."
    )
    t = Template(name="cp_qwen_image", title="Qwen-Image", kind="text to image", about=about, size=30)
    network = t.add("ModelSamplingAuraFlow", 1, model=model(t, files.QWEN_IMAGE), shift=3.1)
    cut = config(t, 0)
    clip, vae = qwen_text(t)
    clip = on_workers(t, clip, cut)
    positive, negative = (
        text(t, clip, POSTER, column=2),
        text(t, clip, "blurry, low quality", title="Negative prompt", column=2),
    )
    latent = empty(t, 1328, 1328)
    out = sampler(t, 3, model=network, positive=positive, negative=negative, latent_image=latent,
                  cp_config=cut, steps=20, cfg=2.5)  # fmt: skip
    picture(t, 4, out, vae)
    return t


def z_image() -> Template:
    about = "Few steps and one prompt: the workers share the tokens of the picture."
    t = Template(name="cp_z_image", title="Z-Image Turbo", kind="text to image", about=about, size=21)
    network = t.add("ModelSamplingAuraFlow", 1, model=model(t, files.Z_IMAGE), shift=3.0)
    clip = t.add("CLIPLoader", 0, clip_name=files.QWEN_3, type="lumina2")
    vae = t.add("VAELoader", 0, vae_name=files.AE)
    positive = text(t, clip, FOX)
    negative = nothing(t, positive)
    latent = empty(t, 1024, 1024)
    out = sampler(t, 3, model=network, positive=positive, negative=negative, latent_image=latent,
                  cp_config=config(t), steps=8, cfg=1.0, sampler_name="res_multistep")  # fmt: skip
    picture(t, 4, out, vae)
    return t


def sdxl() -> Template:
    about = (
        "Auto gives each prompt its own GPU first. More GPUs share the rows of the picture if that is faster; the "
        "picture is that of one GPU. ring_degree and ulysses_degree set how many share them."
    )
    t = Template(name="cp_sdxl", title="SDXL", kind="text to image", about=about, size=7)
    loaded = t.add("CheckpointLoaderSimple", 0, ckpt_name=files.SDXL)
    positive = text(t, loaded[1], FOX)
    negative = text(t, loaded[1], "watermark, text, low quality", title="Negative prompt")
    latent = t.add("EmptyLatentImage", 1, width=1024, height=1024, batch_size=1)
    out = sampler(t, 3, model=loaded, positive=positive, negative=negative, latent_image=latent,
                  cp_config=config(t), steps=25, cfg=7.0, sampler_name="dpmpp_2m", scheduler="karras")  # fmt: skip
    picture(t, 4, out, loaded[2])
    return t


def lora() -> Template:
    about = "LoRA go between the loader and CP Sampler. The workers merge them once and keep them."
    t = Template(name="cp_lora", title="Qwen-Image with LoRA", kind="text to image, 8 steps", about=about, size=32)
    merged = t.add("LoraLoaderModelOnly", 1, model=model(t, files.QWEN_IMAGE), lora_name=files.QWEN_LORA)
    network = t.add("ModelSamplingAuraFlow", 2, model=merged, shift=3.1)
    clip, vae = qwen_text(t)
    positive = text(t, clip, POSTER)
    negative = nothing(t, positive)
    latent = empty(t, 1328, 1328)
    out = sampler(t, 3, model=network, positive=positive, negative=negative, latent_image=latent,
                  cp_config=config(t), steps=8, cfg=1.0)  # fmt: skip
    picture(t, 4, out, vae)
    return t


def custom() -> Template:
    about = "Every sampler, scheduler and guider of ComfyUI: the sampling code in the workers is ComfyUI's own."
    t = Template(
        name="cp_custom_sampling", title="Custom sampling", kind="guider, sampler, sigmas", about=about, size=34
    )
    network = model(t, files.FLUX_DEV)
    vae, prompt = flux_text(t, FOX)
    prompt = t.add("FluxGuidance", 2, conditioning=prompt, guidance=3.5)
    latent = empty(t, 1024, 1024)
    out = t.add(
        "CPSamplerCustom", 4, noise=t.add("RandomNoise", 3, noise_seed=1), latent_image=latent,
        guider=t.add("BasicGuider", 3, model=network, conditioning=prompt),
        sampler=t.add("KSamplerSelect", 3, sampler_name="dpmpp_2m"),
        sigmas=t.add("BasicScheduler", 2, model=network, scheduler="beta", steps=20, denoise=1.0),
        cp_config=config(t, 3),
    )  # fmt: skip
    picture(t, 5, out, vae)
    return t


def native() -> Template:
    about = (
        "CP Load Diffusion Model loads the weights in the workers only. Every sampler node samples its MODEL "
        "there: here ComfyUI's own KSampler."
    )
    t = Template(
        name="cp_load_diffusion_model", title="Native KSampler", kind="CP Load Diffusion Model", about=about, size=34
    )
    network = t.add("CPLoadDiffusionModel", 1, unet_name=files.FLUX_DEV, cp_config=config(t, 0))
    vae, prompt = flux_text(t, FOX)
    positive, negative = guided(t, prompt, 3.5)
    latent = empty(t, 1024, 1024)
    out = t.add(
        "KSampler", 3, model=network, seed=1, steps=20, cfg=1.0, sampler_name="euler", scheduler="simple",
        positive=positive, negative=negative, latent_image=latent, denoise=1.0,
    )  # fmt: skip
    picture(t, 4, out, vae)
    return t


def machines() -> Template:
    about = (
        "Two machines, one picture. Put this machine's address into rdzv_endpoint. On the other machine run "
        "**python -m parallel_runtime join ADDRESS:PORT --token-file FILE** in this pack's folder. "
        "docs/several-machines.md in that folder says what both machines need."
    )
    t = Template(name="cp_several_machines", title="Several machines", kind="nnodes 2", about=about, size=34)
    network = model(t, files.FLUX_DEV)
    vae, prompt = flux_text(t, FOX)
    positive, negative = guided(t, prompt, 3.5)
    latent = empty(t, 2048, 2048)
    cut = config(t, nnodes=2, rdzv_endpoint="10.0.0.1:29500")
    out = sampler(t, 3, model=network, positive=positive, negative=negative, latent_image=latent, cp_config=cut,
                  steps=20, cfg=1.0)  # fmt: skip
    picture(t, 4, out, vae)
    return t


def pipeline() -> Template:
    about = (
        "Two machines on Ethernet, one picture. Each has half of the model's blocks and sends the tokens on, which is "
        "little traffic. Both prompts follow each other through the stages. The result is exact; **patches** above 1 "
        "are faster and approximate. The other machine joins as in *Several machines*."
    )
    t = Template(name="cp_pipeline", title="Pipeline", kind="two machines, pipeline_degree 2", about=about, size=30)
    network = t.add("ModelSamplingAuraFlow", 1, model=model(t, files.QWEN_IMAGE), shift=3.1)
    clip, vae = qwen_text(t)
    positive, negative = text(t, clip, POSTER), text(t, clip, "blurry, low quality", title="Negative prompt")
    latent = empty(t, 1328, 1328)
    cut = config(t, nnodes=2, rdzv_endpoint="10.0.0.1:29500", pipeline_degree=2)
    out = sampler(t, 3, model=network, positive=positive, negative=negative, latent_image=latent, cp_config=cut,
                  steps=20, cfg=2.5)  # fmt: skip
    picture(t, 4, out, vae)
    return t
