"""Refuses what cannot work in a request, whatever the sizes of a run, each with its reason and the way out: the nearest
CP Parallel Config that works, and the widgets to change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..accelerators import CUDA, KERNELS
from ..errors import Refused, listed, say
from ..request import MAX_CPU_WORKERS, ParallelRequest, are_automatic, why_one_gpu, widgets
from ..specs import DEGREES, Parallelism, Placement
from .network_stats import NetworkStats
from .run_plan import PlanInputs

Check = Callable[[ParallelRequest], object]  # raises Refused
LEAST_STEPS = 8  # of a run in patches: with fewer too much changes from one to the next


def check_request(inputs: PlanInputs) -> None:
    """Raises Refused for widgets that say what there cannot be, or what cannot be together."""
    request, network = inputs.request, inputs.network
    if network.name:
        check_step_cache(request, network)
        check_stages(request, network)
    _check_pipeline(request, network)
    ring, ulysses = request.ring_degree, request.ulysses_degree
    if not network.divisible and max(ring, ulysses) > 1:
        widgets = [name for name in DEGREES[:2] if getattr(request, name) > 1]
        raise Refused("sequence.none", widgets[0], dict.fromkeys(widgets, 0), network=network.name, widgets=widgets)
    if network.no_lse and ring > 1 and request.pipeline_degree == 1 and network.divisible:
        raise Refused("ring.node", "ring_degree", {"ring_degree": 1}, ring=ring, attention=network.no_lse)


def _check_pipeline(request: ParallelRequest, network: NetworkStats) -> None:
    """Raises Refused for a pipeline that cannot work."""
    patches, stages = request.options.token_patches, request.pipeline_degree
    if patches > 1 and stages < 2:
        raise Refused("patches.pipeline", "patches", {"patches": 1}, patches=patches)
    if stages <= 1:
        return
    if not network.divisible:
        raise Refused("stages.none", "pipeline_degree", {"pipeline_degree": 1}, network=network.name, stages=stages)
    if request.ring_degree > 1:
        raise Refused("pipeline.ring", "ring_degree", {"ring_degree": 1}, ring=request.ring_degree, stages=stages)
    if request.weights in ("shard", "offload"):
        raise Refused("pipeline.weights", "weights", {"weights": "auto"}, weights=request.weights, stages=stages)
    if not are_automatic(request.shares) and request.shares.strip() != "equal":
        raise Refused("pipeline.shares", "shares", {"shares": "equal"}, shares=request.shares.strip(), stages=stages)
    if threshold := request.options.step_cache:
        raise Refused("pipeline.cache", "step_cache", {"step_cache": 0.0}, threshold=f"{threshold:g}", stages=stages)


def check_run_in_patches(request: ParallelRequest, tokens: int, steps: int | None = None) -> None:
    """Raises Refused where a latent has too few tokens, or a run too few steps (None: unknown), for patches."""
    patches, warmup, most = request.options.token_patches, request.options.warmup_steps, max(1, tokens)
    if patches > most:
        raise Refused("patches.tokens", "patches", {"patches": most}, patches=patches, tokens=tokens, most=most)
    if patches == 1 or steps is None:
        return
    if steps < LEAST_STEPS:
        raise Refused("patches.steps", widget="patches", patches=patches, steps=steps, least=LEAST_STEPS)
    if warmup >= steps:
        raise Refused("patches.warmup", widget="warmup_steps", warmup=warmup, steps=steps, patches=patches)


def check_stages(request: ParallelRequest, network: NetworkStats) -> None:
    """Raises Refused where a network has no blocks for this many stages, or cannot be sampled in patches."""
    patches, stages, name = request.options.token_patches, request.pipeline_degree, network.name
    most = max(1, len(network.loads))
    if network.divisible and stages > most:
        fix = {"pipeline_degree": most}
        raise Refused(
            "stages.few" if network.loads else "stages.kept", "pipeline_degree", fix,
            network=name, blocks=most, stages=stages,
        )  # fmt: skip
    if network.divisible and patches > 1 and network.why_not_in_patches:
        why = network.why_not_in_patches
        raise Refused("patches.none", "patches", {"patches": 1}, network=name, why=why, patches=patches)


def check_step_cache(request: ParallelRequest, network: NetworkStats) -> None:
    """Raises Refused where a step cache is asked for of a network whose blocks cannot be skipped."""
    threshold = f"{request.options.step_cache:g}"
    if request.options.step_cache and not (network.divisible and network.step_cacheable):
        raise Refused("cache.blocks", "step_cache", {"step_cache": 0.0}, threshold=threshold, network=network.name)


def check_workers(degrees: Parallelism, devices: tuple[str, ...], inputs: PlanInputs) -> None:
    """Raises Refused where machines cannot share these degrees, or these leave devices idle that somebody named."""
    request, nnodes = inputs.request, inputs.request.nnodes
    local_workers, remainder = divmod(degrees.world_size, nnodes)
    words = degrees_in_words(degrees)
    fixed = [name for name in DEGREES if getattr(request, name) > (name == "pipeline_degree")] or list(DEGREES[:2])
    fix = dict.fromkeys(fixed, 0)
    if remainder:
        workers = degrees.world_size
        raise Refused("machines.uneven", "nnodes", fix, degrees=words, workers=workers, machines=nnodes, fixed=fixed)
    if request.devices.strip(" ,") and local_workers < len(devices) and inputs.network.divisible:
        raise Refused(
            "devices.idle.machines" if nnodes > 1 else "devices.idle", "devices", fix,
            count=len(devices), devices=list(devices), degrees=words, needed=local_workers, fixed=fixed,
        )  # fmt: skip


def worker_limit(inputs: PlanInputs) -> int:
    """Returns how many workers there can be, of all machines."""
    return inputs.request.nnodes * (len(inputs.devices) or MAX_CPU_WORKERS)


def is_too_much(degrees: Parallelism, inputs: PlanInputs) -> bool:
    """Do these degrees need more workers or attention heads than there are?"""
    return degrees.world_size > worker_limit(inputs) or degrees.ulysses_degree > inputs.network.heads


def too_much(degrees: Parallelism, inputs: PlanInputs, nearest: Parallelism, fix: Mapping[str, int]) -> Refused:
    """Returns the refusal of degrees that are too much; the degrees `nearest` are not, by the widgets of `fix`."""
    devices, nnodes, limit = list(inputs.devices), inputs.request.nnodes, worker_limit(inputs)
    words, needed = degrees_in_words(degrees), degrees.world_size
    if needed <= limit:
        reason = say("heads.few", degrees=words, heads=inputs.network.heads, workers=degrees.ulysses_degree)
    elif not devices:
        reason = say("workers.few.cpu", degrees=words, needed=needed, limit=limit)
    elif nnodes > 1:
        reason = say("workers.few.machines", degrees=words, needed=needed, devices=devices, machines=nnodes)
    elif len(devices) > 1:
        reason = say("workers.few", degrees=words, needed=needed, count=len(devices), devices=devices)
    else:
        reason = say("workers.few.one", degrees=words, needed=needed, device=devices[0])
    local_workers, out = needed // nnodes, degrees_in_words(nearest)
    if len(devices) == 1 and local_workers <= MAX_CPU_WORKERS:
        reason = say("nearest.shared", reason=reason, nearest=out, again=",".join(devices * local_workers))
    else:
        reason = say("nearest", reason=reason, nearest=out)
    if "cpu" not in devices and (why := why_one_gpu(inputs.gpus)):
        reason = say("reason.why", reason=reason, why=why)
    return Refused(reason.key, next(iter(fix)), fix, **reason.values)


def check_placement(request: ParallelRequest, placement: Placement) -> None:
    """Raises Refused for what needs other devices than these."""
    kinds, first = {device.partition(":")[0] for device in placement.devices}, placement.devices[0]
    kernel = KERNELS.get(request.options.attention_backend)
    if kernel and not kinds <= set(kernel.devices):
        fix, needed = {"attention_backend": "auto"}, " / ".join(kernel.devices).upper()
        raise Refused("backend.cuda", "attention_backend", fix, backend=kernel.name, needed=needed, device=first)
    if request.options.cuda_graphs == "on" and kinds != {CUDA.kind}:
        raise Refused("graphs.cuda", "cuda_graphs", {"cuda_graphs": "auto"}, device=first)


def degrees_in_words(degrees: Parallelism) -> str:
    names = ["ring_degree", "ulysses_degree"]
    names += [name for name in ("cfg_degree", "data_degree", "pipeline_degree") if getattr(degrees, name) > 1]
    return " x ".join(f"{name} {getattr(degrees, name)}" for name in names)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A widget to set, and its new value; `automatic`: that value leaves the choice to auto."""

    name: str
    value: Any
    automatic: bool


