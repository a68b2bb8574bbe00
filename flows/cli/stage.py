"""``rollmill stage``: one stage alone, on stored references."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.options import StoreOption, store_flag
from flows.registry import STAGE_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


def register(app: typer.Typer) -> None:
    """Adds the command to ``app``."""
    app.command("stage", rich_help_panel="Work")(stage)


def stage(
    name: Annotated[str, typer.Argument(metavar="NAME", help=", ".join(STAGE_NAMES))],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[INPUT=REF | KEY=VALUE | execution.KEY=VALUE]…",
            help="Inputs by name (repeat one to give several), and settings of the stage.",
        ),
    ] = None,
    config: Annotated[str | None, typer.Option("--config", "-c", metavar="YAML", help="A file with settings.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of a stage that draws at random.")] = 0,
    draw: Annotated[int, typer.Option(min=0, help="0, 1, …: asks such a stage for another sample.")] = 0,
    describe: Annotated[bool, typer.Option("--describe", help="Show the stage's inputs and settings.")] = False,
    store: StoreOption = None,
) -> None:
    """Run one stage alone on stored artifacts. What is on the shelf already is not made again.

    Inputs that are left out are found through the lineage of those given.

    Example: rollmill stage rewards rollouts=demo:rollouts grader=exact
    """
    from flows.call import stage_request
    from flows.loading import read_yaml, with_overrides
    from flows.registry import stage_named
    from flows.runner_check import check_runner
    from schemas.config import nearest
    from schemas.errors import ConfigError
    from stages.artifacts import commit
    from stages.artifacts.store import open_store

    chosen = stage_named(name)
    if describe:
        _describe(chosen)
        return
    inputs: dict[str, list[str]] = {}
    overrides = []
    for item in settings or []:
        key, equals, value = item.partition("=")
        if equals and key in chosen.inputs:
            inputs.setdefault(key, []).append(value)
            continue
        known = [*chosen.inputs, *chosen.Config.model_fields, "execution"]
        if equals and key.partition(".")[0] not in known:
            raise ConfigError(f"stage {name} has no input or setting {key!r}", hint=nearest(key, known))
        overrides.append(item)
    values = with_overrides(read_yaml(config) if config else {}, overrides)
    execution = values.pop("execution", None) or {}
    shelf = open_store(store)
    request = stage_request(shelf, name, inputs=inputs, config=values, execution=execution, seed=seed, draw=draw)
    found = commit.lookup(shelf, request)
    if found is not None:
        for note in commit.notes_on(found):
            print(f"note: {note}")
    else:
        check_runner(shelf, request.config, request.execution)  # now, as Prefect takes seconds
        request.stage.check(shelf.inputs(request.inputs), request.config, request.execution)
        from flows.cli.prefect import quiet

        with quiet():
            import flows.stages

            getattr(flows.stages, name)(inputs, values, execution, shelf.url, seed, draw)
        found = commit.lookup(shelf, request)
        assert found is not None, "the flow has made it"
        print(f"made {found.ref}")
        _show_end(found, shelf)
        return
    print(f"{found.ref} was on the shelf; nothing was executed")
    _show_end(found, shelf)


def _show_end(manifest: Any, store: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from flows.display import cell

    table = Table(show_header=False, box=None)
    for fact, value in manifest.summary.items():
        table.add_row(fact, cell(value))
    console = Console()
    console.print(table)
    console.print(f"Look at it: rollmill show {manifest.ref}{store_flag(store)}", soft_wrap=True)


def _describe(chosen: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from flows.display import cell

    console = Console()
    console.print(f"[bold]{chosen.name}[/] makes an artifact of kind {chosen.kind}: {', '.join(chosen.tables)}")
    for name, spec in chosen.inputs.items():
        marks = [mark for mark, given in (("several", spec.many), ("optional", spec.optional)) if given]
        console.print(f"  input {name}: kind {spec.kind}{' (' + ', '.join(marks) + ')' if marks else ''}")
    for title, model in (("settings", chosen.Config), ("execution (never changes the result)", chosen.Execution)):
        table = Table("key", "default", "what it is", title=title, title_justify="left", box=None)
        for name, field in described(model):
            default = "(required)" if field.is_required() else str(field.get_default(call_default_factory=True))
            table.add_row(name, cell(default), cell(" ".join((field.description or "").replace("``", "").split())))
        console.print(table)


def described(model: "type[BaseModel]", prefix: str = "") -> "Iterator[tuple[str, FieldInfo]]":
    """Every setting of a model by its dotted key; a group of settings that has no words of its own is left out."""
    from schemas.config import models_in

    for name, field in model.model_fields.items():
        inner = models_in(field.annotation)
        if not inner or field.description:
            yield prefix + name, field
        for group in inner:
            yield from described(group, f"{prefix}{name}.")
