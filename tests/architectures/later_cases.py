"""Networks of later ComfyUIs, and blocks that attend by themselves, divided and not, in ComfyUI's python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.architectures.split_plan import JOINT, Gather, HeadFunction, ModulePlan, Split, SplitPlan
from parallel_runtime.engine.comm.mesh import GroupState, build_mesh
from parallel_runtime.engine.parallelize import parallelize, unparallelize
from parallel_runtime.engine.split.streams import streams_of
from parallel_runtime.engine.stages import Stages
from parallel_runtime.specs import Parallelism

from ..engine.meshes import mesh, parallelism
from ..zoo import tiny
from .cases import digest, divided_forward, error, forward, plan_of
from .cases import made as made_case

from ..zoo import fun_control_like, later, sparse_like  # isort: skip  # imports ComfyUI, which `cases` has started


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    network, inputs = later.LATER[name]
    tiny.seed(11)
    return network(), inputs()


def parity(rank: int, world: int, name: str, ring: int, ulysses: int) -> dict[str, Any]:
    network, inputs = made(name)
    plain = forward(network, inputs)
    together = divided_forward(network, inputs, ring, ulysses)
    again = forward(network, inputs)
    return {"error": error(together, plain), "left": error(again, plain), "bits": digest(together)}


def preferred(rank: int, world: int) -> dict[str, Any]:
    """Qwen-Image 2.1 whose second block has an attention that its file has chosen: how far several ranks are from one,
    and that from ComfyUI's own attention."""
    network: Any = later.qwen_image21()
    tiny.seed(11)
    inputs = later.qwen_image21_inputs()
    plain = forward(network, inputs)

    def attention_int8(*args: Any, **options: Any) -> Tensor:
        options.pop("transformer_options")
        return later.optimized_attention(*args, **options).bfloat16().float()

    chooser = network.transformer_blocks[1].attn.comfy_attention = later.ComfyAttention()
    chooser.function = attention_int8
    wants = forward(network, inputs)
    return {"error": error(divided_forward(network, inputs, 1, world), wants), "chosen": error(wants, plain)}


def masked_video(rank: int, world: int, name: str, ring: int, ulysses: int) -> list[float]:
    """LTX whose blocks are given a mask of all pairs of video tokens: how far it is from one rank, and that from no
    mask."""
    made_of_case: tuple[Any, dict[str, Any]] = made_case(name)
    network, inputs = made_of_case
    plain = forward(network, inputs)
    mask = torch.randn(1, 1, 45, 45, generator=torch.Generator().manual_seed(3))
    network._build_guide_self_attention_mask = lambda *_: mask
    wants = forward(network, inputs)
    return [error(divided_forward(network, inputs, ring, ulysses), wants), error(wants, plain)]


def planned(rank: int, world: int, frames: int) -> dict[str, Any]:
    """Tokens of Ming-Image as planning counts them, and as a forward cuts them."""
    network, inputs, cut = later.ming(), later.ming_inputs(frames), {}
    known = plan_of(network)
    parallelize(network, known.plan, mesh(world, 1), parallelism(world, 1))
    network.register_forward_hook(lambda net, *_: cut.update(streams_of(net).lengths), prepend=True)  # type: ignore[union-attr]
    forward(network, inputs)
    unparallelize(network)
    return {"tokens": known.tokens(network, inputs["x"].shape, 7), "cut": {"joint": cut["joint"]}}


def kept_keys(rank: int, world: int, rooms: list[bool]) -> list[float]:
    """Errors of the first, second ... forward of a run of Qwen-Image 2.1, against one that keeps nothing. `rooms` says
    for each forward whether rank 0 has memory for the keys."""
    network: Any = later.qwen_image21(cached=True)
    tiny.seed(11)
    inputs = later.qwen_image21_inputs()
    wants = forward(later.qwen_image21(), inputs)
    parallelize(network, plan_of(network).plan, mesh(1, world), parallelism(1, world))
    errors = []
    for room in rooms:
        network.has_room = room or rank > 0
        errors.append(error(forward(network, inputs), wants))
    unparallelize(network)
    return errors


def sparse_h3(
    rank: int, world: int, vsa: bool, ring: int, ulysses: int, tokens: int, dense_blocks: list[int]
) -> list[Any]:
    """MiniMax H3 with block-sparse attention: how far it is from that of one rank, and that from dense one; or why
    it is refused."""
    network = later.minimax_h3(vsa)
    x = torch.randn(tokens, later.WIDTH, generator=torch.Generator().manual_seed(5))
    options = {name: sparse_like.options_for(network, vsa, tuple(dense_blocks)) for name in ("one", "several")}
    wants, dense = forward(network, {"x": x}, **options["one"]), forward(network, {"x": x})
    try:
        got = divided_forward(network, {"x": x}, ring, ulysses, **options["several"])
    except ValueError as refused:
        return [str(refused)]
    return [error(got, wants), error(wants, dense), error(forward(network, {"x": x}, **options["one"]), wants)]


