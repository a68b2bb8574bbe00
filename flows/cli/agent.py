"""``rollmill agent check``: an agent is tried once, without a model, and what was recorded of it is shown."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from schemas.artifacts import Manifest
    from stages.artifacts.store import Store


def register(app: typer.Typer) -> None:
    """Adds the commands to ``app``."""
    group = typer.Typer(no_args_is_help=True, help="Try agents.")
    group.command("check")(check)
    app.add_typer(group, name="agent", rich_help_panel="Work")


def check(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Built in, module:function, or path/file.py:function.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE | execution.KEY=VALUE]…", help="Settings of the rollouts stage."),
    ] = None,
    instruction: Annotated[str, typer.Option("--task", help="What the agent is asked.")] = "What is 3 + 4?",
) -> None:
    """Run an agent once against a scripted engine, which answers with random tokens, and show what was recorded.

    Example: rollmill agent check my_agent.py:solve execution.agents=processes
    """
    from flows.loading import with_overrides
    from stages.artifacts.store import open_store
    from stages.artifacts.temporary import TemporaryFolder
    from stages.rollouts.agents import agent_named

    agent_named(agent)
    values: dict[str, Any] = {"engine": {"type": "scripted", "n_tokens": 16}, "episode_time_limit_s": 60}
    values = with_overrides({**values, "agent": agent}, settings or [])
    execution = values.pop("execution", None) or {}
    with TemporaryFolder("check") as folder:
        store = open_store(folder / "store")
        source = folder / "tasks.jsonl"
        source.write_text(json.dumps({"id": "check", "question": instruction}) + "\n", encoding="utf-8")
        fields = {"id": "{id}", "instruction": "{question}"}
        of_tasks = {"source": {"type": "file"}, "fields": fields}
        tasks = _made(store, "tasks", {}, of_tasks, {"location": str(source)})
        policy = _made(store, "policy_init", {}, {}, {})
        inputs = {"tasks": [str(tasks.ref)], "policy": [str(policy.ref)]}
        _show(store, _made(store, "rollouts", inputs, values, execution))


def _made(
    store: "Store", stage: str, inputs: dict[str, list[str]], config: dict[str, Any], execution: dict[str, Any]
) -> "Manifest":
    from flows.call import stage_request
    from stages.artifacts.commit import materialise

    request = stage_request(store, stage, inputs=inputs, config=config, execution=execution, seed=0, draw=0)
    return materialise(store, request).manifest


def _show(store: "Store", manifest: "Manifest") -> None:
    from rich.console import Console
    from rich.table import Table

    from flows.display import cell
    from stages.artifacts.scan import scan

    episode, steps, errors = (
        scan(manifest, name, store=store).collect() for name in ("episodes", "steps", "call_errors")
    )
    console = Console()
    row = episode.row(0, named=True)
    console.print(f"status: [bold]{row['status']}[/], {row['duration_s']:.2f} s")
    if row["error"]:
        console.print(f"{row['error_kind']}: {row['error']}", markup=False)
    if row["artifacts"]:
        console.print(f"returned: {row['artifacts']}", markup=False)
    table = Table("trajectory", "step", "new messages", "kept ids", "new ids", "sampled ids", "answer", box=None)
    for step in steps.iter_rows(named=True):
        counts = (step["prefix_length"], len(step["prompt_ids"]), len(step["response_ids"]))
        table.add_row(
            cell(step["trajectory"]),
            str(step["step_index"]),
            cell(step["messages"]),
            *map(str, counts),
            cell(step["response"]),
        )
    console.print(table if len(steps) else "no model call was recorded")
    for error in errors.iter_rows(named=True):
        told = f"call of {error['trajectory']} {error['status']}: {error['kind']}: {error['message']}"
        console.print(told, markup=False)
    if row["status"] in ("error", "timeout"):
        raise typer.Exit(1)