def instead(check: Check, request: ParallelRequest, refused: Refused) -> tuple[ParallelRequest, Refused]:
    """Returns the nearest request that `check`, which raises Refused, lets pass; and the refusal, which says what to
    change."""
    # Of what the refusal itself says and each single widget at its default, what changes the fewest widgets; if none of
    # these is enough, what this and all further refusals say.
    own = request.with_values(refused.fix)
    ones = [request.with_values({each.name: each.default}) for each in widgets()]
    working = [_least(check, request, one) for one in (own, *ones) if one != request and refusal(check, one) is None]
    working = working or [_least(check, request, _following(check, request, refused))]
    nearest = min(working, key=lambda one: len(changes(request, one)))
    changed = changes(request, nearest)
    if all(refused.fix.get(change.name) == change.value for change in changed):
        return nearest, refused
    reason = refused.values["reason"] if refused.code.startswith("nearest") else refused.sentence
    return nearest, Refused("nearest", widget=refused.widget, reason=reason, nearest=in_words(changed))


def _least(check: Check, request: ParallelRequest, mended: ParallelRequest) -> ParallelRequest:
    """Returns `mended` with every value of `request` that need not have been changed."""
    for name, value in request.values.items():
        restored = mended.with_values({name: value})
        if restored != mended and refusal(check, restored) is None:
            mended = restored
    return mended


