"""The workflows that begin with a picture."""

from __future__ import annotations

from . import files
from .graph import Template
from .parts import config, empty, flux_text, guided, model, nothing, picture, qwen_text, sampler, text
from .pictures import FOX

EXAMPLE = "example.png"  # in ComfyUI's input folder from the start


def kontext() -> Template:
    about = "The workers split the tokens of the reference picture like those of the picture itself."
    t = Template(name="cp_flux_kontext", title="FLUX.1 Kontext", kind="edit a picture", about=about, size=22)
    network = model(t, files.KONTEXT)
    vae, prompt = flux_text(t, "Make it a watercolour on rough paper, and keep the composition")
    scaled = t.add("FluxKontextImageScale", 1, image=t.add("LoadImage", 0, image=EXAMPLE))
    latent = t.add("VAEEncode", 2, pixels=scaled, vae=vae)
    referred = t.add("ReferenceLatent", 3, conditioning=prompt, latent=latent)
    positive = t.add("FluxGuidance", 3, conditioning=referred, guidance=2.5)
    out = sampler(t, 4, model=network, positive=positive, negative=nothing(t, prompt), latent_image=latent,
                  cp_config=config(t, 3), steps=20, cfg=1.0)  # fmt: skip
    picture(t, 5, out, vae)
    return t


def qwen_edit() -> Template:
    about = "Up to three pictures go into the prompt; their latents are references for every worker."
    t = Template(name="cp_qwen_image_edit", title="Qwen-Image-Edit", kind="edit a picture", about=about, size=30)
    shifted = t.add("ModelSamplingAuraFlow", 1, model=model(t, files.QWEN_EDIT), shift=3.0)
    network = t.add("CFGNorm", 2, model=shifted, strength=1.0)
    clip, vae = qwen_text(t)
    image = t.add("FluxKontextImageScale", 1, image=t.add("LoadImage", 0, image=EXAMPLE))
    words = "Replace the background with a quiet harbour at dusk"
    seen = {"clip": clip, "vae": vae, "image1": image}
    positive = t.add("TextEncodeQwenImageEditPlus", 2, title="Prompt", prompt=words, **seen)
    negative = t.add("TextEncodeQwenImageEditPlus", 2, title="Negative prompt", prompt="", **seen)
    latent = t.add("VAEEncode", 2, pixels=image, vae=vae)
    out = sampler(t, 3, model=network, positive=positive, negative=negative, latent_image=latent,
                  cp_config=config(t, 3), steps=20, cfg=2.5)  # fmt: skip
    picture(t, 4, out, vae)
    return t


def inpaint() -> Template:
    about = "Paint a mask on the picture: right click on Load Image, Open in Mask Editor. The workers honour it."
    t = Template(name="cp_inpaint", title="FLUX.1 Fill", kind="inpaint", about=about, size=34)
    network = t.add("DifferentialDiffusion", 1, model=model(t, files.FLUX_FILL))
    vae, prompt = flux_text(t, FOX)
    image = t.add("LoadImage", 1, image=EXAMPLE)
    positive, negative = guided(t, prompt, 30.0)
    filled = t.add(
        "InpaintModelConditioning", 3, positive=positive, negative=negative, vae=vae, pixels=image, mask=image[1],
        noise_mask=False,
    )  # fmt: skip
    out = sampler(t, 4, model=network, positive=filled, negative=filled[1], latent_image=filled[2],
                  cp_config=config(t, 3), steps=20, cfg=1.0)  # fmt: skip
    picture(t, 5, out, vae)
    return t


