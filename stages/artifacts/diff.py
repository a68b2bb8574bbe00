"""What differs between two artifacts, as plain data."""

from dataclasses import dataclass
from typing import Any

from schemas.artifacts import Manifest, Ref
from stages.artifacts.runs import flattened
from stages.artifacts.store import Store

ABSENT = "(absent)"
"""Stands for a value that one of the two does not have."""

Changes = dict[str, tuple[Any, Any]]
"""By name: the value in the first and in the second artifact."""


@dataclass(frozen=True)
class Difference:
    """Only what differs; equal things are left out."""

    a: Ref
    b: Ref
    same_content: bool
    """Whether both hold the same files, byte for byte."""
    config: Changes
    """By dotted path; seed, draw and the stage's name and version are among them."""
    inputs: Changes
    """By input name: references as text."""
    rows: Changes
    """By table: numbers of rows."""
    summary: Changes
    code: Changes
    """Rollmill's own version and commit, and libraries."""


def diff(store: Store, a: Manifest | Ref | str, b: Manifest | Ref | str) -> Difference:
    """How the artifact ``b`` differs from ``a``."""
    first, second = store.manifest(a), store.manifest(b)
    return Difference(
        a=first.ref,
        b=second.ref,
        same_content=first.digest == second.digest,
        config=_changes(_settings(first), _settings(second)),
        inputs=_changes(_inputs(first), _inputs(second)),
        rows=_changes(rows_by_table(first), rows_by_table(second)),
        summary=_changes(flattened(first.summary), flattened(second.summary)),
        code=_changes(_code(first), _code(second)),
    )


def rows_by_table(manifest: Manifest) -> dict[str, int]:
    """Rows of each table of an artifact; 0 where a table is declared and has none."""
    rows = dict.fromkeys(manifest.schema_versions, 0)
    for entry in manifest.files:
        if entry.rows is not None:
            rows[entry.table] += entry.rows
    return rows


def _changes(first: dict[str, Any], second: dict[str, Any]) -> Changes:
    both = {name: (first.get(name, ABSENT), second.get(name, ABSENT)) for name in sorted(first.keys() | second.keys())}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def _settings(manifest: Manifest) -> dict[str, Any]:
    made = {
        "stage": manifest.stage,
        "stage_version": manifest.stage_version,
        "seed": manifest.seed,
        "draw": manifest.draw,
    }
    return {**made, **flattened(manifest.config)}


def _inputs(manifest: Manifest) -> dict[str, Any]:
    return {name: [f"{ref} {ref.digest[:12]}" for ref in refs] for name, refs in manifest.inputs.items()}


def _code(manifest: Manifest) -> dict[str, Any]:
    return {**{f"rollmill {name}": value for name, value in manifest.code.model_dump().items()}, **manifest.libraries}
