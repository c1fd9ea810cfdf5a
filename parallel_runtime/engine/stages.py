"""A network over ranks that each have the weights of some of its parts: in the stages of a pipeline, where each rank
computes its own blocks and sends tokens to the rank of the next; or in modules whose results go to all.

Every rank runs the network's own forward from beginning to end. Blocks of other stages return NaN in the shapes of
their outputs; where a block reads tokens that another stage computed, that stage sends them. So the code between blocks
is the network's own, on the rank where its numbers are real."""

import inspect
import json
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten, treespec_dumps, treespec_loads

from ..architectures.network_modules import BlockRef, counts_of, owners, units_of
from ..architectures.split_plan import SplitPlan
from ..errors import BAD_INPUT, Refused, Unsplittable
from ..specs import Parallelism
from .comm.collectives import Pending, all_gather_int, all_gather_v, allocate, any_rank
from .comm.mesh import ContextMesh, MeshDim
from .parallelize import parallelize, unparallelize
from .split.hooks import Args, Block, Kwargs, blocks_of_plan
from .split.streams import streams_of

log = logging.getLogger(__name__)
TAG = 7  # of messages and tensors on the CPU, where votes use the same ranks
MESSAGE_SHAPE = (1 + 16, 2 + 6)  # a row with the number of tensors, or END; then of each tensor dtype, ndim and shape
MAX_PENDING_SENDS = 8  # sends not yet received, messages too: more would keep more activations
END = -1
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
STAGE_ATTRIBUTE = "_real_on_stage"  # attribute of a block's output: the stage that computed it


class StageChannel:
    """Sends tensors between the stages of a pipeline, the ranks of `mesh_dim`; both ends know the order of transfers.

    Before them goes a message of their layout, or that no more come: on the CPU, so that a stage knows dtype and shape
    without asking its device. A send never blocks."""

    def __init__(self, mesh_dim: MeshDim) -> None:
        self.sent_bytes = 0
        self._mesh_dim = mesh_dim
        self._pending_sends: deque[Pending] = deque()
        self._end_sent = False  # this rank announced that no more comes
        self._ended_peers: set[int] = set()  # peers that announced the same

    def send(self, peer: int, tensors: Sequence[Tensor]) -> None:
        message = torch.zeros(MESSAGE_SHAPE, dtype=torch.int64)
        message[0, 0] = len(tensors)
        for row, tensor in zip(message[1 : 1 + len(tensors)], tensors, strict=True):
            row[: 2 + tensor.ndim] = torch.tensor([DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape])
        self._pending_sends.append(self._start(dist.isend, message, peer))
        for tensor in tensors:
            if tensor.numel():
                self.sent_bytes += tensor.nbytes
                device = self._mesh_dim.comm_device or tensor.device  # a copy: the next block may write into `tensor`
                copy = tensor.to(device, copy=True, memory_format=torch.contiguous_format)
                self._pending_sends.append(self._start(dist.isend, copy, peer, self._mesh_dim.group))
        while len(self._pending_sends) > MAX_PENDING_SENDS:
            self._pending_sends.popleft().wait()

    def recv(self, peer: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors that `peer` sends; Refused where shapes are not those of `like`, or where none come."""
        layouts = self._recv_layouts(peer)
        if layouts is None:
            raise Refused
        received = [self._recv(peer, *layout, like[0].device) for layout in layouts]
        shapes, expected = [list(x.shape) for x in received], [list(x.shape) for x in like]
        if shapes != expected:
            raise Unsplittable(f"a stage was given tokens of {shapes} and expected {expected}", "pipeline_degree")
        return received

    def send_end(self) -> None:
        """Announces to all peers that no more comes: a peer that waits in `recv` raises Refused."""
        if not self._end_sent:
            self._end_sent = True
            for peer in self._mesh_dim.other_ranks:
                self._pending_sends.append(self._start(dist.isend, torch.full(MESSAGE_SHAPE, END), peer))

    def close(self, *, refused: bool) -> None:
        """Waits until all is received. If any rank `refused`, drops it and raises Refused on all. Collective."""
        if any_rank(refused, self._mesh_dim):
            self.send_end()
            for peer in self._mesh_dim.other_ranks:
                while peer not in self._ended_peers:
                    for layout in self._recv_layouts(peer) or ():
                        self._recv(peer, *layout, self._mesh_dim.comm_device or torch.device("cpu"))
        while self._pending_sends:
            self._pending_sends.popleft().wait()
        ended, self._end_sent = self._end_sent, False
        self._ended_peers.clear()
        if ended:
            raise Refused

    def _start(self, operation: Any, tensor: Tensor, peer: int, group: dist.ProcessGroup | None = None) -> Pending:
        """Starts dist.isend or dist.irecv; in the world's group for what is on the CPU."""
        work = operation(tensor, self._mesh_dim.ranks[peer], group=group, tag=TAG)
        return Pending([work], [tensor], [tensor], self._mesh_dim.group_state)

    def _recv_layouts(self, peer: int) -> list[tuple[torch.dtype, list[int]]] | None:
        """Returns the layouts of the tensors that come next; None where the peer announced the end."""
        message = torch.empty(MESSAGE_SHAPE, dtype=torch.int64)
        self._start(dist.irecv, message, peer).wait()
        (count, *_), *rows = message.tolist()
        if count == END:
            self._ended_peers.add(peer)
            return None
        return [(DTYPES[dtype], dims[:ndim]) for dtype, ndim, *dims in rows[:count]]

    def _recv(self, peer: int, dtype: torch.dtype, shape: list[int], device: torch.device) -> Tensor:
        received = allocate(shape, torch.empty(0, dtype=dtype, device=self._mesh_dim.comm_device or device))
        if received.numel():
            self._start(dist.irecv, received, peer, self._mesh_dim.group).wait()
        return received.to(device)


class PlaceholderBlock(nn.Module):
    """Replaces a block of another stage. Returns NaN in the shapes of the arguments that the block would update: where
    the plan is wrong, NaN reaches the output. Reads all other attributes from the block itself, whose weights stay."""

    may_skip = True

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__["block"] = block

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter):  # a weight that returns to the mapped file
            setattr(self.__dict__["block"], name, value)
        else:
            super().__setattr__(name, value)


