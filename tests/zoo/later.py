"""Tiny networks with the structure, the names of arguments and the habits of classes that ComfyUI got after v0.33, or
has changed since. Written from what was read of them, in ComfyUI's python; none of their code is here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from comfy.ldm.lumina.model import NextDiT
from comfy.ldm.modules.attention import optimized_attention
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers
from torch import Tensor, nn

from .networks import NETWORKS
from .tiny import filled, normal, settings

Options = dict[str, Any]
Attend = Callable[..., Tensor]
WIDTH, HEADS = 96, 3


def named(kind: str) -> Callable[[type], type]:
    """Gives a class the name "module:name" of ComfyUI's, by which plans know networks."""

    def name(made: type) -> type:
        made.__module__, _, made.__qualname__ = kind.partition(":")
        return made

    return name


class Modulated(nn.Module):
    """The parts that the blocks of both share: projections and a gated feed-forward."""

    def __init__(self, width: int = WIDTH, key_width: int | None = None) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, key_width or width, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def feed(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(F.layer_norm(x, x.shape[-1:]))))


# --- Qwen-Image 2.1 -------------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    """Its queries, keys and values are [B, tokens, heads, head size]; who attends is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.parts = HEADS, Modulated()

    def forward(self, x: Tensor, pe: Tensor, attn_fn: Attend, prefix_len: int, transformer_options: Options) -> Tensor:
        q, k, v = (layer(x).unflatten(2, (self.heads, -1)) for layer in (self.parts.q, self.parts.k, self.parts.v))
        return self.parts.out(
            attn_fn(
                q * pe.cos(), k * pe.cos(), v, self.heads, preferred_attention=getattr(self, "comfy_attention", None)
            )
        )


class QwenImage21TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = _Attention()

    def forward(
        self,
        x: Tensor,
        mod: tuple[Tensor, Tensor],
        pe: Tensor,
        attn_fn: Attend,
        prefix_len: int,
        transformer_options: Options,
    ) -> Tensor:
        normed = F.layer_norm(x, x.shape[-1:])
        rows = torch.cat([normed[:, :prefix_len] * mod[0], normed[:, prefix_len:] * mod[1]], 1)
        x = x + self.attn(rows, pe, attn_fn, prefix_len, transformer_options)
        x[:, prefix_len:].addcmul_(self.attn.parts.feed(x)[:, prefix_len:], mod[1])
        return x


class ComfyAttention(nn.Module):
    """An attention that the file chooses for one module, or None."""

    function: Attend | None = None


def attention(*args: Any, preferred_attention: Any = None, **options: Any) -> Tensor:
    """Later wrappers ask an override first, and tell it nothing of what the file prefers."""
    if "optimized_attention_override" in options["transformer_options"] or preferred_attention is None:
        return optimized_attention(*args, **options)
    return (preferred_attention.function or optimized_attention)(*args, **options)


def by_segments(segments: list[Any], options: Options, keep: dict[int, Any] | None, block: int, prefix: int) -> Attend:
    """Text sees what is before it, a picture all up to its own end; keys and values of the prefix may be kept."""

    def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, preferred_attention: Any = None) -> Tensor:
        if keep is not None:
            keep[block] = k[:, :prefix].clone(), v[:, :prefix].clone()
        parts = [
            attention(
                q[:, start:end].flatten(2), k[:, :end].flatten(2), v[:, :end].flatten(2), heads, mask=mask,
                transformer_options=options, preferred_attention=preferred_attention,
            )
            for start, end, mask in segments
        ]  # fmt: skip
        return torch.cat(parts, 1)

    return attend


def after_prefix(kept: tuple[Tensor, Tensor], options: Options) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, preferred_attention: Any = None) -> Tensor:
        k, v = (torch.cat(pair, 1).flatten(2) for pair in zip(kept, (k, v), strict=True))
        return attention(
            q.flatten(2), k, v, heads, transformer_options=options, preferred_attention=preferred_attention
        )

    return attend


