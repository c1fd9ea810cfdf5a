"""Talks to one ComfyUI over HTTP and its WebSocket: queue a graph, follow its events, get its outputs or its error."""

from __future__ import annotations

import json
import math
import os
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .comfy import DEVICE
from .websocket import WebSocket

Graph = dict[str, dict[str, Any]]
RUN_SECONDS = float(os.environ.get("CP_TEST_RUN_SECONDS", "120"))  # more where many tests share few cores
ENDS = ("execution_success", "execution_error", "execution_interrupted")


class NodeError(Exception):
    """A node raised, or its inputs did not validate; the text is what the user reads."""


class Interrupted(Exception):
    pass


class ServerGone(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class Event:
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)
    image: bytes = b""
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, kw_only=True)
class FinishedPrompt:
    """A finished prompt."""

    outputs: Mapping[str, Any]
    events: tuple[Event, ...]
    seconds: float

    @property
    def progress(self) -> list[int]:
        return [int(event.data["value"]) for event in self.events if event.kind == "progress"]

    @property
    def previews(self) -> list[bytes]:
        return [event.image for event in self.events if event.kind == "preview"]


class Client:
    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"
        self._id = uuid.uuid4().hex
        self._events: list[Event] = []
        self._news = threading.Condition()
        self._gone = False
        self._socket = WebSocket(port, f"/ws?clientId={self._id}")
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def queue(self, graph: Graph, *, preview_method: str = "none") -> str:
        extra = {"preview_method": preview_method}
        answer = self.post("/prompt", prompt=on_device(graph), client_id=self._id, extra_data=extra)
        if answer.get("node_errors"):
            raise NodeError(json.dumps(answer["node_errors"], indent=1))
        return str(answer["prompt_id"])

    def run(self, graph: Graph, *, timeout: float = RUN_SECONDS, preview_method: str = "none") -> FinishedPrompt:
        since = self.now()
        return self.finish(self.queue(graph, preview_method=preview_method), since=since, timeout=timeout)

    def finish(self, prompt: str, *, since: int = 0, timeout: float = RUN_SECONDS) -> FinishedPrompt:
        """Wait for the end of a queued prompt: its outputs, or raise what its node raised."""
        started = time.monotonic()
        self.wait(lambda e: e.kind == "executing" and e.data == {"node": None, "prompt_id": prompt}, timeout, since)
        events = tuple(self._events[since:])
        history = self.get(f"/history/{prompt}")[prompt]
        kind, content = history["status"]["messages"][-1]
        if kind == "execution_interrupted":
            raise Interrupted(content["node_type"])
        if kind != "execution_success":
            raise NodeError(f"{content['node_type']}: {content['exception_type']}: {content['exception_message']}")
        return FinishedPrompt(outputs=history["outputs"], events=events, seconds=time.monotonic() - started)

    def interrupt(self, prompt: str) -> None:
        self.post("/interrupt", prompt_id=prompt)

    def settle(self, timeout: float = 30) -> None:
        """Drop whatever a failed test has left in the queue."""
        deadline = time.monotonic() + timeout
        while any(self.pending()):
            self.post("/queue", clear=True)
            self.post("/interrupt")
            if time.monotonic() > deadline:
                raise TimeoutError(f"still busy after {timeout} s of interrupts")
            time.sleep(0.1)

    def free(self) -> None:
        self.post("/free", unload_models=True, free_memory=True)

    def pending(self) -> tuple[list[Any], list[Any]]:
        """Running, and waiting."""
        queue = self.get("/queue")
        return queue["queue_running"], queue["queue_pending"]

    def now(self) -> int:
        """A mark in the stream of events, for `since`."""
        return len(self._events)

    def events(self, since: int) -> tuple[Event, ...]:
        return tuple(self._events[since:])

    def wait(self, wanted: Callable[[Event], bool], timeout: float, since: int = 0) -> Event:
        deadline = time.monotonic() + timeout
        with self._news:
            while True:
                for event in self._events[since:]:
                    if wanted(event):
                        return event
                since = len(self._events)
                if self._gone:
                    raise ServerGone("the server closed its WebSocket")
                if not self._news.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"no such event within {timeout} s; the last ones: {self._events[-3:]}")

    def wait_for_step(self, step: int, *, since: int, timeout: float = 60) -> Event:
        """Until the running sampler has reported this step; an error meanwhile is raised at once."""
        event = self.wait(
            lambda e: e.kind in ENDS or (e.kind == "progress" and e.data["value"] >= step), timeout, since
        )
        if event.kind in ENDS:
            raise NodeError(f"ended before step {step}: {event.kind} {event.data.get('exception_message', '')}")
        return event

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self._base + path, timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, **body: object) -> dict[str, Any]:
        request = urllib.request.Request(
            self._base + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as refused:
            raise NodeError(refused.read().decode()) from None

    def _listen(self) -> None:
        while (message := self._socket.receive()) is not None:
            self._note(_event(message))
        self._gone = True
        with self._news:
            self._news.notify_all()

    def _note(self, event: Event) -> None:
        with self._news:
            self._events.append(event)
            self._news.notify_all()


def on_device(graph: Graph, device: str = DEVICE) -> Graph:
    """The graph with every worker on this device, where its configs say "cpu" or leave devices to the machine."""
    if device == "cpu":
        return graph
    moved = {name: {**node, "inputs": dict(node["inputs"])} for name, node in graph.items()}
    for node in moved.values():
        if "devices" in (inputs := node["inputs"]):
            devices = inputs["devices"] or ",".join(["cpu"] * workers_of(inputs))
            inputs["devices"] = devices.replace("cpu", device)
    return moved


def workers_of(config: Mapping[str, Any]) -> int:
    """How many workers a config asks for on a machine without a GPU, where 1 is what is left to the node."""
    degrees = (config.get(f"{kind}_degree", 1) for kind in ("ring", "ulysses", "cfg", "data", "pipeline"))
    return len(config["devices"].split(",")) if config["devices"] else math.prod(max(1, each) for each in degrees)


def _event(message: str | bytes) -> Event:
    if isinstance(message, str):
        event = json.loads(message)
        return Event(kind=event["type"], data=event["data"])
    is_preview = int.from_bytes(message[:4], "big") == 1  # then 4 bytes of image type, then the image
    return Event(kind="preview" if is_preview else "binary", image=message[8:])
