"""What an iteration needs before it can begin: the tasks and the starting policy."""

from functools import partial

from flows.execute import Executor
from flows.recipes import Recipe
from flows.runner_check import check_runner
from schemas.artifacts import Manifest
from stages.policy.importing import ImportExecution
from stages.policy.tiny import InitExecution
from stages.rollouts.role_policies import engines_of
from stages.rollouts.workers.command import vllm_python
from stages.rollouts.workers.settings import VllmConfig


def tasks_of(executor: Executor, recipe: Recipe) -> Manifest:
    """The tasks artifact of a resolved recipe."""
    return executor.run("tasks", recipe.tasks, recipe.execution.tasks, {})


def starting_policy(executor: Executor, recipe: Recipe) -> Manifest:
    """The policy artifact that the first iteration of a resolved recipe samples with."""
    start, how = recipe.policy, recipe.execution
    assert start is not None, "the recipe has been validated"
    make = partial(executor.run, before=lambda: _check_tools(executor, recipe))
    if start.ref is not None:
        policy = executor.store.resolve(start.ref, kind="policy")
    elif start.source is not None:
        policy = make("policy_import", start.imported, ImportExecution(location=start.source), {})
    else:
        assert start.new is not None
        policy = make("policy_init", start.new, InitExecution(), {})
    if start.warmstart is None:
        return policy
    tasks = executor.run("tasks", start.warmstart.tasks, how.tasks, {})
    return make(
        "policy_warmstart",
        start.warmstart.training,
        how.policy,
        {"policy": [policy], "tasks": [tasks]},
        title="warm start",
    )


def _check_tools(executor: Executor, recipe: Recipe) -> None:
    """Refuses what the rollouts would be refused for, before a policy is made for them.

    A policy that is not there yet has no rollouts on the shelf. Where it is, they may be, and none of this is needed.

    Raises:
        ConfigError: there is no vLLM for their workers, or no cluster for their shards.
    """
    config, execution = recipe.rollouts, recipe.execution.rollouts
    check_runner(executor.store, config, execution)
    for engine, vllm in engines_of(config, execution):
        if isinstance(engine, VllmConfig) and vllm.starts_workers:
            vllm_python(vllm)
