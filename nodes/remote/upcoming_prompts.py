"""Prompts that nodes yet to be executed will ask a CLIP for, and their encodings, kept until they are asked for.

ComfyUI's list of nodes to execute names them. The node's own code makes the call of the text encoder, which is recorded
instead of run. A node gets a kept result only if its own call is the same in everything that the result depends on.
"""

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import comfy.sd
from comfy.model_management import processing_interrupted
from comfy.model_management import throw_exception_if_processing_interrupted as check_interrupt
from comfy_execution.graph import ExecutionBlocker, ExecutionList
from comfy_execution.progress import ProgressHandler, add_progress_handler
from comfy_execution.utils import get_executing_context
from execution import get_input_data  # ComfyUI's module
from nodes import NODE_CLASS_MAPPINGS  # type: ignore[attr-defined]  # ComfyUI's module, not our package
from server import PromptServer

from ...parallel_runtime import jobs, specs
from ...parallel_runtime.errors import BAD_INPUT, Refused
from ...parallel_runtime.group import launch, worker_group
from ...parallel_runtime.loading.code_names import is_comfyui, is_of_a_pack
from ...parallel_runtime.planning.resolve import EncoderSize
from ...parallel_runtime.request import ParallelRequest
from ..describe.model_files import NotParallel
from .lease import progress_bar

NAME = "context-parallel-sampler"
MOST = 16  # prompts at once: so many results wait in main memory at most


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A call of a text encoder: everything that its result depends on, and where it shall run."""

    spec: specs.ModelSpec
    request: ParallelRequest | None
    method: specs.EncoderMethod
    described: jobs.Described
    weight_patches: jobs.Described  # known by `spec`
    size: EncoderSize

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.spec, self.request, self.method, self.described.tree, self.described.tensors


class Recorded(Exception):
    """Ends a node's code at its call of a text encoder."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


@dataclass(eq=False)
class Encoding:
    """A call that runs on another thread, or has run, for a node that has not asked yet."""

    call: Call
    future: Future[Any] = field(default_factory=Future)
    step: tuple[int, int] | None = None  # steps done, and of how many

    def result(self) -> Any:
        """Waits for it, with its progress; None where it has not been computed. Raises WorkerLost."""
        show, shown = progress_bar(), None
        while not self.future.done():
            check_interrupt()
            wait([self.future], launch.POLL_SECONDS)
            if self.step not in (None, shown):
                shown = self.step
                show(shown[0], None, None, shown[1])
        check_interrupt()
        try:
            return self.future.result()
        except CancelledError:
            return None


class Text(NamedTuple):
    """A text of a text node of ComfyUI's that has not run yet, with the node's inputs; a list has several."""

    place: tuple[str, int]  # the node's id, and the number of the text
    clip: comfy.sd.CLIP
    kind: Any
    inputs: dict[str, Any]


def _call_of(text: Text) -> Call | None:
    """Returns the first call of the text encoder that the node will make; None where it will make none."""
    made = comfy.sd.CLIP.clone(text.clip)
    made.load_model = lambda *_: made.patcher
    made.cond_stage_model = text.clip.cond_stage_model.recording(made)
    try:
        _code_of(text.kind)(**text.inputs | {"clip": made})
    except Recorded as recorded:
        return recorded.call
    except (*BAD_INPUT, NotParallel, Refused):  # the node will raise it
        pass
    return None


def _code_of(kind: Any) -> Any:
    """Returns the method of a node's class that ComfyUI calls."""
    return kind.execute if hasattr(kind, "execute") else getattr(kind(), kind.FUNCTION)


class UpcomingPrompts(ProgressHandler):
    """Those of one execution. ComfyUI tells it of each node that starts: it then has idle workers encode what is known
    by now, unless that node will itself ask the CLIP for a text."""

    def __init__(self, execution: ExecutionList) -> None:
        super().__init__(NAME)
        self._kept: list[Encoding] = []
        self._execution = ref(execution, lambda _: self._kept.clear())  # the prompt is over
        self._seen: set[tuple[str, int]] = set()  # places that have asked, or been encoded for

    def start_handler(self, node_id: str, state: Any, prompt_id: str) -> None:
        texts = [] if is_over(prompt_id) else [text for text in self._texts() if text.place not in self._seen]
        asked = {text.clip for text in texts if text.place[0] == node_id}
        for clip in dict.fromkeys(text.clip for text in texts):
            if clip not in asked:
                self._kept += clip.cond_stage_model.encode_ahead(functools.partial(self._calls, clip), prompt_id)

    def beside(self, clip: comfy.sd.CLIP) -> list[Call]:
        """Returns the calls that nodes will make of this CLIP after that of the node that runs."""
        if (context := get_executing_context()) is None:
            return []
        self._seen |= {(context.node_id, index) for index in range((context.list_index or 0) + 1)}
        return self._calls(clip)

    def keep(self, calls: Sequence[Call], results: Sequence[Any]) -> None:
        for call, result in zip(calls, results, strict=True):
            self._kept.append(Encoding(call))
            self._kept[-1].future.set_result(result)

    def take(self, call: Call) -> Any:
        """Returns the result of a kept call that is the same, once it has been computed; None where there is none."""
        for encoding in self._kept:
            if worker_group.equal(encoding.call.identity, call.identity):
                self._kept.remove(encoding)
                return encoding.result()
        return None

    def _calls(self, clip: comfy.sd.CLIP) -> list[Call]:
        texts = [text for text in self._texts() if text.clip is clip and text.place not in self._seen]
        texts = texts[: MOST - len(self._kept)]
        self._seen |= {text.place for text in texts}
        return [call for call in map(_call_of, texts) if call is not None]

    def _texts(self) -> Iterator[Text]:
        """Yields texts whose CLIP is here and encodes in the workers, without hooks, and whose other inputs are
        known."""
        if (execution := self._execution()) is None:
            return
        for node_id in [*execution.pendingNodes]:
            node = execution.dynprompt.get_node(node_id)
            kind = NODE_CLASS_MAPPINGS.get(node["class_type"])
            of_comfyui = node["class_type"].startswith("CLIPTextEncode") and is_comfyui(kind)
            if not of_comfyui or is_of_a_pack(_code_of(kind)):
                continue
            inputs, missing, *_ = get_input_data(node["inputs"], kind, node_id, execution, execution.dynprompt)
            for index in range(0 if missing else max(map(len, inputs.values()))):
                each = {name: values[min(index, len(values) - 1)] for name, values in inputs.items()}
                in_workers = hasattr(type(getattr(each["clip"], "cond_stage_model", None)), "encode_ahead")
                blocked = any(isinstance(value, ExecutionBlocker) for value in each.values())
                if in_workers and not blocked and each["clip"].patcher.forced_hooks is None:
                    yield Text((node_id, index), each["clip"], kind, each)


def note_executions() -> None:
    """Has ComfyUI tell UpcomingPrompts of each execution."""
    init = ExecutionList.__init__

    @functools.wraps(init)
    def noting(self: ExecutionList, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        add_progress_handler(UpcomingPrompts(self))

    ExecutionList.__init__ = noting


def is_over(prompt: str) -> bool:
    """Has this prompt ended, or is it about to be interrupted?"""
    running, _ = PromptServer.instance.prompt_queue.get_current_queue_volatile()
    return processing_interrupted() or all(prompt != item[1] for item in running)