def control() -> Template:
    about = (
        "ControlNet on Qwen-Image, by edges of the input picture. Each worker has all weights of the ControlNet, and "
        "computes it for its own prompts and images."
    )
    t = Template(name="cp_controlnet", title="ControlNet", kind="Qwen-Image, by edges", about=about, size=34)
    network = t.add("ModelSamplingAuraFlow", 1, model=model(t, files.QWEN_IMAGE), shift=3.1)
    clip, vae = qwen_text(t)
    scaled = t.add(
        "ImageScaleToTotalPixels", 1, image=t.add("LoadImage", 0, image=EXAMPLE), upscale_method="lanczos",
        megapixels=1.0,
    )  # fmt: skip
    edges = t.add("Canny", 2, image=scaled, low_threshold=0.1, high_threshold=0.3)
    positive, negative = text(t, clip, "A paper collage, bright colours"), text(t, clip, "", title="Negative prompt")
    steered = t.add(
        "ControlNetApplyAdvanced", 3, positive=positive, negative=negative, image=edges, vae=vae,
        control_net=t.add("ControlNetLoader", 2, control_net_name=files.QWEN_CONTROL), strength=1.0,
        start_percent=0.0, end_percent=1.0,
    )  # fmt: skip
    out = sampler(t, 4, model=network, positive=steered, negative=steered[1], cp_config=config(t, 3),
                  latent_image=t.add("VAEEncode", 2, pixels=scaled, vae=vae), steps=20, cfg=2.5)  # fmt: skip
    picture(t, 5, out, vae)
    return t


def control_sdxl() -> Template:
    about = (
        "A ControlNet with several types on SDXL; Set Union ControlNet Type says which. It runs in the workers: for "
        "the prompt of each GPU, and by the same rows if GPUs share a picture."
    )
    t = Template(name="cp_controlnet_sdxl", title="ControlNet", kind="SDXL, by edges", about=about, size=10)
    loaded = t.add("CheckpointLoaderSimple", 0, ckpt_name=files.SDXL)
    scaled = t.add("ImageScale", 1, image=t.add("LoadImage", 0, image=EXAMPLE), upscale_method="lanczos", width=1024,
                   height=1024, crop="center")  # fmt: skip
    edges = t.add("Canny", 2, image=scaled, low_threshold=0.1, high_threshold=0.3)
    net = t.add("SetUnionControlNetType", 2, type="canny/lineart/anime_lineart/mlsd",
                control_net=t.add("ControlNetLoader", 1, control_net_name=files.SDXL_CONTROL))  # fmt: skip
    positive = text(t, loaded[1], "A paper collage, bright colours")
    negative = text(t, loaded[1], "watermark, text, low quality", title="Negative prompt")
    steered = t.add(
        "ControlNetApplyAdvanced", 3, positive=positive, negative=negative, image=edges, control_net=net, strength=0.7,
        start_percent=0.0, end_percent=0.8,
    )  # fmt: skip
    out = sampler(t, 4, model=loaded, positive=steered, negative=steered[1], cp_config=config(t, 3),
                  latent_image=t.add("EmptyLatentImage", 2, width=1024, height=1024, batch_size=1), steps=25, cfg=7.0,
                  sampler_name="dpmpp_2m", scheduler="karras")  # fmt: skip
    picture(t, 5, out, loaded[2])
    return t


def control_flux() -> Template:
    about = (
        "A ControlNet on FLUX.1 dev. If workers share the tokens of the picture, they share those of the ControlNet "
        "too. Its result never leaves a worker."
    )
    t = Template(name="cp_controlnet_flux", title="ControlNet", kind="FLUX.1 dev, by edges", about=about, size=36)
    network = model(t, files.FLUX_DEV)
    vae, prompt = flux_text(t, "A paper collage, bright colours")
    scaled = t.add("ImageScale", 1, image=t.add("LoadImage", 0, image=EXAMPLE), upscale_method="lanczos", width=1024,
                   height=1024, crop="center")  # fmt: skip
    edges = t.add("Canny", 2, image=scaled, low_threshold=0.1, high_threshold=0.3)
    positive, negative = guided(t, prompt, 3.5)
    steered = t.add(
        "ControlNetApplyAdvanced", 3, positive=positive, negative=negative, image=edges, strength=0.7,
        control_net=t.add("ControlNetLoader", 2, control_net_name=files.FLUX_CONTROL), start_percent=0.0,
        end_percent=0.8,
    )  # fmt: skip
    out = sampler(t, 4, model=network, positive=steered, negative=steered[1], latent_image=empty(t, 1024, 1024),
                  cp_config=config(t, 3), steps=20, cfg=1.0)  # fmt: skip
    picture(t, 5, out, vae)
    return t
