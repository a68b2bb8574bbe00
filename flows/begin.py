"""What an iteration needs before it can begin: the tasks and the starting policy."""

from flows.execute import Executor
from flows.recipes import Recipe
from schemas.artifacts import Manifest
from stages.policy.importing import ImportExecution
from stages.policy.tiny import InitExecution


def tasks_of(executor: Executor, recipe: Recipe) -> Manifest:
    """The tasks artifact of a resolved recipe."""
    return executor.run("tasks", recipe.tasks, recipe.execution.tasks, {})


def starting_policy(executor: Executor, recipe: Recipe) -> Manifest:
    """The policy artifact that the first iteration of a resolved recipe samples with."""
    start, how = recipe.policy, recipe.execution
    if start.ref is not None:
        policy = executor.store.resolve(start.ref, kind="policy")
    elif start.source is not None:
        policy = executor.run("policy_import", start.imported, ImportExecution(location=start.source), {})
    else:
        assert start.new is not None
        policy = executor.run("policy_init", start.new, InitExecution(), {})
    if start.warmstart is None:
        return policy
    tasks = executor.run("tasks", start.warmstart.tasks, how.tasks, {})
    return executor.run(
        "policy_warmstart",
        start.warmstart.training,
        how.policy,
        {"policy": [policy], "tasks": [tasks]},
        title="warm start",
    )