def _following(check: Check, request: ParallelRequest, reason: Refused | None) -> ParallelRequest:
    """Returns the request after doing what refusals say, one after the other; an automatic one if that fails."""
    for _ in widgets():
        if reason is None:
            return request
        request = request.with_values(reason.fix)
        reason = refusal(check, request)
    return ParallelRequest(dtype=request.dtype)


def refusal(check: Check, request: ParallelRequest) -> Refused | None:
    try:
        check(request)
    except Refused as refused:
        return refused
    return None


def changes(before: ParallelRequest, after: ParallelRequest) -> tuple[Change, ...]:
    """Returns the changes from `before` to `after`."""
    return changes_to({name: value for name, value in after.values.items() if value != before.values[name]})


def changes_to(values: Mapping[str, Any]) -> tuple[Change, ...]:
    """Returns the changes that give widgets these values; empty devices are all of them, 0 is auto for degrees."""
    automatic = {name: value == "" or (value == 0 and name in DEGREES) for name, value in values.items()}
    return tuple(Change(name=name, value=values[name], automatic=automatic[name]) for name in values)


def in_words(changed: Sequence[Change]) -> str:
    """Returns a list such as "ring_degree 1, devices on auto"."""
    sentences = [
        say("set.auto", name=change.name) if change.automatic else say("set", name=change.name, value=change.value)
        for change in changed
    ]
    return listed(sentences) if sentences else ""
