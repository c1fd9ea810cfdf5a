"""Logs the bytes of each bundle that ComfyUI's process sends to its workers."""

from __future__ import annotations

import logging
import os
from typing import Any

BUNDLES = "parallel_runtime.wire.bundles"


def log_bytes(bundles: Any) -> None:
    """`bundles` is that module of the pack."""
    write = bundles.write_bundle

    def write_bundle(*args: Any, **kwargs: Any) -> int:
        bundle: int = write(*args, **kwargs)
        logging.info("[meter] %d bytes", os.fstat(bundle).st_size)
        return bundle

    bundles.write_bundle = write_bundle
