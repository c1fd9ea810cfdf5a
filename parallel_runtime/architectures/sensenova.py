"""SenseNova U1.5: a language model that makes pictures in pixels. What comes before the picture is full on every rank,
and goes through methods of its own of the same layers.
"""

from .architecture import Architecture
from .split_plan import IMAGE, Count, Cross, ModulePlan, Split, SplitLike, SplitPlan

PREFIX = ("prefix",)
LAYERS = "language_model.model.layers"
IMAGE_LAYERS = ModulePlan(
    LAYERS,
    {"image": Split(IMAGE), "image_rope": SplitLike(IMAGE, 2), "prefix_key": Count(PREFIX, 2)},
    attends=Cross(queries=IMAGE, keys=PREFIX + IMAGE),
    unsplit_args=("prefix_value",),
    gathers=True,
    method="forward_generation",
    never_skipped=True,
    updates=(),
)
NETWORK = Architecture(
    name="SenseNova U1.5",
    kinds=("comfy.ldm.sensenova.model:SenseNovaU15",),
    plan=SplitPlan(
        (ModulePlan(LAYERS, attends="local", method="forward_prefix"), IMAGE_LAYERS), replicated=frozenset(PREFIX)
    ),
    patch=(32, 32),
    prompt="prefix",
    width=lambda net: net.language_model.model.layers[0].self_attn.q_proj.out_features,
    head_size=lambda net: 2 * net.language_model.model.layers[0].self_attn.q_norm.weight.shape[0],
    padded=lambda net: 32,
)
