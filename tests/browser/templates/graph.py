"""A workflow as its author thinks of it: nodes in columns, what goes into each, and the files that it needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

HUB = "https://huggingface.co/"


@dataclass(frozen=True, kw_only=True)
class File:
    """`folder` below ComfyUI's models; `source` is where it is published, below HUB."""

    name: str
    folder: str
    source: str

    @property
    def url(self) -> str:
        return f"{HUB}{self.source.replace(':', '/resolve/main/')}"


@dataclass(frozen=True, eq=False)
class Node:
    number: int
    kind: str
    column: int
    inputs: dict[str, Any]
    title: str

    def __getitem__(self, slot: int) -> Link:
        return Link(self, slot)


@dataclass(frozen=True, eq=False)
class Link:
    node: Node
    slot: int


@dataclass(kw_only=True)
class Template:
    """`about` is a line or two for the note; `kind` says in a few words what it makes. `size` is about what its files
    have, in GB; `number` is its place in ComfyUI's list, which the page sorts by names."""

    name: str
    title: str
    kind: str
    about: str
    size: int
    number: int = 0
    nodes: list[Node] = field(default_factory=list)
    files: list[File] = field(default_factory=list)

    def add(self, kind: str, column: int, *, title: str = "", **inputs: Any) -> Node:
        """Inputs are widgets' values, files, or other nodes: a Node stands for its first output."""
        node = Node(len(self.nodes) + 1, kind, column, inputs, title)
        self.nodes.append(node)
        self.files += [value for value in inputs.values() if isinstance(value, File) and value not in self.files]
        return node

    @property
    def file(self) -> str:
        """What ComfyUI shows as its title."""
        return f"{self.number:02d} {self.title}, {self.kind}"

    @property
    def needs(self) -> str:
        cut = next((node.inputs for node in self.nodes if node.kind == "CPParallelConfig"), {})
        where = "two machines" if cut.get("nnodes") else "2 GPUs" if cut.get("cfg_degree") else "1 GPU or more"
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return f"{where}; {files}, about {self.size} GB"

    @property
    def note(self) -> str:
        lines = [f"## {self.title}", "", self.about, "", f"**Needs** {self.needs}", "", "**Files**", ""]
        lines += [f"- **models/{file.folder}/** [{file.name}]({file.url})" for file in self.files]
        return "\n".join(lines if self.files else lines[:3])

    def spec(self) -> dict[str, Any]:
        """For build.js, in JSON."""
        return {"note": self.note, "nodes": [_spec(node) for node in self.nodes]}


def _spec(node: Node) -> dict[str, Any]:
    widgets, links, models = {}, {}, []
    for name, value in node.inputs.items():
        if isinstance(value, Node | Link):
            link = value[0] if isinstance(value, Node) else value
            links[name] = [link.node.number, link.slot]
        elif isinstance(value, File):
            widgets[name] = value.name
            models.append({"name": value.name, "url": value.url, "directory": value.folder})
        else:
            widgets[name] = value
    return {
        "number": node.number,
        "kind": node.kind,
        "column": node.column,
        "title": node.title,
        "widgets": widgets,
        "links": links,
        "models": models,
    }