def _placeholder(ref: BlockRef) -> PlaceholderBlock:
    """Returns a placeholder whose forward has the signature of the block's: plans name its arguments."""
    signature = inspect.signature(type(ref.block).forward)
    names = [one.name for one in signature.parameters.values() if one.kind == one.POSITIONAL_OR_KEYWORD][1:]
    like_nan = partial(torch.full_like, fill_value=torch.nan)

    def forward(_: PlaceholderBlock, *args: Any, **kwargs: Any) -> Any:
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **dict(zip(names, args, strict=False)), **kwargs}
        out = tuple(tree_map_only(Tensor, like_nan, arguments[name]) for name in ref.module_plan.updated_args)
        return out[0] if len(out) == 1 else out

    forward.__signature__ = signature  # type: ignore[attr-defined]  # what inspect.signature reads
    return type(type(ref.block).__name__, (PlaceholderBlock,), {"forward": forward})(ref.block)


class Stages(ExitStack):
    """A network in the stages of a pipeline, whose tokens the ranks of a stage split where `parallelism` says so: its
    placeholders and hooks, which closing it removes. `remote_blocks` are the blocks of other stages.

    Each forward's output is on every rank when it returns, also NaN, which the network itself may give. `in_flight`,
    several forwards follow each other without waiting, and their outputs are real on the last stage until
    `share_outputs`; so do the turns of token patches."""

    def __init__(self, network: nn.Module, plan: SplitPlan, mesh: ContextMesh, parallelism: Parallelism) -> None:
        super().__init__()
        self.channel = StageChannel(mesh.pipeline)
        self._mesh_dim = mesh.pipeline
        self._is_in_flight = False
        self._output_shared = False  # all ranks have this forward's output, or its error
        self._outer_exception: BaseException | None = None  # handled by the caller while this forward began
        self._unit = 0  # the unit that ran last in this forward
        self._has_warned = False
        self._latest_stage: int | None = None  # of the block that ran last; None: every rank's numbers are real
        self._sources: list[int | None] = []  # for a block's hidden states: the stages where they are real
        reading = (each for each in plan.module_plans if each.updated_args and each.runs_with is None)
        self._late_block = next((each.name for each in reading if each.late_args), "")
        stages = owners(counts_of(network, plan, parallelism))
        units = list(zip(units_of(network, plan), stages, strict=True))
        self.remote_blocks = [ref for unit, stage in units if stage != mesh.pipeline.index for ref in unit]
        with ExitStack() as undo:
            undo.callback(self.close)
            for ref in self.remote_blocks:
                self.callback(ref.stack._modules.__setitem__, ref.name, ref.block)
                ref.stack._modules[ref.name] = _placeholder(ref)
            if parallelism.splits_tokens:
                parallelize(network, plan, mesh, parallelism)
                self.callback(unparallelize, network)
            streams = streams_of(network)
            self.pipefusion = None if streams is None else streams.pipefusion
            if self.pipefusion is not None:
                self.pipefusion.before_turn = self._begin_turn
            self.enter_context(network.register_forward_pre_hook(self._begin, with_kwargs=True))
            blocks = {block.module: block for block in blocks_of_plan(network, plan)}
            for number, (unit, stage) in enumerate(units):
                for block in (blocks[ref.block] for ref in unit):
                    note, transfer = partial(self._note_sources, block, number), partial(self._transfer, block, stage)
                    self.enter_context(block.module.register_forward_pre_hook(note, prepend=True, with_kwargs=True))
                    self.enter_context(block.module.register_forward_pre_hook(transfer, with_kwargs=True))
                    self.enter_context(block.module.register_forward_hook(partial(self._label, stage)))
            self.enter_context(network.register_forward_hook(self._end, always_call=True))
            undo.pop_all()

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Forwards in this context are real on the last stage alone. At its end a refusal of one is raised on all."""
        self._is_in_flight, refused = True, None
        try:
            with nullcontext() if self.pipefusion is None else self.pipefusion.in_flight():
                yield
        except Refused as error:
            # Else other stages would wait for what this one refuses to compute.
            self.channel.send_end()
            refused = error
        finally:
            self._is_in_flight = False
        try:
            self.channel.close(refused=refused is not None)
        except Refused as other_refusal:
            raise refused or other_refusal from None

    def share_outputs(self, out: Sequence[Tensor], stage: int | None = None) -> list[Tensor]:
        """Returns the `stage`'s `out` on every rank: the last one's, computed from outputs of forwards `in_flight`."""
        stage = self._mesh_dim.size - 1 if stage is None else stage
        if stage != self._mesh_dim.index:
            return self.channel.recv(stage, out)
        if not self._has_warned and any(bool(tensor.isnan().any()) for tensor in out):
            self._has_warned = True
            log.warning(
                "[CP] the pipeline's result has NaN: the model itself gives NaN, or this ComfyUI needs another plan; "
                "set pipeline_degree to 1 to see which"
            )
        for peer in self._mesh_dim.other_ranks:
            self.channel.send(peer, out)
        return list(out)

    def shared_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps a forward innermost: ComfyUI's outer wrappers (EasyCache) decide by its output on every stage."""
        output = forward(*args, **kwargs)
        if not self._is_in_flight:
            self._output_shared = True
            with self.in_flight():
                output = self._from_latest_stage(output)
        return output

    def _begin(self, network: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        self._output_shared, self._outer_exception = False, sys.exc_info()[1]
        self._begin_turn()
        if self._late_block and any((kwargs.get("control") or {}).values()):
            added = f"a ControlNet adds to what {self._late_block} keep for later blocks, which may be in another stage"
            raise Unsplittable(added, "pipeline_degree")
        if ((kwargs.get("transformer_options") or {}).get("patches") or {}).get("noise_refiner"):
            detail = "a Fun ControlNet continues from its result at blocks that may be in another stage"
            raise Unsplittable(detail, "pipeline_degree")

    def _begin_turn(self) -> None:
        self._latest_stage, self._unit = None, 0

    @torch.compiler.disable
    def _note_sources(self, block: Block, number: int, _: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Runs before the arguments are split: a split makes other tensors."""
        if number < self._unit and not block.module_plan.repeats:
            raise Unsplittable(f"{block.module_plan.name} runs in another order than its plan says", "pipeline_degree")
        self._unit = number
        tokens = [each for each in block.hidden_states(args, kwargs) if isinstance(each, Tensor)]
        self._sources = [getattr(tensor, STAGE_ATTRIBUTE, self._latest_stage) for tensor in tokens]

    @torch.compiler.disable
    def _transfer(self, block: Block, owner: int, _: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        local_stage = self._mesh_dim.index
        tokens = [each for each in block.hidden_states(args, kwargs) if isinstance(each, Tensor)]
        if owner != local_stage:
            if local_stage in self._sources:
                pairs = zip(tokens, self._sources, strict=True)
                self.channel.send(owner, [tensor for tensor, source in pairs if source == local_stage])
            return None
        arrived: dict[int, Tensor] = {}
        for source in dict.fromkeys(self._sources):
            if source not in (None, local_stage):
                like = [tensor for tensor, stage in zip(tokens, self._sources, strict=True) if stage == source]
                arrived |= zip(map(id, like), self.channel.recv(source, like), strict=True)

        def received(_: Any, value: Any, __: Any) -> Any:
            return tree_map_only(Tensor, lambda tensor: arrived.get(id(tensor), tensor), value)

        return block.replace_arguments(args, kwargs, received) if arrived else None

    @torch.compiler.disable
    def _label(self, owner: int, _: nn.Module, __: Any, output: Any) -> None:
        self._latest_stage = owner
        for tensor in tree_flatten(output)[0]:
            if isinstance(tensor, Tensor):
                setattr(tensor, STAGE_ATTRIBUTE, owner)

    def _end(self, _: nn.Module, __: Any, output: Any) -> Any:
        """Shares the output of the stage whose block ran last."""
        # Torch calls this too where the forward or a later hook raised, and handles that exception meanwhile; one
        # handled since before the forward is the caller's.
        raised, self._outer_exception = sys.exc_info()[1] is not self._outer_exception, None
        if self._output_shared:
            return output
        if raised:
            self.channel.send_end()
            if not self._is_in_flight:
                with suppress(Refused):
                    self.channel.close(refused=True)
            return None
        if self._is_in_flight:
            return output if self._latest_stage == self._mesh_dim.size - 1 else self._from_latest_stage(output)
        with self.in_flight():
            output = self._from_latest_stage(output)
        return output

    def _from_latest_stage(self, output: Any) -> Any:
        if self._latest_stage is None:
            return output
        leaves, structure = tree_flatten(output)
        return tree_unflatten(self.share_outputs(leaves, self._latest_stage), structure)


class RemoteModule(PlaceholderBlock):
    """Replaces a module whose weights another rank has: returns what that rank sends."""

    def __init__(self, module: nn.Module, receive: Callable[..., Any]) -> None:
        super().__init__(module)
        self.__dict__["receive"] = receive

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.receive(args, kwargs)


class OwnedModules:
    """The `modules` of a network with the index of the rank that has each in `dim`; set `dim` before a forward. `paths`
    are the names of those that other ranks have. All ranks run the code around them on the same real numbers, whatever
    it does with them: so it needs no plan, and is worth its traffic for networks that run once, as text encoders."""

    def __init__(self, network: nn.Module, modules: Sequence[nn.Module], owners: Sequence[int], index: int) -> None:
        self.dim = MeshDim()
        self.paths: list[str] = []
        names = {module: name for name, module in network.named_modules()}
        for module, owner in zip(modules, owners, strict=True):
            if owner == index:
                module.forward = partial(self._compute, module.forward)
                continue
            parent, _, name = names[module].rpartition(".")
            network.get_submodule(parent)._modules[name] = RemoteModule(module, partial(self._receive, owner))
            self.paths.append(names[module])

    def _compute(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Raises Refused, on all ranks, for input at which the module fails."""
        try:
            output = forward(*args, **kwargs)
            leaves, structure = tree_flatten(output)
            places = {id(leaf): place for place, leaf in enumerate(tree_flatten((args, kwargs))[0])}
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            layouts = [[str(x.dtype).removeprefix("torch."), list(x.shape), places.get(id(x))] for x in tensors]
            plain = [None if isinstance(leaf, Tensor) else [leaf] for leaf in leaves]
            note = json.dumps([treespec_dumps(structure), layouts, plain])
        except BAD_INPUT as error:
            self._exchange_note(self.dim.index, json.dumps(repr(error)))
            raise Refused("clip.failed", error=repr(error)) from None
        self._exchange_note(self.dim.index, note)
        for tensor in tensors:
            self._exchange(self.dim, self.dim.index, tensor.contiguous().view(-1), tensor.numel())
        return output

    def _receive(self, owner: int, args: Args, kwargs: Kwargs) -> Any:
        """Returns the output on the first argument's device. What the module overwrites is overwritten here too."""
        note, inputs = self._exchange_note(owner), tree_flatten((args, kwargs))[0]
        if isinstance(note, str):
            raise Refused("clip.failed", error=note)
        structure, layouts, plain = note
        device = next(leaf.device for leaf in inputs if isinstance(leaf, Tensor))
        arrived = []
        for name, shape, place in layouts:
            nothing = torch.empty(0, dtype=getattr(torch, name), device=device)
            value = self._exchange(self.dim, owner, nothing, torch.Size(shape).numel()).view(shape)
            arrived.append(value if place is None else inputs[place].copy_(value))
        tensors = iter(arrived)
        return tree_unflatten([next(tensors) if x is None else x[0] for x in plain], treespec_loads(structure))

    def _exchange_note(self, owner: int, note: str = "") -> Any:
        """Returns the owner's note, out of JSON."""
        local = torch.tensor(list(note.encode()), dtype=torch.uint8)
        size = all_gather_int(len(local), self.dim)[owner]
        on_cpu = MeshDim(size=self.dim.size, index=self.dim.index, ranks=self.dim.ranks)
        return json.loads(bytes(self._exchange(on_cpu, owner, local, size).tolist()))

    @staticmethod
    def _exchange(dim: MeshDim, owner: int, local: Tensor, size: int) -> Tensor:
        """Returns the owner's flat tensor of this size, on every rank; `local` is empty on others."""
        return all_gather_v(local, [size * (index == owner) for index in range(dim.size)], dim)
