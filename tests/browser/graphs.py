"""Puts small graphs onto the page's canvas, and finds what a user would click there."""

from __future__ import annotations

from typing import Any

PUT = """({ nodes, links }) => {
    app.graph.clear();
    const made = nodes.map(([kind, x, y, values]) => {
        const node = LiteGraph.createNode(kind);
        node.pos = [x, y];
        app.graph.add(node);
        for (const [name, value] of Object.entries(values)) {
            const widget = node.widgets.find(widget => widget.name === name);
            widget.value = value;
            widget.callback?.(value);
        }
        return node;
    });
    for (const [from, slot, to, name] of links) made[from].connect(slot, made[to], made[to].findInputSlot(name));
    app.canvas.ds.scale = 1;
    app.canvas.ds.offset = [120, 100];
    app.canvas.setDirty(true, true);
}"""
TITLE = """kind => {
    const node = app.graph.nodes.find(node => node.type === kind);
    const { scale, offset } = app.canvas.ds, { x, y } = app.canvas.canvas.getBoundingClientRect();
    return [x + (node.pos[0] + 60 + offset[0]) * scale, y + (node.pos[1] - 15 + offset[1]) * scale];
}"""
DRAWN = """() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"""
MOUNTED = """() => !LiteGraph.vueNodesMode
    || app.graph.nodes.every(node => document.querySelector(`[data-node-id="${node.id}"]`))"""

TEXT = '{"tokens": 20, "dim": 128, "pooled": 64, "guidance": 3.5}'
LOADER = ["UNETLoader", 0, 0, {"unet_name": "flux_dev.safetensors"}]
PROMPT = ["CPTestConditioning", 0, 160, {"spec": TEXT, "seed": 3}]
LATENT = ["EmptySD3LatentImage", 0, 330, {"width": 256, "height": 192}]


def put(page: Any, nodes: list[Any], links: list[Any] | None = None) -> None:
    """`nodes` are [kind, x, y, {widget: value}], `links` [from, slot, to, input's name]."""
    page.evaluate(PUT, {"nodes": nodes, "links": links or []})
    wait_until_drawn(page)


def wait_until_drawn(page: Any) -> None:
    """Before that a click finds nothing, however slow the machine is."""
    page.wait_for_function(MOUNTED)
    page.evaluate(DRAWN)


def title(page: Any, kind: str) -> tuple[float, float]:
    """Where the title of the one node of this kind is on the page."""
    x, y = page.evaluate(TITLE, kind)
    return x, y


def put_sampler(page: Any, kind: str = "KSampler", **widgets: object) -> None:
    """A whole graph that samples tiny FLUX and saves the latent."""
    sampler = [kind, 420, 0, {"seed": 5, "steps": 4, "cfg": 2.0, "scheduler": "simple", **widgets}]
    links = [[0, 0, 3, "model"], [1, 0, 3, "positive"], [1, 0, 3, "negative"], [2, 0, 3, "latent_image"]]
    save = ["CPTestSaveLatent", 760, 0, {"name": "clicked"}]
    put(page, [LOADER, PROMPT, LATENT, sampler, save], [*links, [3, 0, 4, "samples"]])
