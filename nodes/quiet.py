"""A refusal is a sentence for a user, and no crash: ComfyUI's log has the sentence, and not where it was raised."""

from __future__ import annotations

import logging

from ..parallel_runtime.errors import Refused

START, RAISED = "Traceback (most recent call last)", f"{Refused.__module__}.{Refused.__qualname__}: "


def keep_tracebacks_of_refusals_out() -> None:
    """ComfyUI logs what a node raised in two records, with the root logger: the sentence, and the traceback."""
    logging.getLogger().addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    text = record.msg if isinstance(record.msg, str) else ""
    return not (text.startswith(START) and any(line.startswith(RAISED) for line in text.splitlines()))
