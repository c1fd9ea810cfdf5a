"""The event cp.refused: tells the page which node was refused, and why, as data (web/refusals.js)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from comfy_execution.graph import NodeNotFoundError
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ...parallel_runtime.errors import Refused, to_json
from ...parallel_runtime.group.runtime import runtime

EVENT = "cp.refused"


@contextmanager
def announce_refusals() -> Iterator[None]:
    """Sends a refusal that leaves this block, or a function decorated with it, to the page that queued the run."""
    try:
        yield
    except Refused as refused:
        server, context = PromptServer.instance, get_executing_context()
        node = _on_canvas(context.node_id) if context is not None else server.last_node_id
        prompt = context.prompt_id if context is not None else server.last_prompt_id
        runtime.journal.note(f"[CP] refused: {refused}")
        runtime.refused(refused.sentence)
        if server.client_id is not None:  # None: an API prompt of nobody's page
            event = {"prompt_id": prompt, "node_id": node, "fix": refused.fix, **refusal_json(refused)}
            server.send_sync(EVENT, event, server.client_id)
        raise


def _on_canvas(node: str) -> str:
    """Returns the node that the user sees: in a loop of the graph, and wherever one node runs as others, another id."""
    with suppress(NodeNotFoundError):
        shown: str = get_progress_state().dynprompt.get_display_node_id(node)
        return shown
    return node


def refusal_json(refused: Refused) -> dict[str, Any]:
    """Returns code and values for the user's language, the widget to change, and the sentence in English."""
    return {**to_json(refused.sentence), "widget": refused.widget, "text": str(refused)}
