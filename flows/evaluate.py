"""The ``evaluate`` flow: tasks, rollouts, rewards and a report for one policy or endpoint, on references only."""

from datetime import UTC, datetime
from typing import Any

from prefect import flow

from flows.begin import starting_policy, tasks_of
from flows.execute import Executor
from flows.policies import policy_inputs, role_inputs
from flows.progress import Reporter
from flows.recipes import EvaluateRecipe, load_recipe
from flows.resolve import resolve
from flows.runs import begin_run, end_run, logs_beside, new_nonce, run_name
from schemas.artifacts import IterationRecord
from stages.artifacts.store import Store, open_store


@flow(name="evaluate", persist_result=True, result_serializer="json")
def evaluate(
    recipe: str | dict[str, Any], overrides: list[str] | None = None, store: str | None = None
) -> dict[str, Any]:
    """Evaluates a policy, or continues the evaluation that the same recipe began.

    Args:
        recipe: a recipe file, the name of one in ``configs``, or its settings.
        overrides: ``dotted.key=value`` settings that replace those of the recipe.
        store: URL of the store; None: what the recipe says.
    Returns:
        the run's name, the store, and the references of what it made.
    """
    settings, label = load_recipe(EvaluateRecipe, recipe, overrides or [], store)
    shelf = open_store(settings.execution.store, single_writer=settings.execution.single_writer)
    settings = resolve(shelf, settings)
    with Reporter() as reporter:
        run = evaluate_run(shelf, settings, run_name(settings.run, label, settings.identity()), reporter)
    (record,) = shelf.iterations(run)
    return {"run": run, "store": shelf.url, "artifacts": {name: str(ref) for name, ref in record.artifacts.items()}}


def evaluate_run(store: Store, recipe: EvaluateRecipe, run: str, reporter: Reporter) -> str:
    """Runs what the store does not hold yet of a resolved recipe, inside a Prefect flow."""
    begin_run(store, run, "evaluate", recipe.identity())
    how = recipe.execution
    with Executor(
        store, reporter, seed=recipe.seed, single_writer=how.single_writer, shards_at_once=how.shards_at_once
    ) as executor:
        _evaluate(executor, recipe, run)
        executor.say_what_was_reused()
    return run


def _evaluate(executor: Executor, recipe: EvaluateRecipe, run: str) -> None:
    store, how = executor.store, recipe.execution
    tasks = tasks_of(executor, recipe)
    policy = None if recipe.policy is None else starting_policy(executor, recipe)
    answering = {} if policy is None else {**policy_inputs(store, policy), **role_inputs(store, recipe.rollouts)}
    rollouts = executor.run(
        "rollouts", recipe.rollouts, logs_beside(how.rollouts, run), {"tasks": [tasks], **answering}
    )
    rewards = executor.run("rewards", recipe.rewards, how.rewards, {"tasks": [tasks], "rollouts": [rollouts]})
    report = executor.run(
        "report", recipe.report, how.report, {"tasks": [tasks], "rollouts": [rollouts], "rewards": [rewards]}
    )
    made = {
        "tasks": tasks,
        **({} if policy is None else {"sampled_by": policy, "policy_in": policy}),
        "rollouts": rollouts,
        "rewards": rewards,
        "report": report,
    }
    store.put_iteration(
        IterationRecord(
            run=run,
            iteration=0,
            artifacts={name: manifest.ref for name, manifest in made.items()},
            finished_at=datetime.now(UTC),
            nonce=new_nonce(),
        )
    )
    end_run(store, run, 1, report.ref)
