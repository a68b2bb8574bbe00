"""``rollmill train``: begin a training run, or continue it with the same command."""

from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.options import Overrides, StoreOption, store_flag

if TYPE_CHECKING:
    from stages.artifacts.store import Store


def register(app: typer.Typer) -> None:
    """Adds the command to ``app``."""
    app.command("train", rich_help_panel="Work")(train)


def train(
    recipe: Annotated[str, typer.Argument(metavar="CONFIG", help="A recipe (YAML), or the name of one in configs/.")],
    overrides: Overrides = None,
    store: StoreOption = None,
) -> None:
    """Train a policy: rollouts, rewards, advantages and an update, again and again.

    The same command continues a run that was interrupted; one that has finished says so and does nothing.

    Example: rollmill train configs/demo.yaml iterations=20 rollouts.sampling.temperature=0.9
    """
    from flows.recipes import TrainRecipe, load_recipe
    from flows.resolve import resolve
    from flows.runs import has_finished, run_name
    from stages.artifacts.store import open_store

    settings, label = load_recipe(TrainRecipe, recipe, overrides or [], store)
    shelf = open_store(settings.execution.store, single_writer=settings.execution.single_writer)
    identity = resolve(shelf, settings).identity()
    name = run_name(settings.run, label, identity)
    if has_finished(shelf, name, "train", identity):
        print(f"the run {name} has finished; no stage was executed")
    else:
        from flows.cli.prefect import quiet

        with quiet():
            from flows.train import train as train_flow

            train_flow(recipe, overrides or [], store)
    show_end(shelf, name)


def show_end(store: "Store", run: str) -> None:
    """What the run made, where it lies, and how to look at it."""
    from rich.console import Console
    from rich.table import Table

    from flows.display import shown

    records, end = store.iterations(run), store.run_end(run)
    table = Table("iteration", "mean reward", "correct", "trained on", "policy", title=f"run {run}", box=None)
    for record in records:
        rewards, advantages = (store.manifest(record.artifacts[name]).summary for name in ("rewards", "advantages"))
        table.add_row(
            str(record.iteration),
            shown(rewards.get("mean_reward")),
            shown(rewards.get("pass_rate")),
            shown(advantages.get("n_kept")),
            str(record.artifacts["policy"]),
        )
    console = Console()
    console.print(table)
    where = store_flag(store)
    console.print(f"\nIt lies in [bold]{store.url}[/]: every task, rollout, reward, advantage and policy of the run.")
    if end is not None and end.report is not None:
        console.print(f"Report: {page_of(store, end.report)}", soft_wrap=True)
    console.print("Look at it:")
    console.print(f"  rollmill show {run}:rollouts{where}", soft_wrap=True)
    console.print(f"  rollmill lineage {run}:policy{where}", soft_wrap=True)
    console.print(f"  rollmill diff {run}@0:rewards {run}:rewards{where}", soft_wrap=True)


def page_of(store: "Store", report: "object") -> str:
    """Where the page of a report artifact can be opened."""
    manifest = store.manifest(report)  # type: ignore[arg-type]
    (page,) = manifest.table_files("page")
    return f"{store.url}/artifacts/{manifest.kind}/{manifest.key}/{page.path}"
