"""ComfyUI draws nodes in two ways; the tests that touch a node run in both."""

from __future__ import annotations

import pytest

BOTH = pytest.mark.parametrize(
    "page",
    [
        pytest.param({"Comfy.VueNodes.Enabled": False}, id="LiteGraph"),
        pytest.param({"Comfy.VueNodes.Enabled": True}, id="Nodes 2.0"),
    ],
    indirect=True,
)
NODES_2 = pytest.mark.parametrize("page", [{"Comfy.VueNodes.Enabled": True}], ids=["Nodes 2.0"], indirect=True)
