"""The ``train`` flow: iterations of rollouts, rewards, advantages and a policy update, on references only."""

from datetime import UTC, datetime
from functools import partial
from typing import Any

from prefect import flow

from flows.ahead import Ahead
from flows.begin import starting_policy, tasks_of
from flows.display import shown
from flows.execute import Executor
from flows.policies import policy_inputs, role_inputs
from flows.progress import Reporter
from flows.recipes import TrainRecipe, load_recipe
from flows.resolve import resolve
from flows.runs import begin_run, end_run, logs_beside, new_nonce, run_name
from schemas.artifacts import IterationRecord, Manifest, Ref
from schemas.errors import RollmillError
from stages.artifacts.store import Store, open_store
from stages.policy.stage import prestart
from stages.rollouts.config import Batch, RolloutsConfig


@flow(name="train", persist_result=True, result_serializer="json")
def train(recipe: str | dict[str, Any], overrides: list[str] | None = None, store: str | None = None) -> dict[str, Any]:
    """Trains a policy, or continues the run that the same recipe began.

    Args:
        recipe: a recipe file, the name of one in ``configs``, or its settings.
        overrides: ``dotted.key=value`` settings that replace those of the recipe.
        store: URL of the store; None: what the recipe says.
    Returns:
        the run's name, the store, and the references of its last iteration.
    """
    settings, label = load_recipe(TrainRecipe, recipe, overrides or [], store)
    shelf = open_store(settings.execution.store, single_writer=settings.execution.single_writer)
    settings = resolve(shelf, settings)
    with Reporter() as reporter:
        run = train_run(shelf, settings, run_name(settings.run, label, settings.identity()), reporter)
    last = shelf.iterations(run)[-1]
    return {"run": run, "store": shelf.url, "artifacts": {name: str(ref) for name, ref in last.artifacts.items()}}


def train_run(store: Store, recipe: TrainRecipe, run: str, reporter: Reporter) -> str:
    """Runs every iteration of a resolved recipe that the store does not hold yet, inside a Prefect flow."""
    begin_run(store, run, "train", recipe.identity())
    done = {record.iteration: record for record in store.iterations(run)}
    if len(done) < recipe.iterations:
        prestart(recipe.execution.policy)
    with Executor(
        store,
        reporter,
        seed=recipe.seed,
        single_writer=recipe.execution.single_writer,
        shards_at_once=recipe.execution.shards_at_once,
    ) as executor:
        _train(executor, recipe, run, {number: record.artifacts["policy"] for number, record in done.items()})
        _report(executor, recipe, run)
        executor.say_what_was_reused()
    return run


def _train(executor: Executor, recipe: TrainRecipe, run: str, done: dict[int, Ref]) -> None:
    """Runs the iterations that are not ``done``; of those that are, the policies are given."""
    iterations = _Iterations(executor, recipe, run, tasks_of(executor, recipe), starting_policy(executor, recipe))
    policies = [iterations.start]
    ahead: Ahead[Manifest] | None = None
    try:
        for iteration in range(recipe.iterations):
            if iteration in done:
                policies.append(executor.store.manifest(done[iteration]))
                continue
            sampled_by = policies[max(0, iteration - recipe.overlap)]
            rollouts = iterations.sample(iteration, sampled_by) if ahead is None else ahead.result()
            ahead = None
            if recipe.overlap and iteration + 1 < recipe.iterations:
                ahead = Ahead(partial(iterations.sample, iteration + 1, policies[iteration]))
            policies.append(iterations.learn(iteration, policies[iteration], sampled_by, rollouts))
    except RollmillError:
        if ahead is not None:
            ahead.settle()  # what is sampled by then is kept
        raise
    except BaseException:
        if ahead is not None:
            ahead.abandon()
        raise


