"""``rollmill eval``: a benchmark, a policy, and what comes out of it."""

from typing import Annotated, Any

import typer

from flows.cli.options import Overrides, StoreOption, store_flag


def register(app: typer.Typer) -> None:
    """Adds the command to ``app``."""
    app.command("eval", rich_help_panel="Work")(evaluate)


def evaluate(
    benchmark: Annotated[
        str, typer.Argument(metavar="BENCHMARK", help="A name in configs/benchmarks, or a YAML file.")
    ],
    overrides: Overrides = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            "-p",
            metavar="POLICY",
            help="policy/KEY or RUN:policy of the store, a model folder (here or s3://…), a GGUF file, or hf://org/name@COMMIT.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="A model of rollmill model list, instead.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first tasks.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", "-n", min=1, help="Attempts at each task.")] = None,
    grader: Annotated[str | None, typer.Option(help="Another grader than the benchmark's.")] = None,
    data_dir: Annotated[
        str | None, typer.Option(envvar="ROLLMILL_DATA", help="Folder with data sets, looked in first.")
    ] = None,
    store: StoreOption = None,
) -> None:
    """Evaluate a policy, or a model that others serve, on a benchmark; leaves tasks, rollouts, rewards and a report.

    Settings are those of an evaluation recipe, e.g. rollouts.sampling.max_tokens=256 or seed=1.

    Example: rollmill eval gsm8k --policy demo:policy --limit 16 -n 2
    """
    from flows.models import stored_model
    from flows.recipes import EvaluateRecipe, load_recipe
    from flows.resolve import resolve
    from flows.runs import has_finished, run_name
    from schemas.errors import ConfigError
    from stages.artifacts.store import open_store

    if (policy is None) == (model is None):
        raise ConfigError(
            "eval needs a policy, or a model that others serve, and not both",
            hint="give --policy policy/KEY, --policy RUN:policy, or a model folder (see rollmill policy import); or "
            "--model NAME (see rollmill model setup)",
        )
    recipe: dict[str, Any] = {"tasks": {"benchmark": benchmark, "limit": limit}, "rollouts": {}}
    if policy is not None:
        recipe["policy"] = start_of(policy)
    if model is not None:
        recipe["rollouts"]["engine"] = stored_model(model).block()
    if samples is not None:
        recipe["rollouts"]["n"] = samples
    if grader is not None:
        recipe["rewards"] = {"grader": grader}
    if data_dir is not None:
        recipe["execution"] = {"tasks": {"data_dir": data_dir}}
    settings, _ = load_recipe(EvaluateRecipe, recipe, overrides or [], store)
    shelf = open_store(settings.execution.store, single_writer=settings.execution.single_writer)
    identity = resolve(shelf, settings).identity()
    name = run_name(settings.run, f"eval-{benchmark}", identity)
    if has_finished(shelf, name, "evaluate", identity):
        print(f"the evaluation {name} has finished; no stage was executed")
    else:
        from flows.cli.prefect import quiet

        with quiet():
            from flows.evaluate import evaluate as evaluate_flow

            evaluate_flow(recipe, [*(overrides or []), f"run={name}"], store)
    _show_end(shelf, name)


def start_of(policy: str) -> dict[str, str]:
    """A policy of the store by its reference, anything else as something to import."""
    from pathlib import Path

    if "://" in policy:
        is_stored = "/artifacts/policy/" in policy
    else:
        is_stored = not Path(policy).exists() and (":" in policy or policy.count("/") == 1)
    return {"ref": policy} if is_stored else {"source": policy}


def _show_end(store: Any, run: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from flows.cli.train import page_of
    from flows.display import cell

    (record,) = store.iterations(run)
    table = Table(show_header=False, box=None, title=f"run {run}")
    for name in ("rollouts", "rewards"):
        for fact, value in store.manifest(record.artifacts[name]).summary.items():
            table.add_row(f"[dim]{name}[/]", fact, cell(value))
    console = Console()
    console.print(table)
    where = store_flag(store)
    console.print(
        f"\nIt lies in [bold]{store.url}[/]. Report: {page_of(store, record.artifacts['report'])}", soft_wrap=True
    )
    console.print("Look at it:")
    console.print(f"  rollmill show {run}:rewards{where}", soft_wrap=True)
    console.print(f"  rollmill lineage {run}:report{where}", soft_wrap=True)
