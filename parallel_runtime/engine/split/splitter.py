"""Applies a split plan to the values of one forward: splits full ones over the ranks, gathers them again."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...architectures.split_plan import Count, Gather, Index, Names, Slices, Split, SplitLike, SplitPlan, SplitSpec
from ...errors import Refused, Unsplittable
from ..comm.collectives import all_gather_v
from ..comm.mesh import MeshDim
from .streams import PipeFusion, Streams, TurnEnded, chunk_sizes


class Splitter(Streams):
    """The streams of a network with a split plan: splits and gathers its tensors over the ranks of `mesh_dim`. Its
    state lives for one forward, or for the turn of one token patch with `pipefusion`."""

    def __init__(self, plan: SplitPlan, mesh_dim: MeshDim, pipefusion: PipeFusion | None = None) -> None:
        super().__init__(mesh_dim, plan.replicated, pipefusion)
        self._gather_incomplete = False  # a gather waits for later token patches
        self._shapes: dict[Names, torch.Size] = {}  # shapes of tokens that came in several dims
        self._split_values: dict[str, tuple[Any, Any]] = {}  # by name: the last full value, and its split
        self.split_streams: set[str] = set()  # of which the network's variables contain this rank's part now
        self._arrived_split: dict[Names, bool] = {}  # at the first block of a stack
        self._matching_specs: dict[tuple[Any, ...], Any] = {}  # several specs: the one that fits in this forward
        self._ranges: list[tuple[int, int]] = []  # of the full stream, of which the last module returns the tokens
        self._calls: Counter[int] = Counter()  # of each block in this forward, by id
        self._call = 1  # the number of the block's call in progress
        self._in_turns = plan.in_turns
        self.call_streams: Names = ()  # of its hidden states, in order
        self.full_between_blocks = False  # tokens are gathered after each block of this forward
        self.has_block_patches = False  # a model patch runs inside its blocks

    def clear(self) -> None:
        self.restart()
        self.full_between_blocks = self.has_block_patches = False

    def restart(self) -> None:
        """Starts the same forward over, with other tokens."""
        super().clear()
        kept = self._shapes, self._split_values, self.split_streams, self._arrived_split, self._matching_specs
        for state in (*kept, self._calls):
            state.clear()
        self._gather_incomplete = False

    def begin_call(self, block: int) -> None:
        """Begins a call of the block with this id."""
        self._calls[block] += 1
        self._call, self.call_streams = self._calls[block], ()

    def of_call(self, spec: Any) -> Any:
        """Returns `spec` for the call in progress: what a block is called with for the second time in a forward are
        other tokens of a stream that goes through the blocks in turns, with a length of their own."""
        if self._call == 1 or not self._in_turns:
            return spec

        def of_call(stream: str) -> str:
            return f"{stream} {self._call}" if stream in self._in_turns else stream

        if isinstance(spec, Index):
            return replace(spec, stream=of_call(spec.stream))
        streams = getattr(spec, "streams", None)
        return spec if streams is None else replace(spec, streams=tuple(map(of_call, streams)))

    @property
    def any_split(self) -> bool:
        return bool(self.split_streams)

    def split(self, value: Any, spec: SplitSpec, where: str) -> Any:
        """Splits the argument `value` as `spec` says; `where` names it in refusals."""
        if value is None or spec is None:
            return value
        spec = self.of_call(spec)
        match spec:
            case list():
                return self.split(value, self.matching_spec(value, spec, where), where)
            case tuple():
                items = zip(value, spec, strict=True)
                return type(value)([self.split(v, s, f"{where}[{number}]") for number, (v, s) in enumerate(items)])
            case Split():
                return self._split_tokens(value, spec, where)
            case Gather():
                return value if spec.after else self.gather(value, spec.streams, spec.dim, where)
            case Count():  # of all its streams: the one that is not known yet has the rest
                length = value.shape[spec.dim] if isinstance(value, Tensor) else value
                counted = next((stream for stream in spec.streams if stream not in self.lengths), spec.streams[-1])
                others = self.total(tuple(stream for stream in spec.streams if stream != counted))
                self.record_length(counted, length - others, where)
                return value
            case Index():
                return self._local_index(value, spec)
            case Slices():
                return [self._local_range(part, spec) for part in value]
        return self._split_once(value, spec, where)

    def _split_once(self, value: Any, spec: Any, where: str) -> Any:
        """Splits a value once for all blocks that receive the same one."""
        if self.pipefusion is not None and isinstance(spec, SplitLike) and "mask" in where:
            raise Unsplittable(f"{where} would have the tokens of one patch, which attend to all tokens", "patches")
        last, split = self._split_values.get(where, (None, None))
        if last is not value:
            if isinstance(spec, SplitLike):
                split = self._split_like(value, spec, where)
            else:
                split = spec(value, lambda part, spec: self.split(part, spec, f"{where} inside"))
            self._split_values[where] = value, split
        return split

    def matching_spec(self, value: Any, specs: list[Any], where: str) -> Any:
        """Returns the spec whose streams have as many tokens as the full `value`, at the first block of a stack.

        Chosen once a forward: later the full streams of one spec may be as long as a rank's part of another's."""
        key = tuple(specs)
        if key not in self._matching_specs:
            length = (value if isinstance(value, Tensor) else value[0]).shape[specs[0].dim]
            fits = [spec for spec in specs if length == self.total(spec.streams)]
            if not fits:
                raise _wrong_length(where, length, specs[0].streams, self.total(specs[0].streams))
            self._matching_specs[key] = fits[0]
        return self._matching_specs[key]

    def _split_tokens(self, value: Tensor, spec: Split, where: str) -> Tensor:
        self.call_streams += spec.streams
        shape = value.shape[spec.dim : spec.dim + spec.flat]
        (stream, *more_streams) = spec.streams
        if spec.repeats and stream not in self.split_streams:
            self.restart()
        if not more_streams and stream not in self.lengths:
            self._shapes[spec.streams] = shape
        if self.lengths.keys().isdisjoint(spec.streams):
            # No block of several streams has run, as where a node skips a stack: the last one gets all tokens.
            for name in spec.streams:
                self.record_length(name, shape.numel() if name == spec.streams[-1] else 0, where)
        total, local = self.total(spec.streams), self.local_count(spec.streams)
        self.split_streams.update(spec.streams)
        arrived_split = shape.numel() == local and total != local
        self._arrived_split.setdefault(spec.streams, arrived_split)
        if arrived_split:
            return value
        if shape.numel() != total:
            raise _wrong_length(where, shape.numel(), spec.streams, f"{total} (whole) or {local} (this rank's)")
        behind = value.shape[spec.dim + spec.flat :]
        flattened = value.reshape(*value.shape[: spec.dim], total, *(1,) * (spec.flat - 1), *behind)
        split = self._local(flattened, spec.streams, spec.dim)
        if more_streams or stream in self.replicated:
            return split
        return split.clone(memory_format=torch.contiguous_format)  # blocks write into their input

    def _split_like(self, value: Any, spec: SplitLike, where: str) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([self._split_like(item, spec, where) for item in value])
        if value is None:
            return None
        if not isinstance(value, Tensor):
            raise Unsplittable(f"{where} is a {type(value).__name__}")
        if spec.ndim not in (None, value.ndim) or value.shape[spec.dim] == 1:
            return value
        total, length = self.total(spec.streams), value.shape[spec.dim]
        if spec.per and length < total:
            value = value.repeat_interleave(-(-total // length), spec.dim).narrow(spec.dim, 0, total)
        elif spec.at_end and length < total:
            before = value.narrow(spec.dim, 0, 1).repeat_interleave(total - length, spec.dim)
            behind = self._local_position(total - length, spec.streams)
            local = self._local(torch.cat([before, value], spec.dim), spec.streams, spec.dim)
            return local.narrow(spec.dim, behind, local.shape[spec.dim] - behind).contiguous()
        elif length != total:
            raise _wrong_length(where, length, spec.streams, total)
        return self._local(value, spec.streams, spec.dim).contiguous()

    def _local(self, value: Tensor, streams: Names, dim: int) -> Tensor:
        parts = value.split([self.length(stream) for stream in streams], dim)
        local = [self.local_slice(part, stream, dim) for part, stream in zip(parts, streams, strict=True)]
        return local[0] if len(local) == 1 else torch.cat(local, dim)

    def _local_index(self, at: int, spec: Index) -> int:
        streams = (spec.stream,)
        if spec.to_end:
            return self.local_count(streams) - self._local_position(self.total(streams) - at, streams)
        return self._local_position(at, streams)

    def _local_range(self, part: Any, spec: Slices) -> tuple[Any, ...]:
        local_before = self.local_count(spec.after)
        before = self.total(spec.after) if self.full_between_blocks else local_before  # as the network counts them
        start, end, *values = part
        local = [self._local_position(at - before, spec.streams, local_before) if at else at for at in (start, end)]
        for number, value in enumerate(values):
            if isinstance(value, Tensor):  # it has a value for each position of the range
                full = value.new_zeros(self.total(spec.streams), *value.shape[1:])
                full[slice(*(at - before if at else at for at in (start, end)))] = value
                own = slice(*(at - local_before if at else at for at in local))
                values[number] = self._local(full, spec.streams, 0)[own]
        return (*local, *values)

    def _local_position(self, at: int, streams: Names, before: int = 0) -> int:
        """Returns `before` plus the index, among this rank's tokens, of a position in the concatenated full streams."""
        for stream in streams:
            length, local = self.length(stream), self.local_count((stream,))
            start = 0 if stream in self.replicated else self.chunk(stream)[0]
            before += min(max(min(at, length) - start, 0), local)
            at = max(at - length, 0)
        return before

    def residual(self, value: Any, stream: str, tokens: int | None) -> Any:
        """Returns a ControlNet's residual [B, tokens, C] for the first tokens of a stream or for all of them: this
        rank's part where the stream is split by now, else the full one. With `tokens` it is given as this rank's part
        of so many, and is gathered unless the stream has as many."""
        if not isinstance(value, Tensor):
            return value
        is_split = stream in self.split_streams
        if tokens is not None:
            if is_split and self.length(stream) == tokens:
                return value
            sizes = chunk_sizes(tokens, self._mesh_dim.parts)
            value = all_gather_v(value.narrow(1, 0, sizes[self._mesh_dim.index]), sizes, self._mesh_dim, 1)
        if not is_split:
            return value
        length = self.length(stream)
        if value.shape[1] > length:
            raise _wrong_length("a residual", value.shape[1], (stream,), length)
        if value.shape[1] == length or stream in self.replicated:
            return self._local(value, (stream,), 1)
        start, size = self.chunk(stream)
        return value[:, start : start + size]

    def gather(self, value: Any, streams: Names, dim: int, where: str) -> Any:
        """Returns the full streams, gathered from all ranks; what is full already stays. Collective."""
        if value is None or self.split_streams.isdisjoint(streams):
            return value
        self.split_streams.difference_update(streams)
        total, shape = self.total(streams), self._shapes.get(streams, ())
        flat = max(1, len(shape))
        tokens_shape = value.shape[dim:][:flat]
        if not self._is_local(value, streams, dim):
            if (tokens := tokens_shape.numel()) != total:
                expected = f"{total} (whole) or {self.local_count(streams)} (this rank's)"
                raise _wrong_length(where, tokens, streams, expected)
            # One of all ranks may not know whether its tokens are all or its part: then every rank splits and gathers.
            if not self.any_rank_has_all(streams):
                return value
            flattened = value.reshape(*value.shape[:dim], total, *(1,) * (flat - 1), *value.shape[dim + flat :])
            value = self._local(flattened, streams, dim)
        elif self._arrived_split.get(streams) and not self.full_between_blocks:
            raise Unsplittable(f"{where} would be unsplit, but its blocks got a part of the tokens")
        parts = value.split([self.local_count((stream,)) for stream in streams], dim)
        gathered = [self._gather_stream(part, stream, dim, where) for part, stream in zip(parts, streams, strict=True)]
        complete = [part for part in gathered if part is not None]
        if len(complete) < len(gathered):
            self._gather_incomplete = True
            return value
        full = torch.cat(complete, dim)
        return full.reshape(*full.shape[:dim], *shape, *full.shape[dim + len(shape) :]) if len(shape) > 1 else full

    def _is_local(self, value: Tensor, streams: Names, dim: int) -> bool:
        shape, local = self._shapes.get(streams, ()), self.local_count(streams)
        tokens_shape = value.shape[dim:][: max(1, len(shape))]
        is_full = len(shape) > 1 and tokens_shape == shape and self.total(streams) != local
        return tokens_shape[0] == local and not is_full

    def begin_tail(self, tail: Gather, value: Tensor, ranges: list[Any]) -> bool:
        """Returns whether the module behind the blocks is given this rank's part of `value`. It is not where patches
        between blocks had all tokens gathered, or where no block has run."""
        self._ranges = [(start, end) for start, end, *_ in ranges]
        return not self.split_streams.isdisjoint(tail.streams) and self._is_local(value, tail.streams, tail.dim)

    def gather_tail(self, tail: Gather, output: Any, where: str) -> Any:
        """Returns the full output of the module behind the blocks. Collective where the streams are split."""
        if not tail.ranges or self.split_streams.isdisjoint(tail.streams):
            return self.gather(output, tail.streams, tail.dim, where)
        self.split_streams.difference_update(tail.streams)
        (stream,) = tail.streams
        gathered = []
        for number, (part, (start, end)) in enumerate(zip(output, self._ranges, strict=True)):
            chunks = [self.chunk(stream, index) for index in range(self._mesh_dim.size)]
            sizes = [max(0, min(end, first + size) - max(start, first)) for first, size in chunks]
            gathered.append(self._gather_chunks(part, sizes, tail.dim, (where, number)))
        if any(part is None for part in gathered):
            self._gather_incomplete = True
            return output
        return type(output)(gathered)

    def raise_if_incomplete(self) -> None:
        """Raises TurnEnded where a gather waits for later token patches."""
        if self._gather_incomplete:
            raise TurnEnded

    def _gather_stream(self, part: Tensor, stream: str, dim: int, where: str) -> Tensor | None:
        """Returns the full stream of this rank's part of it; None where other token patches have not had their turn."""
        if stream not in self.replicated:
            return self._gather_chunks(part, self.sizes(stream), dim, (where, stream))
        return part if self.pipefusion is None else self.pipefusion.gather((where, stream), part, dim)

    def _gather_chunks(self, part: Tensor, sizes: Sequence[int], dim: int, key: Hashable) -> Tensor | None:
        full = all_gather_v(part.narrow(dim, 0, sizes[self._mesh_dim.index]), sizes, self._mesh_dim, dim)
        return full if self.pipefusion is None else self.pipefusion.gather(key, full, dim)


class Residuals(list[Any]):
    """A ControlNet's residuals, each taken by `Splitter.residual` when it is read, as the streams are by then."""

    def __init__(self, residuals: list[Any], splitter: Splitter, stream: str, tokens: int | None = None) -> None:
        super().__init__(residuals)
        self._taken = partial(splitter.residual, stream=stream, tokens=tokens)

    def __getitem__(self, index: Any) -> Any:
        return self._taken(super().__getitem__(index))

    def __iter__(self) -> Iterator[Any]:
        return map(self._taken, super().__iter__())

    def pop(self, index: Any = -1) -> Any:
        return self._taken(super().pop(index))


def _wrong_length(where: str, tokens: int, streams: Names, expected: object) -> Refused:
    return Unsplittable(f"{where} has {tokens} tokens, but {'+'.join(streams)} has {expected}")