@named("comfy.ldm.qwen_image21.model:QwenImage21Transformer2DModel")
class QwenImage21(nn.Module):
    """With `prefix_cache_enabled` its first forward computes what comes before the image in turns with the image, and
    keeps its keys for the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner_dim = WIDTH
        self.txt_in = nn.ModuleDict({"in_layer": nn.Linear(96, WIDTH, bias=False)})
        self.img_in, self.proj_out = nn.Linear(16, WIDTH, bias=False), nn.Linear(WIDTH, 16, bias=False)
        self.time_in = nn.Linear(1, WIDTH)
        self.transformer_blocks = nn.ModuleList(QwenImage21TransformerBlock() for _ in range(3))
        self.prefix_cache: dict[int, Any] | None = None
        self.prefix_cache_enabled = False
        self.has_room = True

    def reset_prefix_cache(self, enabled: bool) -> None:
        self.prefix_cache, self.prefix_cache_enabled = None, enabled

    def select_prefix_cache(self, *_: Any) -> tuple[Any, bool]:
        """What is kept and whether it is complete: ComfyUI's decides by the free memory of its own device."""
        if not self.has_room:
            return None, False
        if self.prefix_cache is None:
            self.prefix_cache = {}
        return self.prefix_cache, len(self.prefix_cache) == len(self.transformer_blocks)

    def forward(self, x: Tensor, timestep: Tensor, context: Tensor, ref_latents: Any = None, image_slots: Any = None,
                transformer_options: Any = None, **_: Any) -> Tensor:  # fmt: skip
        height, width = x.shape[-2:]
        text, refs = self.txt_in["in_layer"](context), list(ref_latents or [])
        slot = (image_slots or [context.shape[1]])[0]
        pieces, segments, length = [], [], 0
        for part, picture in [
            (text[:, :slot], False), *((ref, True) for ref in refs), (text[:, slot:], False), (x, True)
        ]:  # fmt: skip
            tokens = self.img_in(part.flatten(2).transpose(1, 2)) if picture else part
            count = tokens.shape[1]
            if not count:
                continue
            mask = None if picture else torch.ones(count, length + count, dtype=torch.bool).tril(length)
            pieces.append(tokens)
            segments.append((length, length + count, mask))
            length += count
        hidden, prefix = torch.cat(pieces, 1), length - height * width
        pe = torch.linspace(0, 1, length)[None, :, None, None].expand(1, -1, 1, WIDTH // HEADS).contiguous()
        at_zero = self.time_in(torch.zeros(1, 1))[:, None]
        mod = at_zero.tanh(), self.time_in(timestep[:, None])[:, None].tanh()
        keep, kept = self.select_prefix_cache() if self.prefix_cache_enabled else (None, False)
        before, pe_before = hidden[:, :prefix], pe[:, :prefix]
        if keep is not None:
            hidden, pe = hidden[:, prefix:], pe[:, prefix:]
        at = prefix if keep is None else 0
        for i, block in enumerate(self.transformer_blocks):
            attend = by_segments(segments, transformer_options, None, i, prefix)
            if keep is not None:
                if not kept:
                    causal = by_segments(segments[:-1], transformer_options, keep, i, prefix)
                    before = block(before, mod, pe_before, causal, prefix, transformer_options)
                attend = after_prefix(keep[i], transformer_options)
            hidden = block(hidden, mod, pe, attend, at, transformer_options)
        return self.proj_out(hidden[:, at:]).transpose(1, 2).unflatten(2, (height, width))


# --- SenseNova U1.5 -------------------------------------------------------------------------------------------------

KEY_HEADS = 1


class _Grouped(nn.Module):
    """Three query heads for each head of keys, all heads first."""

    def __init__(self) -> None:
        super().__init__()
        width = WIDTH // HEADS * KEY_HEADS
        self.q_proj, self.q_proj_mot_gen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.k_proj_mot_gen = nn.Linear(WIDTH, width), nn.Linear(WIDTH, width)
        self.v_proj, self.v_proj_mot_gen = nn.Linear(WIDTH, width), nn.Linear(WIDTH, width)
        self.o_proj, self.o_proj_mot_gen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm = nn.RMSNorm(WIDTH // HEADS // 2)

    def project(self, x: Tensor, rope: Any, suffix: str) -> tuple[Tensor, Tensor, Tensor]:
        heads = (getattr(self, f"{name}_proj{suffix}")(x).unflatten(2, (-1, WIDTH // HEADS)) for name in "qkv")
        q, k, v = (each.transpose(1, 2) for each in heads)
        (cosine, sine), *_ = rope
        return q * cosine + sine, k * cosine - sine, v

    def forward_prefix(self, x: Tensor, rope: Any, mask: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.project(x, rope, "")
        out = optimized_attention(
            q, k, v, HEADS, mask=mask, skip_reshape=True, transformer_options=options, enable_gqa=True
        )
        return self.o_proj(out), k, v

    def forward_generation(self, x: Tensor, rope: Any, key: Tensor, value: Tensor, options: Options) -> Tensor:
        q, k, v = self.project(x, rope, "_mot_gen")
        k, v = torch.cat([key, k], 2), torch.cat([value, v], 2)
        out = optimized_attention(q, k, v, HEADS, skip_reshape=True, transformer_options=options, enable_gqa=True)
        return self.o_proj_mot_gen(out)


class SenseNovaLayer(nn.Module):
    """It is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.mlp_mot_gen = _Grouped(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward_prefix(self, prefix: Tensor, prefix_rope: Any, prefix_mask: Any, transformer_options: Options) -> Any:
        out, key, value = self.self_attn.forward_prefix(prefix, prefix_rope, prefix_mask, transformer_options)
        prefix = prefix + out
        return prefix + self.mlp(prefix).tanh(), key, value

    def forward_generation(
        self, image: Tensor, image_rope: Any, prefix_key: Tensor, prefix_value: Tensor, transformer_options: Options
    ) -> Tensor:
        attn = self.self_attn.forward_generation
        image = image + attn(image, image_rope, prefix_key, prefix_value, transformer_options)
        return image + self.mlp_mot_gen(image).tanh()


def _rope(positions: Tensor) -> Any:
    angles = positions[:, None, :, None].float() * torch.linspace(0.1, 1, WIDTH // HEADS)
    return tuple((angles.cos(), angles.sin()) for _ in range(3))


@named("comfy.ldm.sensenova.model:SenseNovaU15")
class SenseNova(nn.Module):
    """Code outside of `forward` may call `preprocess_prefix`, and give its keys and values to every step."""

    def __init__(self) -> None:
        super().__init__()
        model = nn.Module()
        model.embed_tokens, model.norm_mot_gen = nn.Embedding(50, WIDTH), nn.RMSNorm(WIDTH)
        model.layers = nn.ModuleList(SenseNovaLayer() for _ in range(3))
        self.language_model = nn.Module()
        self.language_model.model = model
        self.patches = nn.Conv2d(3, WIDTH, 32, 32)
        self.time_in, self.head = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 3)

    def preprocess_prefix(self, text_input_ids: Tensor, transformer_options: Any = None) -> tuple[list[Tensor], ...]:
        prefix, keys, values = self.language_model.model.embed_tokens(text_input_ids), [], []
        rope, mask = self._prefix(prefix)
        for layer in self.language_model.model.layers:
            prefix, key, value = layer.forward_prefix(prefix, rope, mask, transformer_options or {})
            keys.append(key)
            values.append(value)
        return keys, values

    def _prefix(self, prefix: Tensor) -> tuple[Any, Tensor]:
        length = prefix.shape[1]
        return _rope(torch.arange(length)[None]), torch.full((length, length), float("-inf")).triu(1)

    def forward(
        self, x: Tensor, timesteps: Tensor, context: Any = None, transformer_options: Any = None,
        text_input_ids: Any = None, prefix_keys: Any = None, prefix_values: Any = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        height, width = x.shape[-2:]
        padded = F.pad(x, (0, -width % 32, 0, -height % 32))
        grid = self.patches(padded)
        image = grid.flatten(2).transpose(1, 2) + self.time_in(timesteps[:, None])[:, None]
        rope = _rope(torch.arange(image.shape[1])[None].expand(len(x), -1))
        prefix = None if prefix_keys else self.language_model.model.embed_tokens(text_input_ids)
        prefix_rope, mask = (None, None) if prefix is None else self._prefix(prefix)
        for i, layer in enumerate(self.language_model.model.layers):
            transformer_options["block_index"] = i
            if prefix is None:
                key, value = prefix_keys[i], prefix_values[i]
            else:
                prefix, key, value = layer.forward_prefix(prefix, prefix_rope, mask, transformer_options)
            image = layer.forward_generation(image, rope, key, value, transformer_options)
        out = self.head(self.language_model.model.norm_mot_gen(image)).transpose(1, 2).unflatten(2, grid.shape[-2:])
        return F.interpolate(out, scale_factor=32)[..., :height, :width]


# --- Ming-Image -------------------------------------------------------------------------------------------------------


@named("comfy.ldm.lumina.model:NextDiT")
class Ming(NextDiT):
    """Lumina's network with latents of several frames, and pictures of other sizes behind them."""

    def frames(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of [B, C, frames, H, W], and their places."""
        size = self.patch_size
        x = F.pad(x, (0, -x.shape[-1] % size, 0, -x.shape[-2] % size))
        cells = x.unfold(3, size, size).unfold(4, size, size)
        count, rows, columns = cells.shape[2:5]
        places = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float32) for n in (count, rows, columns)))
        return self.x_embedder(cells.permute(0, 2, 3, 4, 5, 6, 1).flatten(4).flatten(1, 3)), places[None]

    def _forward(
        self, x: Tensor, timesteps: Tensor, context: Tensor, num_tokens: int, attention_mask: Any = None,
        ref_frames: Any = (), transformer_options: Any = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        time = self.t_embedder((1 - timesteps) * self.time_scale, dtype=x.dtype)
        given = {"transformer_options": transformer_options}
        text, own = self.cap_embedder(context), self.frames(x)
        pieces = [own, *(self.frames(ref[:, :, None]) for ref in ref_frames)]
        image = torch.cat([tokens.expand(len(x), -1, -1) for tokens, _ in pieces], 1)
        shifts = [places + torch.tensor([1.0 + 9 * n, 0, 0]) for n, (_, places) in enumerate(pieces)]
        pe_text = self.rope_embedder(torch.arange(text.shape[1]).float()[None, :, None].expand(1, -1, 3)).movedim(1, 2)
        pe_image = self.rope_embedder(torch.cat(shifts, 1)).movedim(1, 2)
        for layer in self.context_refiner:
            text = layer(text, None, pe_text, **given)
        for layer in self.noise_refiner:
            image = layer(image, None, pe_image, time, timestep_zero_index=None, **given)
        joint, pe = torch.cat([text, image], 1), torch.cat([pe_text, pe_image], 1)
        for layer in self.layers:
            joint = layer(joint, None, pe, time, timestep_zero_index=None, **given)
        out = self.final_layer(joint, time, timestep_zero_index=None)
        out = out[:, text.shape[1] : text.shape[1] + own[0].shape[1]]
        (*_, frames, height, width), size = x.shape, self.patch_size
        rows, columns = -(-height // size), -(-width // size)
        grid = out.unflatten(1, (frames, rows, columns)).unflatten(4, (size, size, -1)).permute(0, 6, 1, 2, 4, 3, 5)
        return -grid.flatten(5, 6).flatten(3, 4)[..., :height, :width]


def ming() -> nn.Module:
    config = {**NETWORKS["z_image"].config, "pad_tokens_multiple": None}
    return filled(Ming(**config, **settings()).eval())


def ming_inputs(frames: int = 1, references: bool = False) -> dict[str, Any]:
    given = dict(x=normal(2, 16, frames, 9, 13), timesteps=torch.tensor([0.3, 0.8]), context=normal(2, 7, 96))
    more = dict(ref_frames=[normal(1, 16, 5, 8), normal(1, 16, 4, 4)]) if references else {}
    return given | more | dict(num_tokens=7)


# --- MiniMax H3 -------------------------------------------------------------------------------------------------------


class _Packed(nn.Module):
    """Tokens without a batch; the gate is for sparse attention alone."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.heads, self.head_dim = HEADS, WIDTH // HEADS
        self.qkv_proj, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim)
        self.to_gate_compress = nn.Linear(WIDTH, WIDTH, bias=False) if gated else None

    def forward(self, x: Tensor, rope_freqs: Any = None, transformer_options: Any = None) -> Tensor:
        q, k, v = (part.unflatten(1, (self.heads, -1)) for part in self.qkv_proj(x).chunk(3, 1))
        q, k, v = (each.transpose(0, 1)[None] for each in (self.q_norm(q) + rope_freqs[0, :, None],
                                                            self.q_norm(k) + rope_freqs[0, :, None], v))  # fmt: skip
        out = optimized_attention(q, k, v, self.heads, skip_reshape=True, transformer_options=transformer_options)
        return self.out_proj(out[0])


class DiTBlock(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.attn, self.mlp = _Packed(gated), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, t_emb: Tensor, mod_segments: Any, rope_freqs: Tensor, transformer_options: Any = None,
        attention: Any = None,
    ) -> Tensor:  # fmt: skip
        attend = self.attn if attention is None else attention
        for start, end, row in mod_segments:
            x[start:end].mul_(1 + t_emb[row])
        x = x + attend(F.layer_norm(x, x.shape[-1:]), rope_freqs=rope_freqs, transformer_options=transformer_options)
        return x + self.mlp(x).tanh()


class FinalLayer(nn.Module):
    def forward(self, x: Tensor, t_emb: Tensor, video_seg: Any, audio_seg: Any) -> tuple[Tensor, ...]:
        ends = ((x[start:end], t_emb[row]) for start, end, row in (video_seg, audio_seg))
        return tuple(F.layer_norm(tokens, tokens.shape[-1:]) * (1 + time) for tokens, time in ends)


@named("comfy.ldm.minimax.model:MiniMaxH3Model")
class MiniMaxH3(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.blocks, self.final_layer = nn.ModuleList(DiTBlock(gated) for _ in range(3)), FinalLayer()

    def forward(self, x: Tensor, transformer_options: Any = None) -> Tensor:
        wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, transformer_options)
        executor = WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        made: Tensor = executor.execute(x, transformer_options=transformer_options)
        return made

    def _forward(self, x: Tensor, transformer_options: Any = None) -> Tensor:
        time, count = torch.linspace(-0.5, 0.5, 2 * WIDTH).view(2, WIDTH), len(x)
        rope = torch.linspace(-1, 1, count * WIDTH // HEADS).view(1, count, -1)
        segments, h = [(0, count // 3, 0), (count // 3, count, 1)], x.clone()
        sound, video = torch.arange(count).tensor_split([count // 3])
        layout = SimpleNamespace(audio_pos=sound, img_pos=video, img_update=video > video[1])  # two rows of a keyframe
        replaced = transformer_options.get("patches_replace", {}).get("dit", {})
        for i, block in enumerate(self.blocks):
            transformer_options["block_index"] = i

            def original(args: dict[str, Any], block: Any = block) -> dict[str, Any]:
                names = ("img", "t_emb", "mod_segments", "rope_freqs")
                more = dict(transformer_options=args["transformer_options"], attention=args.get("attention"))
                return {"img": block(*(args[name] for name in names), **more)}

            args = dict(img=h, t_emb=time, mod_segments=segments, rope_freqs=rope, layout=layout)
            args["transformer_options"] = transformer_options
            patch = replaced.get(("double_block", i), lambda args, extra: extra["original_block"](args))
            h = patch(args, {"original_block": original})["img"]
        return torch.cat(self.final_layer(h, time, segments[1], segments[0]))


def minimax_h3(gated: bool) -> nn.Module:
    return filled(MiniMaxH3(gated).eval())


# --- blocks that attend by themselves ---------------------------------------------------------------------------------


class OwnBlock(nn.Module):
    """`how`: by torch's function, with a bias or "bare", by a method of its own, or by a function that it is given."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.parts, self.num_heads = how, Modulated(), HEADS

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Each query sees the keys before it and one after: it depends on the order of all tokens."""
        mask = torch.ones(q.shape[2], k.shape[2]).tril(1).log()
        return ((q @ k.transpose(2, 3)) * q.shape[3] ** -0.5 + mask).softmax(3) @ v

    def forward(
        self, x: Tensor, bias: Tensor, attn_fn: Attend | None = None, transformer_options: Any = None
    ) -> Tensor:
        q, k, v = (layer(x) for layer in (self.parts.q, self.parts.k, self.parts.v))
        if attn_fn is not None:
            out = attn_fn(q, k, v, heads=HEADS)
        else:
            q, k, v = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in (q, k, v))
            if self.how in ("torch", "bare"):
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias if self.how == "torch" else None)
            else:
                out = self.attend(q, k, v)
            out = out.transpose(1, 2).flatten(2)
        x = x + self.parts.out(out)
        return x + self.parts.feed(x)


class OwnAttention(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.blocks = how, nn.ModuleList(OwnBlock(how) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, transformer_options: Any = None) -> Tensor:
        count = x.shape[1]
        bias = torch.linspace(-1, 1, HEADS * count * count).view(1, HEADS, count, count)
        options, given = transformer_options, self.how == "given"

        def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
            assert q.shape[1] == count, "the function gets a part of the tokens"
            return optimized_attention(q, k, v, heads, mask=bias[0, 0], transformer_options=options)

        for block in self.blocks:
            x = block(x, bias, attn_fn=attend if given else None, transformer_options=options)
        return self.norm(x)


def own_attention(how: str) -> nn.Module:
    return filled(OwnAttention(how).eval())


def qwen_image21(cached: bool = False, forgets: bool = False) -> nn.Module:
    """`forgets`: what was kept, before each forward."""
    network: Any = filled(QwenImage21().eval())
    network.reset_prefix_cache(cached)
    if forgets:
        network.register_forward_pre_hook(lambda net, _: net.reset_prefix_cache(cached))
    made: nn.Module = network
    return made


def sensenova() -> nn.Module:
    return filled(SenseNova().eval())


def qwen_image21_inputs(text: int = 7, references: bool = True, batch: int = 2) -> dict[str, Any]:
    given = dict(x=normal(batch, 16, 5, 7), timestep=torch.linspace(0.3, 0.8, batch), context=normal(batch, text, 96))
    more = dict(ref_latents=[normal(batch, 16, 3, 4)], image_slots=[3]) if references else {}
    return given | more


def sensenova_inputs(text: int = 5, size: tuple[int, int] = (90, 140), kept: bool = False) -> dict[str, Any]:
    ids = torch.randint(0, 50, (2, text), generator=torch.Generator().manual_seed(3))
    given: dict[str, Any] = dict(x=normal(2, 3, *size), timesteps=torch.tensor([0.3, 0.8]))
    if not kept:
        return given | dict(text_input_ids=ids)
    keys, values = sensenova().preprocess_prefix(ids)  # type: ignore[operator]
    return given | dict(prefix_keys=keys, prefix_values=values)


LATER: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "qwen-image 2.1": (qwen_image21, qwen_image21_inputs),
    "qwen-image 2.1, text alone": (qwen_image21, lambda: qwen_image21_inputs(references=False)),
    "qwen-image 2.1, a long prompt": (qwen_image21, lambda: qwen_image21_inputs(35, references=False)),
    "qwen-image 2.1, keys kept for the first time": (
        partial(qwen_image21, cached=True, forgets=True), qwen_image21_inputs,
    ),
    "ming-image": (ming, ming_inputs),
    "ming-image, layers": (ming, lambda: ming_inputs(3)),
    "ming-image, references": (ming, lambda: ming_inputs(2, references=True)),
    "sensenova": (sensenova, sensenova_inputs),
    "sensenova, a picture of 32 pixels": (sensenova, lambda: sensenova_inputs(size=(32, 32))),
    "sensenova, keys of the prompt": (sensenova, lambda: sensenova_inputs(kept=True)),
}  # fmt: skip
