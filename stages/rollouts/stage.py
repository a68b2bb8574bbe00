"""The rollouts stage: an agent attempts each task ``n`` times with a policy; every model call is recorded.

A shard is a few tasks with all their attempts. Ids and seeds derive from the task and the attempt, so
the same samples come out however the work is cut, ordered or resumed.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from schemas.artifacts import Manifest, Receipt, ShardPlan
from schemas.canonical import canonical_hash, seed_from
from schemas.errors import ConfigError, InputError
from schemas.loading import is_user_code
from schemas.records import Task
from stages.artifacts.adapters import check_base, policy_folders
from stages.artifacts.stage import Inputs, InputSpec, ShardOutput, Stage, Work
from stages.rollouts.agents import agent_label, agent_named, agent_version, check_settings, first_messages
from stages.rollouts.commands import CommandAgent
from stages.rollouts.config import RolloutsConfig, RolloutsExecution, Sampling
from stages.rollouts.endpoints.settings import EndpointConfig, key_of
from stages.rollouts.role_policies import INPUT, check_roles, policy_of
from stages.rollouts.selection import selected
from stages.rollouts.workers.command import vllm_python
from stages.rollouts.workers.settings import VllmConfig

_DEFAULT_AGENT = "single_turn"
_SHARD_EPISODES = 512
"""Of a shard, where its size is not set: a row group of the tables."""
_LISTED = 3
"""Tasks that a message names at most."""


class RolloutsStage(Stage[RolloutsConfig, RolloutsExecution]):
    """Attempts at tasks, as rows of ``episodes`` and ``steps``, and calls that failed as rows of ``call_errors``."""

    name: ClassVar[str] = "rollouts"
    kind: ClassVar[str] = "rollouts"
    version: ClassVar[int] = 1
    stochastic: ClassVar[bool] = True
    inputs: ClassVar[dict[str, InputSpec]] = {
        "tasks": InputSpec("tasks"),
        "policy": InputSpec("policy", optional=True),
        "base": InputSpec("policy", optional=True),
        INPUT: InputSpec("policy", many=True, optional=True),
    }
    tables: ClassVar[tuple[str, ...]] = ("episodes", "steps", "call_errors")
    Config: ClassVar[type[RolloutsConfig]] = RolloutsConfig
    Execution: ClassVar[type[RolloutsExecution]] = RolloutsExecution

    def resolve(self, config: RolloutsConfig, execution: RolloutsExecution) -> RolloutsConfig:
        """Fills in the version of the agent's code."""
        version = "built-in" if config.agent is None else agent_version(config.agent)
        return config.model_copy(update={"agent_version": version})

    def check(self, inputs: Inputs, config: RolloutsConfig, execution: RolloutsExecution) -> None:
        is_endpoint = isinstance(config.engine, EndpointConfig)
        _check_policy(inputs, is_endpoint=is_endpoint)
        names: Sequence[str | CommandAgent] = [config.agent] if config.agent is not None else _agents_of_tasks(inputs)
        for name in names:
            agent_named(name)
            check_settings(name, config.agent_config)
        if config.n > 1 and config.sampling.temperature == 0 and names == [_DEFAULT_AGENT]:
            raise ConfigError(
                f"{config.n} attempts at temperature 0 would all be the same",
                hint="raise sampling.temperature, or set n=1",
            )
        if is_endpoint:
            key_of(execution.endpoint)
            return
        check_roles(inputs, config, execution)
        _check_served(policy_files(inputs), config.engine, config.sampling, execution)
        for name, role in config.roles.items():
            engine, sampling = role.engine or config.engine, role.sampling or config.sampling
            _check_served(_role_files(inputs, config, name), engine, sampling, execution.of_role(name))

    def plan(
        self, inputs: Inputs, config: RolloutsConfig, execution: RolloutsExecution, work: Work
    ) -> list[dict[str, Any]]:
        task_ids = _selected_ids(inputs, config, work)
        if not isinstance(config.engine, EndpointConfig) and not config.roles:
            _refuse_long_prompts(inputs, config, task_ids)
        size = execution.shard_tasks or max(1, _SHARD_EPISODES // config.n)
        return [{"task_ids": task_ids[start : start + size]} for start in range(0, len(task_ids), size)]

    def work(
        self, shard: ShardPlan, inputs: Inputs, config: RolloutsConfig, execution: RolloutsExecution, work: Work
    ) -> ShardOutput:
        from stages.rollouts.episodes import EpisodeRecord, run_attempts
        from stages.rollouts.rows import call_errors_table, episodes_table, steps_table

        tasks = list(_tasks(inputs, shard.spec["task_ids"]))
        episodes: list[EpisodeRecord] = []
        total = len(tasks) * config.n

        def finished(episode: EpisodeRecord) -> None:
            episodes.append(episode)
            work.progress(len(episodes), total)

        with _source(inputs, config, execution, work.key, shard.id) as source:
            began = time.perf_counter()
            setting = _setting(config, execution, source)
            is_enough = _stopping_rule(tasks, config, episodes)
            run_attempts(_attempts(tasks, config, work), setting, execution.max_concurrency, finished, is_enough)
            sampling_s = time.perf_counter() - began
            facts = source.facts()
        steps = steps_table(episodes, source.logprob_mode)
        table = episodes_table(episodes)
        return ShardOutput(
            {"episodes": table, "steps": steps, "call_errors": call_errors_table(episodes)},
            summary=_summary(tasks, config, episodes, sampling_s) | facts,
        )

    def summarise(self, receipts: Iterable[Receipt]) -> dict[str, Any]:
        receipts = list(receipts)
        total: dict[str, Any] = {}
        status: dict[str, int] = {}
        for receipt in receipts:
            for name, value in receipt.summary.items():
                if name == "status":
                    for word, count in value.items():
                        status[word] = status.get(word, 0) + count
                elif isinstance(value, list):
                    total[name] = sorted({*total.get(name, []), *value})
                elif name not in ("tokens_per_s", "left"):  # what was left stands in the shards' receipts
                    before = total.get(name, 0)
                    total[name] = None if value is None or before is None else before + value
        n_tokens, busy_s = total["response_tokens"], _busy_s(receipts)
        rate = n_tokens / busy_s if busy_s and n_tokens is not None else None
        return {**total, "tokens_per_s": rate, "status": dict(sorted(status.items()))}


def _busy_s(receipts: list[Receipt]) -> float:
    """Seconds in which one shard or more was sampled, which is the last that a shard does: shards side by side count
    once."""
    ends = [
        (receipt.started_at.timestamp() + receipt.duration_s, receipt.summary["sampling_s"]) for receipt in receipts
    ]
    total, until = 0.0, float("-inf")
    for start, end in sorted((end - sampling_s, end) for end, sampling_s in ends):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _check_policy(inputs: Inputs, *, is_endpoint: bool) -> None:
    """Refuses a policy where somebody else's model answers, and none where it does not."""
    if inputs.manifests("policy") and is_endpoint:
        raise ConfigError("engine.type=endpoint asks a model that others serve, and a policy was given, too")
    if is_endpoint:
        return
    if not inputs.manifests("policy"):
        raise ConfigError(
            "stage rollouts needs the input 'policy' (an artifact of kind policy)", hint="give it: policy=REF"
        )
    check_base(inputs)


def _agents_of_tasks(inputs: Inputs) -> list[str]:
    """The agents that the tasks ask for, with the default for those that ask for none."""
    named = inputs.scan("tasks", "tasks").select("agent").unique().collect()["agent"].to_list()
    for name in filter(None, named):
        if is_user_code(name):
            raise ConfigError(
                f"the tasks name the agent {name!r}, and code is only run where a config names it",
                hint=f"set rollouts.agent={name}",
            )
    return sorted({name or _DEFAULT_AGENT for name in named})


def _selected_ids(inputs: Inputs, config: RolloutsConfig, work: Work) -> list[str]:
    task_ids = inputs.scan("tasks", "tasks").select("task_id").collect()["task_id"].to_list()
    if not task_ids:
        raise InputError("there are no tasks to attempt")
    return selected(task_ids, config.batch, work.seed or 0)


def _tasks(inputs: Inputs, task_ids: list[str]) -> Iterator[Task]:
    import polars as pl

    found = inputs.scan("tasks", "tasks").filter(
        pl.col("task_id").is_between(pl.lit(min(task_ids)), pl.lit(max(task_ids))), pl.col("task_id").is_in(task_ids)
    )
    return map(Task.from_row, found.sort("task_id").collect().iter_rows(named=True))


def _attempts(tasks: list[Task], config: RolloutsConfig, work: Work) -> Iterator[Any]:
    """All attempts, those at one task next to each other, so that the engine computes their prompt once."""
    from stages.rollouts.episodes import Attempt

    batch_index = config.batch.index if config.batch else 0
    for task in tasks:
        name = config.agent or task.agent or _DEFAULT_AGENT
        agent = agent_named(name)
        for rollout_index in range(config.n):
            yield Attempt(
                episode_id=canonical_hash([work.key, task.id, rollout_index])[:32],
                task=task,
                rollout_index=rollout_index,
                seed=seed_from(work.seed, work.draw, batch_index, task.id, rollout_index),
                agent_name=agent_label(name),
                agent=agent,
            )


def _check_served(policy: Any, engine: Any, sampling: Sampling, execution: RolloutsExecution) -> None:
    """Refuses what cannot sample, or cannot end at the texts that are asked for."""
    from stages.rollouts.chat_template import chat_template_in

    if isinstance(engine, VllmConfig) and execution.vllm.starts_workers:
        vllm_python(execution.vllm)
    template = chat_template_in(policy.folder)
    for text in sampling.stop:
        template.token_id(text)


def policy_files(inputs: Inputs) -> Any:
    """The policy on this machine's disk, for an engine."""
    return _files(inputs, "policy", inputs.manifest("policy"), policy_folders(inputs))


def _role_files(inputs: Inputs, config: RolloutsConfig, name: str) -> Any:
    policy = policy_of(inputs, config, name)
    return _files(inputs, INPUT, policy, policy_folders(inputs, INPUT, policy))


def _files(inputs: Inputs, name: str, policy: Manifest, folders: tuple[Path, Path | None]) -> Any:
    from stages.rollouts.engines.base import PolicyFiles

    return PolicyFiles(policy.key, folders[0], _probe(inputs, name, policy), folders[1], policy.digest)


def _probe(inputs: Inputs, name: str, policy: Manifest) -> Any:
    from stages.rollouts.engines.base import Probe

    frame = inputs.scan(name, "probe", artifact=policy).sort("probe_id").collect()
    if not len(frame):
        raise InputError(f"{policy.ref} has no probe, so no engine can be checked against it")
    ids = [row.to_numpy() for row in frame["ids"]]
    return Probe(ids=ids, logprobs=[row.to_numpy() for row in frame["logprobs"]])


def _source(inputs: Inputs, config: RolloutsConfig, execution: RolloutsExecution, key: str, shard: str) -> Any:
    from stages.rollouts.sources import endpoint_source, policy_source, role_source

    if isinstance(config.engine, EndpointConfig):
        return endpoint_source(config.engine, config, execution, key, shard)
    if not config.roles:
        return policy_source(policy_files(inputs), config, execution, key, shard)
    of_roles = {name: _role_files(inputs, config, name) for name in config.roles}
    return role_source(policy_files(inputs), of_roles, config, execution, key, shard)


def _setting(config: RolloutsConfig, execution: RolloutsExecution, source: Any) -> Any:
    from stages.rollouts.episodes import Setting

    return Setting(
        source=source,
        sampling=config.sampling.model_dump(include={"temperature", "top_p", "top_k", "max_tokens"}),
        agent_config=config.agent_config,
        time_limit_s=config.episode_time_limit_s,
        is_validation=config.is_validation,
        in_processes=execution.agents == "processes",
    )


def _refuse_long_prompts(inputs: Inputs, config: RolloutsConfig, task_ids: list[str]) -> None:
    """Refuses tasks whose first prompt leaves no room for an answer, where the agent's first prompt can be told."""
    import polars as pl

    from stages.rollouts.chat_template import chat_template_in
    from stages.rollouts.checkpoint import context_length_of

    folder, _ = policy_folders(inputs)
    template, context = chat_template_in(folder), context_length_of(folder)
    if isinstance(config.engine, VllmConfig):
        context = min(context, config.engine.args.get("max_model_len") or context)

    def length(task: Task) -> int:
        first = first_messages(config.agent or task.agent or _DEFAULT_AGENT)
        return len(template.opening(first(task, config.agent_config))[1]) if first else 0

    # A token of text is at least one byte, so most tasks need not be encoded to know that they fit.
    names = [None] if config.agent is not None else _agents_of_tasks(inputs)
    around = max(length(Task(id="", instruction="", agent=name)) for name in names)
    suspects = inputs.scan("tasks", "tasks").filter(
        pl.col("instruction").str.len_bytes() + around >= context, pl.col("task_id").is_in(task_ids)
    )
    lengths = {task.id: length(task) for task in map(Task.from_row, suspects.collect().iter_rows(named=True))}
    found = sorted((task_id, n) for task_id, n in lengths.items() if n >= context)
    if found:
        listed = ", ".join(f"{task_id} ({n})" for task_id, n in found[:_LISTED])
        more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        raise InputError(
            f"the policy's context of {context} tokens has no room for the prompt and an answer of task {listed}{more}",
            hint="leave these tasks out, shorten their instruction, or take a policy with a longer context",
        )


def _stopping_rule(tasks: list[Task], config: RolloutsConfig, episodes: list[Any]) -> Callable[[], bool]:
    """Whether enough of the shard's attempts have finished, told from the list of episodes as it grows."""
    rule = config.finish_when
    if rule is None:
        return lambda: False
    share, per_group_min = rule.share, rule.per_group_min
    finished = dict.fromkeys((task.id for task in tasks), 0)
    lacking = len(tasks) if per_group_min else 0
    seen = 0

    def is_enough() -> bool:
        nonlocal lacking, seen
        for episode in episodes[seen:]:
            finished[episode.attempt.task.id] += 1
            lacking -= finished[episode.attempt.task.id] == per_group_min
        seen = len(episodes)
        return lacking == 0 and seen >= share * len(tasks) * config.n

    return is_enough


def _left(tasks: list[Task], n: int, episodes: list[Any]) -> dict[str, list[int]]:
    """The attempts that were given up, by task."""
    made = {(episode.attempt.task.id, episode.attempt.rollout_index) for episode in episodes}
    left = {task.id: [index for index in range(n) if (task.id, index) not in made] for task in tasks}
    return {task_id: indices for task_id, indices in left.items() if indices}


def _summary(tasks: list[Task], config: RolloutsConfig, episodes: list[Any], sampling_s: float) -> dict[str, Any]:
    from stages.rollouts.rows import total

    steps = [step for episode in episodes for step in episode.steps]
    n_tokens = total(step.response_tokens for step in steps)
    words = sorted({episode.status for episode in episodes})
    found: dict[str, Any] = {
        "n_tasks": len(tasks),
        "n_episodes": len(episodes),
        "n_steps": len(steps),
        "n_retries": sum(len(step.generation.retries) for step in steps),
        "prompt_tokens": total(step.prompt_tokens for step in steps),
        "response_tokens": n_tokens,
        "sampling_s": sampling_s,
        "tokens_per_s": n_tokens / sampling_s if sampling_s and n_tokens is not None else None,
        "status": {word: sum(episode.status == word for episode in episodes) for word in words},
    }
    if config.finish_when is not None:
        found["left"] = _left(tasks, config.n, episodes)
        found["n_left"] = len(tasks) * config.n - len(episodes)
    return found


STAGE = RolloutsStage()
