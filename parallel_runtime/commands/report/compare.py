"""Compare without the page: a ComfyUI of its own, on a free port, takes one step of each sampler of a workflow natively
and on the workers. A ComfyUI that runs beside it, its queue and its files are not touched."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...errors import Refused
from .workflow import read

log = logging.getLogger(__name__)

Json = dict[str, Any]
NODE = "CPCompare"  # the node's class, and its name in the prompt
START_SECONDS = 600.0  # packs may be many
ANSWER_SECONDS = 300.0  # it may be busy
STOP_SECONDS = 20.0
LOG_CHARACTERS = 2000


def compare(file: Path, comfyui: str, arguments: Sequence[str]) -> int:
    """Prints how far apart each sampler's step is; returns 0 if all are equal. `arguments` are ComfyUI's own. Raises
    Refused, for example for a workflow that nothing samples on workers."""
    prompt = exported(read(file))
    if not comfyui:
        raise Refused("report.no_comfyui")
    with TemporaryDirectory(prefix="cp-") as folder, _comfyui(comfyui, Path(folder), arguments) as server:
        log.info("one step of each sampler, on the workers and in ComfyUI's process")
        shown = _shown(server, server.queued({**prompt, NODE: {"class_type": NODE, "inputs": {}}}))
    for text in shown["text"]:
        log.info("%s", text)
    (table,) = shown["cp_compare"]
    return int(bool(table["troubles"]) or not table["rows"])


def exported(workflow: Any) -> Json:
    """Returns the nodes of a workflow that was exported for the API. Raises Refused for any other."""
    nodes = workflow.get("prompt", workflow) if isinstance(workflow, dict) else None
    if isinstance(nodes, dict) and isinstance(nodes.get("nodes"), list):
        raise Refused("report.not_exported")
    if (
        not nodes
        or not isinstance(nodes, dict)
        or not all(isinstance(one, dict) and "class_type" in one for one in nodes.values())
    ):
        raise Refused("report.no_workflow", kind=type(workflow).__name__)
    return nodes


class Server:
    """A ComfyUI that was started here."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, output: Path) -> None:
        self._process, self._address, self._output = process, f"http://127.0.0.1:{port}", output

    def ask(self, path: str, body: Json | None = None) -> Any:
        """Raises Refused where ComfyUI has ended or refuses; OSError where it does not answer yet."""
        if self._process.poll() is not None:
            log = self._output.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:]
            raise Refused("report.comfyui_ended", code=self._process.returncode, log=log)
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as refused:
            raise Refused("report.prompt", answer=refused.read().decode(errors="replace")) from None

    def queued(self, prompt: Json) -> str:
        if NODE not in self.ask("/object_info"):
            raise Refused("report.no_pack")
        return str(self.ask("/prompt", {"prompt": prompt, "partial_execution_targets": [NODE]})["prompt_id"])


def _shown(server: Server, prompt: str) -> Json:
    """Waits for the prompt, and returns what the node shows. Raises Refused with what a node has raised."""
    while not (history := server.ask(f"/history/{prompt}")):
        time.sleep(0.5)
    run = history[prompt]
    for kind, message in run["status"]["messages"]:
        if kind == "execution_error":
            node = f"{message['node_type']} ({message['node_id']})"
            raise Refused("report.node_failed", node=node, error=message["exception_message"].strip())
    return next(dict(one) for one in run["outputs"].values() if "cp_compare" in one)


@contextmanager
def _comfyui(root: str, folder: Path, arguments: Sequence[str]) -> Iterator[Server]:
    """Starts ComfyUI, whose temporary files are in `folder`, and ends it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "main.py", "--port", str(port), "--disable-auto-launch", "--temp-directory", str(folder)]
    command += ["--output-directory", str(folder), "--database-url", "sqlite:///:memory:", *arguments]
    output = folder / "comfyui.log"
    log.info("starting ComfyUI in %s", root)
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=root, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        server, deadline = Server(process, port, output), time.monotonic() + START_SECONDS
        while True:
            try:
                server.ask("/queue")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise Refused("report.comfyui_silent", seconds=f"{START_SECONDS:.0f}") from None
                time.sleep(0.2)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
