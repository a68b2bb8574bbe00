"""Commands that only look: ``runs``, ``show``, ``lineage``, ``diff``. They write nothing."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.options import StoreOption, opened
from flows.display import cell, shown

if TYPE_CHECKING:
    from schemas.artifacts import Manifest
    from stages.artifacts.lineage import Node

RefArgument = Annotated[
    str, typer.Argument(metavar="REF", help="KIND/KEY (a beginning will do), RUN:KIND, or RUN@ITERATION:KIND.")
]


def register(app: typer.Typer) -> None:
    """Adds the commands to ``app``."""
    app.command("runs", rich_help_panel="Look")(runs)
    app.command("show", rich_help_panel="Look")(show)
    app.command("lineage", rich_help_panel="Look")(lineage)
    app.command("diff", rich_help_panel="Look")(diff)


def runs(store: StoreOption = None) -> None:
    """List the runs of a store: what each has finished, and its latest mean reward."""
    from rich.console import Console
    from rich.table import Table

    shelf = opened(store, writable=False)
    names = shelf.runs()
    if not names:
        print(f"the store {shelf.url} has no runs yet; begin one: rollmill train demo")
        return
    table = Table("run", "flow", "began (UTC)", "iterations", "state", "mean reward, first → last", box=None)
    for name in names:
        record, finished, end = shelf.run(name), shelf.iterations(name), shelf.run_end(name)
        asked = record.config.get("iterations", 1)
        rewards = [shelf.manifest(it.artifacts["rewards"]).summary for it in finished if "rewards" in it.artifacts]
        table.add_row(
            name,
            record.flow,
            f"{record.created_at:%Y-%m-%d %H:%M}",
            f"{len(finished)}/{asked}",
            "finished" if end else "not finished",
            f"{shown(rewards[0].get('mean_reward'))} → {shown(rewards[-1].get('mean_reward'))}" if rewards else "-",
        )
    Console().print(table)


def show(
    ref: RefArgument,
    store: StoreOption = None,
    rows: Annotated[int, typer.Option("--rows", "-n", min=0, help="Sample rows of each table.")] = 3,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and check its checksum.")] = False,
) -> None:
    """Show an artifact: what made it, its summary, each table's schema with a line a column, and sample rows."""
    from rich.console import Console

    shelf = opened(store, writable=False)
    manifest = shelf.resolve(ref)
    console = Console()
    _show_facts(console, shelf, manifest)
    for table in manifest.schema_versions:
        _show_table(console, shelf, manifest, table, rows)
    if verify:
        from stages.artifacts.verify import verify as verify_files

        console.print(f"\nverified: the checksums of all files hold ({verify_files(shelf, manifest):,} bytes read)")


def lineage(ref: RefArgument, store: StoreOption = None) -> None:
    """Show from what an artifact was made, back to the data and the first policy."""
    from rich.console import Console
    from rich.tree import Tree

    shelf = opened(store, writable=False)
    path: list[Tree] = []
    for depth, name, node, again in shelf.lineage(shelf.resolve(ref)).walk():
        label = _lineage_line(name, node, again)
        tree = Tree(label) if depth == 0 else path[depth - 1].add(label)
        path[depth:] = [tree]
    Console().print(path[0])


def diff(
    first: Annotated[str, typer.Argument(metavar="REF")],
    second: Annotated[str, typer.Argument(metavar="REF")],
    store: StoreOption = None,
) -> None:
    """Show how two artifacts differ: config, inputs, rows and summary."""
    from rich.console import Console
    from rich.table import Table

    from stages.artifacts.diff import diff as compare

    shelf = opened(store, writable=False)
    found = compare(shelf, shelf.resolve(first), shelf.resolve(second))
    table = Table("", "", str(found.a), str(found.b), box=None)
    for what in ("config", "inputs", "rows", "summary", "code"):
        for name, (one, other) in getattr(found, what).items():
            table.add_row(what, cell(name), cell(one), cell(other))
            what = ""
    console = Console()
    if table.row_count:
        console.print(table)
    same = "the same, byte for byte" if found.same_content else "different"
    console.print(f"their content is {same}" if table.row_count else f"nothing differs; their content is {same}")