def controlled_h3(
    rank: int, world: int, ring: int, ulysses: int, stages: int, strips: bool, sparse: bool
) -> list[float]:
    """MiniMax H3 with its Fun ControlNet, whose video a VAE encodes in the forward: how far it is from one rank, and
    that from none. `sparse`: beside block-sparse attention."""
    network, tokens = later.minimax_h3(False), 23
    x = torch.randn(tokens, later.WIDTH, generator=torch.Generator().manual_seed(5))
    control = SimpleNamespace(model=fun_control_like.fun_control(strips))

    def options() -> dict[str, Any]:
        made = sparse_like.options_for(network) if sparse else {}
        patch = fun_control_like.MiniMaxH3FunControlPatch(control, Encoder(tokens), torch.zeros(1, 3, 1, 1), 0.7)
        patch.register(made)
        return made

    wants, plain = forward(network, {"x": x}, **options()), forward(network, {"x": x})
    if stages > 1:
        degrees = Parallelism(pipeline_degree=stages, ulysses_degree=ulysses)
        with Stages(network, plan_of(network).plan, build_mesh(degrees, torch.device("cpu"), GroupState()), degrees):
            got = forward(network, {"x": x}, **options())
    else:
        got = divided_forward(network, {"x": x}, ring, ulysses, **options())
    return [error(got, wants), error(wants, plain)]


class Encoder:
    """In a VAE's place: it attends while a divided network's forward runs, as some do."""

    def __init__(self, tokens: int) -> None:
        self.rows = tokens - tokens // 3 - 2

    def encode(self, pixels: Tensor) -> Tensor:
        q = torch.randn(1, self.rows, 4, generator=torch.Generator().manual_seed(9))
        return later.optimized_attention(q, q, q, 1).movedim(1, -1)[..., None]


def sparse_override(rank: int, world: int, name: str, ring: int, ulysses: int) -> list[Any]:
    """The same of another network, whose every attention goes through the node's override."""
    network, inputs = made_case(name)
    options = {one: sparse_like.options_for(network) for one in ("one", "several")}
    wants, dense = forward(network, inputs, **options["one"]), forward(network, inputs)
    try:
        got = divided_forward(network, inputs, ring, ulysses, **options["several"])
    except ValueError as refused:
        return [str(refused)]
    return [error(got, wants), error(wants, dense)]


FUNCTIONS = {
    "given": {"attn_fn": HeadFunction()},
    "method": {"attend": HeadFunction(heads_first=True)},
    "torch": {"scaled_dot_product_attention": HeadFunction(heads_first=True)},
}


def plan(how: str, **more: Any) -> SplitPlan:
    words = {"head_functions": FUNCTIONS[how]} | more
    blocks = ModulePlan("blocks", {"x": Split(JOINT)}, unsplit_args=("bias", "attn_fn"), **words)
    return SplitPlan((blocks, ModulePlan("norm", {0: Gather(JOINT)})))


def own(rank: int, world: int, how: str, tokens: int) -> float:
    """A block that attends by itself."""
    network = later.own_attention(how)
    x = torch.randn(2, tokens, later.WIDTH, generator=torch.Generator().manual_seed(5))
    wants = forward(network, {"x": x})
    parallelize(network, plan(how), mesh(1, world), parallelism(1, world))
    got = forward(network, {"x": x})
    unparallelize(network)
    assert error(forward(network, {"x": x}), wants) == 0, "something is left"
    return error(got, wants)


def refusal(rank: int, world: int, how: str, words: bool, ring: int, ulysses: int) -> str:
    """Why such a network is refused; `words`: whether its plan names its attention."""
    network = later.own_attention(how)
    x = torch.randn(2, 9, later.WIDTH)
    given = plan(how) if words else plan("method", head_functions={}, attends=JOINT)
    try:
        parallelize(network, given, mesh(ring, ulysses), parallelism(ring, ulysses))
    except ValueError as refused:
        return str(refused)
    try:
        forward(network, {"x": x})
    except ValueError as refused:
        return str(refused)
    finally:
        unparallelize(network)
    return ""


def hidden(rank: int, world: int) -> str:
    """The first block attends by a function that its plan divides, the second by torch's, to this rank's tokens."""
    network: Any = later.own_attention("bare")
    network.blocks[0].how = "method"
    parallelize(network, plan("method"), mesh(1, world), parallelism(1, world))
    try:
        forward(network, {"x": torch.randn(2, 9, later.WIDTH)})
    except ValueError as refused:
        return str(refused)
    finally:
        unparallelize(network)
    return ""


torch.set_grad_enabled(False)
