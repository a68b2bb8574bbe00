"""The tree of artifacts from which an artifact was made."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from schemas.artifacts import Manifest, Ref

if TYPE_CHECKING:
    from stages.artifacts.store import Store


@dataclass
class Node:
    """One artifact of a lineage; the same artifact is the same object wherever it appears."""

    ref: Ref
    manifest: Manifest | None
    """None: the store no longer has it."""
    inputs: dict[str, list["Node"]] = field(default_factory=dict)
    """By the stage's input name."""

    def walk(self) -> Iterator[tuple[int, str | None, "Node", bool]]:
        """Every artifact, this one first, each before its inputs.

        Yields:
            depth, name of the input that it is (None for the first), the node, and whether its own inputs
            are shown elsewhere, under the nearest artifact that used it.
        """
        parents: dict[str, str | None] = {self.ref.key: None}
        level = [self]
        while level:  # breadth first: each artifact belongs under the nearest of those that used it
            found = [(node, child) for node in level for nodes in node.inputs.values() for child in nodes]
            level = []
            for node, child in found:
                if child.ref.key not in parents:
                    parents[child.ref.key] = node.ref.key
                    level.append(child)
        shown: set[str] = set()
        pending: list[tuple[int, str | None, Node, str | None]] = [(0, None, self, None)]
        while pending:
            depth, name, node, parent = pending.pop()
            again = node.ref.key in shown or parents[node.ref.key] != parent
            yield depth, name, node, again
            if not again:
                shown.add(node.ref.key)
                children = [
                    (depth + 1, name, child, node.ref.key) for name, nodes in node.inputs.items() for child in nodes
                ]
                pending += reversed(children)


def lineage(store: "Store", manifest: Manifest) -> Node:
    """The lineage of an artifact; each manifest is read once, however often it is used."""
    root = Node(manifest.ref, manifest)
    known = {root.ref.key: root}
    pending = [root]
    while pending:
        node = pending.pop()
        assert node.manifest is not None
        for name, refs in node.manifest.inputs.items():
            node.inputs[name] = []
            for ref in refs:
                if ref.key not in known:
                    known[ref.key] = Node(ref, store.find(ref.kind, ref.key))
                    if known[ref.key].manifest is not None:
                        pending.append(known[ref.key])
                node.inputs[name].append(known[ref.key])
    return root