class _Iterations:
    """The two halves of an iteration, which may belong to different ones at a time."""

    def __init__(self, executor: Executor, recipe: TrainRecipe, run: str, tasks: Manifest, start: Manifest):
        self.start = start
        """The run's first policy, which a penalty on the divergence refers to."""
        self._executor = executor
        self._recipe = recipe
        self._run = run
        self._tasks = tasks

    def sample(self, iteration: int, policy: Manifest) -> Manifest:
        """The rollouts."""
        store = self._executor.store
        return self._executor.run(
            "rollouts",
            _with_batch(self._recipe.rollouts, self._tasks, iteration),
            logs_beside(self._recipe.execution.rollouts, self._run),
            {"tasks": [self._tasks], **policy_inputs(store, policy), **role_inputs(store, self._recipe.rollouts)},
            title=f"{self._where(iteration)}: rollouts",
        )

    def learn(self, iteration: int, policy: Manifest, sampled_by: Manifest, rollouts: Manifest) -> Manifest:
        """All that follows the rollouts; records the iteration and returns the new policy."""
        executor, recipe, tasks = self._executor, self._recipe, self._tasks
        how, where = recipe.execution, self._where(iteration)
        against_start = recipe.update.kl is not None and recipe.update.kl.against == "reference"
        rewards = executor.run(
            "rewards",
            recipe.rewards,
            how.rewards,
            {"tasks": [tasks], "rollouts": [rollouts]},
            title=f"{where}: rewards",
        )
        advantages = executor.run(
            "advantages",
            recipe.advantages,
            how.advantages,
            {"rollouts": [rollouts], "rewards": [rewards]},
            title=f"{where}: advantages",
        )
        updated = executor.run(
            "policy",
            recipe.update,
            how.policy,
            {
                **policy_inputs(executor.store, policy),
                "rollouts": [rollouts],
                "advantages": [advantages],
                "reference": [self.start] if against_start else [],
            },
            title=f"{where}: update",
        )
        made = {
            "tasks": tasks,
            "sampled_by": sampled_by,
            "policy_in": policy,
            "rollouts": rollouts,
            "rewards": rewards,
            "advantages": advantages,
            "policy": updated,
        }
        executor.store.put_iteration(
            IterationRecord(
                run=self._run,
                iteration=iteration,
                artifacts={name: manifest.ref for name, manifest in made.items()},
                finished_at=datetime.now(UTC),
                nonce=new_nonce(),
            )
        )
        executor.reporter.say(_line(where, rewards, advantages, updated))
        return updated

    def _where(self, iteration: int) -> str:
        return f"iteration {iteration} of {self._recipe.iterations}"


def _with_batch(config: RolloutsConfig, tasks: Manifest, iteration: int) -> RolloutsConfig:
    """The iteration's tasks: the next batch, or all of them in an epoch of their own where no size is asked for."""
    given = config.batch or Batch(size=tasks.summary["n_tasks"])
    return config.model_copy(update={"batch": given.model_copy(update={"index": given.index + iteration})})


def _line(where: str, rewards: Manifest, advantages: Manifest, policy: Manifest) -> str:
    """What a person learns of one iteration; every number stands in an artifact's summary."""
    facts = {
        "reward": rewards.summary.get("mean_reward"),
        "correct": rewards.summary.get("pass_rate"),
        "trained on": advantages.summary.get("n_kept"),
        "kl": policy.summary.get("kl"),
        "grad norm": policy.summary.get("grad_norm"),
    }
    return f"{where}  " + "  ".join(f"{name} {shown(value)}" for name, value in facts.items())


def _report(executor: Executor, recipe: TrainRecipe, run: str) -> None:
    store = executor.store
    records = store.iterations(run)
    inputs = {
        name: [store.manifest(record.artifacts[name]) for record in records]
        for name in ("rollouts", "rewards", "policy")
    }
    tasks = {record.artifacts["tasks"].key: store.manifest(record.artifacts["tasks"]) for record in records}
    report = executor.run("report", recipe.report, recipe.execution.report, {"tasks": list(tasks.values()), **inputs})
    end_run(store, run, len(records), report.ref)
