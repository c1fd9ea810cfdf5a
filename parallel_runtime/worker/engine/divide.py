"""ComfyUI's own network made context parallel: hooks at its blocks' inputs and outputs, as a plan says.

Knows no network: names are the plan's. Imports no ComfyUI.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ...blocks import own_attentions
from ...errors import Refused
from ...inside_blocks import are_inside, wants_whole
from ...plan import Plan
from ...specs import Parallelism
from .cuts import Cuts, Residuals
from .hooking import Block, cut_blocks, hook
from .mesh import ContextMesh
from .naming import lead_to, wrapped
from .overriding import Overriding
from .patches import Passed, Patches
from .scales import one_scale
from .streams import DIVIDED

_OVERRIDE = "optimized_attention_override"


def divide(network: nn.Module, plan: Plan, mesh: ContextMesh, parallelism: Parallelism) -> None:
    """Run every later forward of `network` over the context ranks of `mesh`; all of them must divide it, then call it.

    Each rank passes whole inputs and gets the whole output, equal to what one rank computes. ValueError, and nothing
    changed, when it is divided already or when plan and network do not fit. A forward raises Refused for what the plan
    does not know.
    """
    if hasattr(network, DIVIDED):
        raise ValueError(f"this {type(network).__name__} is divided already; undivide it first")
    setattr(network, DIVIDED, _Division(network, plan, mesh, parallelism))


def undivide(network: nn.Module) -> None:
    """Make `network` plain again; ValueError if it is not divided."""
    if not hasattr(network, DIVIDED):
        raise ValueError(f"this {type(network).__name__} is not divided")
    getattr(network, DIVIDED).remove()
    delattr(network, DIVIDED)


def patches_of(network: nn.Module) -> Patches | None:
    """The patches in which a divided network is evaluated; None where its ranks have all tokens together."""
    found: Patches | None = getattr(getattr(network, DIVIDED, None), "patches", None)
    return found


class _Division:
    """The hooks of one network, and the state of its forward in progress."""

    def __init__(self, network: nn.Module, plan: Plan, mesh: ContextMesh, parallelism: Parallelism) -> None:
        self.patches = Patches(parallelism.patches, plan.main) if parallelism.patches > 1 else None
        self.cuts = Cuts(plan, mesh.context, self.patches)
        self.streams = self.cuts.streams
        self._plan = plan
        self._ring = mesh.ring.size
        self._chosen = own_attentions(network) if parallelism.attention_backend == "auto" else {}
        self._override = Overriding(self.cuts, mesh, parallelism, self.patches)
        self._until_removed = ExitStack()
        self.remove = self._until_removed.close
        blocks = cut_blocks(network, plan)
        self._keep(network.register_forward_pre_hook(self._begin, with_kwargs=True))
        for block in blocks:
            self._hook(block)
        if self.patches is not None:
            self._replace(network, partial(self._patch_by_patch, self.patches, network.forward))
        self._until_removed.enter_context(one_scale(network, mesh.context))
        self._keep(network.register_forward_hook(self._end, always_call=True))
        self._until_removed.enter_context(wrapped(plan.no_options))

    def _keep(self, *handles: RemovableHandle) -> None:
        for handle in handles:
            self._until_removed.enter_context(handle)

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        module.forward = forward
        self._until_removed.callback(delattr, module, "forward")

    def _hook(self, block: Block) -> None:
        if self.patches is not None and block.scopes:
            self._keep(block.module.register_forward_pre_hook(self.patches.enter))
        for module, over in block.scopes:
            scope = self._override.scope(over)
            if module is block.module:
                self._keep(module.register_forward_pre_hook(partial(self._enter, scope)))
                self._keep(module.register_forward_hook(self._leave, always_call=True))
            else:
                self._replace(module, _scoped(module.forward, self._override.scopes, scope))
        self._keep(*hook(block, self.cuts))

    def _begin(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._clear()
        options = dict(kwargs.get("transformer_options") or {})
        previous = options.get(_OVERRIDE)
        if previous is not None and self._ring > 1:
            raise Refused(
                f"a node replaces the attention ({_OVERRIDE}), and gives no log-sum-exp, which a ring needs; set "
                "ring_degree to 1 and use Ulysses, or take that node away"
            )
        if previous is None and self._chosen:
            function, module = next(iter(self._chosen.items()))
            raise Refused(
                f"{module} chooses an attention of its own ({function}), which a network that is cut would not use; "
                "set ring and Ulysses degrees to 1, or choose an attention_backend"
            )
        self.cuts.whole_between = wants_whole(options)
        self.cuts.patched_inside = are_inside(options.get("patches") or {})
        self._override.previous = previous
        options[_OVERRIDE] = self._override
        kwargs["transformer_options"] = options
        if control := kwargs.get("control"):
            self.cuts.whole_between |= bool(
                {kind for kind, found in control.items() if found} - set(self._plan.residuals)
            )
            kwargs["control"] = {
                k: Residuals(v, self.cuts, self._plan.main) for k, v in control.items() if v is not None
            }
        if self.patches is not None and (self.cuts.whole_between or self.cuts.patched_inside):
            raise Refused(
                "a node has patches between blocks or inside of them, and no worker has all tokens at one time; take "
                "that node away, or set patches to 1"
            )
        lead_to(self._override)
        return args, kwargs

    def _patch_by_patch(self, patches: Patches, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The network's `forward`, once for each patch. The last one has what all have come to."""
        options, out = kwargs.pop("transformer_options"), None
        for _ in patches.turns(_known_by(args, kwargs, options), lambda: self.streams.lengths):
            self.cuts.begin_again()
            self._override.scopes.clear()
            with suppress(Passed):
                out = forward(*args, **kwargs, transformer_options=dict(options))
        return out

    def _end(self, network: nn.Module, _: Any, output: Any) -> None:
        unfinished = self.cuts.holds(self._plan.main)
        alone = self.streams.knows(self._plan.main) and not self._override.shared
        self._clear()
        if output is not None and (unfinished or alone):  # None: it raised
            missing = "its tokens were not put together" if unfinished else "its attention passed the workers by"
            raise Refused(f"{type(network).__name__}: {missing}; set ring and Ulysses degrees to 1")

    def _clear(self) -> None:
        self.cuts.clear()
        self._override.scopes.clear()
        self._override.shared = 0
        lead_to(None)

    def _enter(self, scope: int, *_: Any) -> None:
        self._override.scopes.append(scope)

    def _leave(self, *_: Any) -> None:
        if self._override.scopes:
            self._override.scopes.pop()


def _known_by(args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]) -> Hashable:
    """What tells a step's evaluations apart: whose prompts they are of, and the shapes of what they are given."""
    given = {name: value for name, value in kwargs.items() if name != "control"}
    shapes = tuple(leaf.shape for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor))
    return (*options.get("cond_or_uncond", ()), *options.get("uuids", ()), shapes)


def _scoped(forward: Callable[..., Any], scopes: list[int], scope: int) -> Callable[..., Any]:
    """`forward` in a scope. Inside of a block no hook will do: by their numbers each block would be another graph."""

    def scoped(*args: Any, **kwargs: Any) -> Any:
        scopes.append(scope)
        try:
            return forward(*args, **kwargs)
        finally:
            scopes.pop()

    return scoped
