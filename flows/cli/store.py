"""Commands about the store and the machine: ``doctor``, ``verify``, ``gc``, ``serve``."""

from typing import Annotated

import typer

from flows.cli.options import StoreOption, opened


def register(app: typer.Typer) -> None:
    """Adds the commands to ``app``."""
    app.command("doctor", rich_help_panel="Keep")(doctor)
    app.command("verify", rich_help_panel="Keep")(verify)
    app.command("gc", rich_help_panel="Keep")(gc)
    app.command("serve", rich_help_panel="Keep")(serve)


def doctor(store: StoreOption = None) -> None:
    """Check what is installed, which engines can start, and whether the store can be written."""
    from rich.console import Console
    from rich.table import Table

    from flows.doctor import findings

    table = Table("", "what", "found", box=None)
    marks = {"ok": "[green]ok[/]", "off": "[dim]off[/]", "bad": "[red]bad[/]"}
    found = findings(store or "./store")
    for finding in found:
        table.add_row(marks[finding.state], finding.what, finding.found)
    Console().print(table)
    if any(finding.state == "bad" for finding in found):
        raise typer.Exit(1)


def verify(
    ref: Annotated[str, typer.Argument(metavar="REF", help="KIND/KEY, RUN:KIND, or RUN@ITERATION:KIND.")],
    lineage: Annotated[bool, typer.Option("--lineage", help="Also everything that it was made from.")] = False,
    store: StoreOption = None,
) -> None:
    """Read every file of an artifact and compare its checksum with the manifest's."""
    from stages.artifacts.verify import verify as verify_files

    shelf = opened(store, writable=False)
    manifest = shelf.resolve(ref)
    nodes = [node for _, _, node, again in shelf.lineage(manifest).walk() if not again] if lineage else []
    for one in [node.manifest for node in nodes if node.manifest is not None] or [manifest]:
        print(f"{one.ref}: every checksum holds ({verify_files(shelf, one):,} bytes read)")


def gc(
    delete: Annotated[bool, typer.Option("--delete", help="Delete; without it only what would go is shown.")] = False,
    grace_hours: Annotated[float, typer.Option(min=0, help="What is younger stays.")] = 168.0,
    optimizers: Annotated[
        bool, typer.Option("--optimizers", help="Also the optimizer state of policies that training has passed.")
    ] = False,
    store: StoreOption = None,
) -> None:
    """Show what no manifest names (leftovers of killed work), and delete it if told to."""
    from stages.artifacts.gc import collect_garbage

    shelf = opened(store, writable=delete)
    garbage = collect_garbage(shelf, grace_s=grace_hours * 3600, delete=delete, optimizers=optimizers)
    for item in garbage:
        print(f"{item.path}  {item.bytes:,} bytes, {item.age_s / 3600:.1f} h old: {item.reason}")
    total = sum(item.bytes for item in garbage)
    done = "deleted" if delete else "would go; delete with --delete"
    print(f"{len(garbage)} files, {total:,} bytes {done}" if garbage else "nothing to collect")


def serve(
    only: Annotated[list[str] | None, typer.Argument(metavar="[DEPLOYMENT]…", help="flow/name; all if none.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Flow runs at the same time.")] = 4,
) -> None:
    """Serve the deployments of infra/prefect.yaml from this process; needs a Prefect server (PREFECT_API_URL)."""
    from flows.deployments import serve_deployments

    serve_deployments(only or [], limit)