def _show_facts(console: Any, shelf: Any, manifest: "Manifest") -> None:
    from rich.table import Table

    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("artifact", f"[bold]{manifest.ref}[/]")
    facts.add_row("key", manifest.key)
    facts.add_row("digest", manifest.digest)
    facts.add_row("where", f"{shelf.url}/artifacts/{manifest.kind}/{manifest.key}")
    facts.add_row("stage", f"{manifest.stage} (version {manifest.stage_version})")
    facts.add_row("made", f"{manifest.finished_at:%Y-%m-%d %H:%M:%S} UTC, {manifest.work_s:.2f} s of work")
    code = manifest.code
    commit = f", commit {code.commit[:12]}{' with changes' if code.dirty else ''}" if code.commit else ""
    facts.add_row("by", f"rollmill {code.version}{commit}")
    if manifest.seed is not None:
        facts.add_row("seed", f"{manifest.seed}, draw {manifest.draw}")
    for name, refs in manifest.inputs.items():
        facts.add_row(f"input {name}", ", ".join(str(ref) for ref in refs))
    facts.add_row("files", f"{len(manifest.files)}, {sum(entry.bytes for entry in manifest.files):,} bytes")
    for part in dict.fromkeys(entry.table for entry in manifest.files if entry.rows is None):
        facts.add_row(f"part {part}", ", ".join(entry.name for entry in manifest.table_files(part)))
    for name, value in manifest.summary.items():
        facts.add_row(f"summary {name}", cell(value))
    for name, setting in manifest.config.items():
        facts.add_row(f"config {name}", cell(setting))
    console.print(facts)


def _show_table(console: Any, shelf: Any, manifest: "Manifest", name: str, n_rows: int) -> None:
    from rich.table import Table

    from schemas.tables import TABLES

    total = sum(entry.rows or 0 for entry in manifest.table_files(name))
    console.print(f"\n[bold]{name}[/] version {manifest.schema_versions[name]}, {total:,} rows")
    schema = Table("column", "type", "null", "what it is", box=None, padding=(0, 2, 0, 0))
    for field in TABLES[name].schema:
        doc = (field.metadata or {}).get(b"doc", b"").decode()
        schema.add_row(field.name, str(field.type).replace("element: ", ""), "yes" if field.nullable else "", doc)
    console.print(schema)
    if not n_rows or not total:
        return
    for row in _first_rows(shelf, manifest, name, n_rows):
        sample = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
        sample.add_column(no_wrap=True)
        sample.add_column(overflow="fold")
        for column, value in row.items():
            sample.add_row(column, cell(_cut(value)))
        console.print()
        console.print(sample)


def _first_rows(shelf: Any, manifest: "Manifest", name: str, n_rows: int) -> Iterator[dict[str, Any]]:
    import polars as pl

    from stages.artifacts.scan import scan
    from stages.artifacts.verify import verify as verify_files

    try:
        yield from scan(manifest, name, store=shelf).head(n_rows).collect().iter_rows(named=True)
    except pl.exceptions.PolarsError:
        verify_files(shelf, manifest)  # names the file that is damaged
        raise


def _cut(value: Any) -> str:
    """A stored value in one line; ids and seeds are names and get no thousands separators."""
    if isinstance(value, list):
        head = ", ".join(_cut(item) for item in value[:12])
        return f"[{head}{', …' if len(value) > 12 else ''}] ({len(value)})"
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    text = value.replace("\n", "⏎") if isinstance(value, str) else shown(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _lineage_line(name: str | None, node: "Node", again: bool) -> str:
    prefix = f"[dim]{name}:[/] " if name else ""
    if node.manifest is None:
        return f"{prefix}{node.ref} [red](no longer in the store)[/]"
    if again:
        return f"{prefix}{node.ref} [dim](shown elsewhere in this tree)[/]"
    made = f"{node.manifest.stage}, {node.manifest.finished_at:%Y-%m-%d %H:%M:%S}"
    return f"{prefix}[bold]{node.ref}[/] [dim]{made}[/]"
