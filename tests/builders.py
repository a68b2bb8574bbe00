"""Small real things for tests: rows and tables in their declared schemas, stored artifacts, a stored run.

What lies in a store here got there through the real commit protocol, from stages that return given tables.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pyarrow as pa

from schemas.artifacts import IterationRecord, Manifest, RunEnd, RunRecord, ShardPlan
from schemas.canonical import canonical_hash, canonical_json, seed_from
from schemas.config import ConfigModel
from schemas.errors import InputError
from stages.artifacts.code import code_version
from stages.artifacts.commit import Request, materialise
from stages.artifacts.layout import new_nonce
from stages.artifacts.parquet import table_from_rows
from stages.artifacts.stage import FileOutput, Inputs, InputSpec, ShardOutput, Stage, Work
from stages.artifacts.store import Store

NOON = datetime(2026, 9, 1, 12, tzinfo=UTC)
SAMPLING_POLICY = "a" * 64


def task_rows(n: int = 3, *, benchmark: str = "sums", **columns: Any) -> list[dict[str, Any]]:
    """Tasks ``t000``, ``t001``, …: "What is i + i?" with its answer; ``columns`` overrides any column."""
    return [
        {
            "task_id": f"t{index:03d}",
            "instruction": f"What is {index} + {index}?",
            "answer": str(2 * index),
            "metadata": canonical_json({"index": index}),
            "benchmark": benchmark,
            "split": "test",
            "grader": None,
            "agent": None,
        }
        | columns
        for index in range(n)
    ]


def episode_rows(task_ids: Sequence[str], samples: int = 2, **columns: Any) -> list[dict[str, Any]]:
    """``samples`` attempts at each task, with ids ``<task>-0``, ``<task>-1``, …; one step each."""
    return [
        {
            "episode_id": f"{task_id}-{index}",
            "task_id": task_id,
            "rollout_index": index,
            "agent": "single_turn",
            "status": "completed",
            "error_kind": None,
            "error": None,
            "artifacts": None,
            "seed": 1000 * index + number,
            "started_at": NOON + timedelta(seconds=number),
            "duration_s": 0.5,
            "n_steps": 1,
            "prompt_tokens": 4,
            "response_tokens": 3,
        }
        | columns
        for number, task_id in enumerate(task_ids)
        for index in range(samples)
    ]


def step_rows(
    episode_ids: Sequence[str], *, response: str | None = "4", response_ids: Sequence[int] = (7, 8, 2), **columns: Any
) -> list[dict[str, Any]]:
    """One model call an episode, of the trajectory ``default``; each sampled id has the logprob -0.5."""
    return [
        {
            "episode_id": episode_id,
            "trajectory": "default",
            "step_index": 0,
            "finish_reason": "stop",
            "policy_id": SAMPLING_POLICY,
            "logprob_mode": "raw",
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": None,
            "seed": number,
            "started_at": NOON + timedelta(seconds=number),
            "latency_s": 0.25,
            "worker": None,
            "prefix_length": 0,
            "messages": canonical_json([{"role": "user", "content": "What is 2 + 2?"}]),
            "response": response,
            "reasoning": None,
            "tool_calls": None,
            "prompt_ids": [1, 5, 6, 5],
            "response_ids": list(response_ids),
            "logprobs": [-0.5] * len(response_ids),
        }
        | columns
        for number, episode_id in enumerate(episode_ids)
    ]


def reward_rows(episode_ids: Sequence[str], rewards: Sequence[float | None]) -> list[dict[str, Any]]:
    """One graded trajectory an episode; a reward of None is a grader that timed out."""
    return [
        {
            "episode_id": episode_id,
            "trajectory": "default",
            "status": "timeout" if reward is None else "ok",
            "reward": reward,
            "is_correct": None if reward is None else reward > 0,
            "verdict": None if reward is None else ("correct" if reward > 0 else "wrong_answer"),
            "explanation": "the time limit of 5 s passed" if reward is None else None,
            "grader": "exact",
            "grader_version": "1",
            "duration_s": 0.001,
        }
        for episode_id, reward in zip(episode_ids, rewards, strict=True)
    ]


def advantage_rows(episode_ids: Sequence[str], advantages: Sequence[float]) -> list[dict[str, Any]]:
    """One kept trajectory an episode, each in a group of its own task (the id up to its last dash)."""
    return [
        {
            "episode_id": episode_id,
            "trajectory": "default",
            "group_id": episode_id.rpartition("-")[0],
            "advantage": advantage,
            "baseline": 0.5,
            "group_mean": 0.5,
            "group_std": 0.5,
            "group_size": 2,
            "kept": True,
            "drop_reason": None,
            "token_advantages": None,
        }
        for episode_id, advantage in zip(episode_ids, advantages, strict=True)
    ]


def metric_rows(stage: str, values: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Measurements of one stage, by name."""
    return [
        {"run": None, "iteration": None, "stage": stage, "name": name, "value": value, "recorded_at": NOON}
        for name, value in values.items()
    ]


class GivenConfig(ConfigModel):
    """What a given artifact holds, so that different content has a different key."""

    content: str


class NoExecution(ConfigModel):
    """Nothing to set."""


class Given(Stage[GivenConfig, NoExecution]):
    """A stage whose output is handed to it: one shard for each mapping of tables."""

    version = 1
    stochastic = False
    Config = GivenConfig
    Execution = NoExecution

    def __init__(
        self,
        kind: str,
        shards: Sequence[Mapping[str, pa.Table]],
        parts: Mapping[str, Mapping[str, bytes]],
        inputs: Mapping[str, Sequence[Manifest]],
    ):
        self.name = self.kind = kind  # type: ignore[misc]  # a stage's name is its class's; here it is the object's
        self.tables = tuple(sorted({table for shard in shards for table in shard}))  # type: ignore[misc]
        self.inputs = {name: InputSpec(given[0].kind, many=True) for name, given in inputs.items()}  # type: ignore[misc]
        self._shards, self._parts = shards, parts

    def plan(self, inputs: Inputs, config: GivenConfig, execution: NoExecution, work: Work) -> list[dict[str, Any]]:
        return [{"index": index} for index in range(len(self._shards))]

    def work(
        self, shard: ShardPlan, inputs: Inputs, config: GivenConfig, execution: NoExecution, work: Work
    ) -> ShardOutput:
        index = shard.spec["index"]
        files: list[FileOutput] = []
        for part, contents in self._parts.items() if index == 0 else ():
            for name, content in contents.items():
                path = work.scratch / str(len(files))
                path.write_bytes(content)
                files.append(FileOutput(part, name, path))
        n_rows = sum(table.num_rows for table in self._shards[index].values())
        return ShardOutput(self._shards[index], files, {"n_rows": n_rows})


class NumbersConfig(ConfigModel):
    """What the numbers are."""

    n_shards: int = 3
    n_rows: int = 4
    """Rows a shard."""
    by_chance: bool = False
    """Whether every making of a shard gives other content, as sampling does on a real engine."""


class NumbersExecution(ConfigModel):
    """How they are made."""

    log: str | None = None
    """A file to which the id of each shard that is worked on is appended."""
    pause_s: float = 0.0
    """Waits in each shard before its work."""
    fail_at: int | None = None
    """Shard whose work raises."""
    n_shards: int | None = None
    """Overrides the number of shards, as a setting of the machine might; None: the config's."""


class Numbers(Stage[NumbersConfig, NumbersExecution]):
    """A stage that is quick and can be watched: each shard gives tasks, and a file that names them."""

    name = "numbers"
    kind = "tasks"
    version = 1
    stochastic = True
    inputs: ClassVar[dict[str, InputSpec]] = {}
    tables = ("tasks",)
    Config = NumbersConfig
    Execution = NumbersExecution

    def check(self, inputs: Inputs, config: NumbersConfig, execution: NumbersExecution) -> None:
        if config.n_rows < 1:
            raise InputError("numbers: there are no rows to make")

    def plan(
        self, inputs: Inputs, config: NumbersConfig, execution: NumbersExecution, work: Work
    ) -> list[dict[str, Any]]:
        return [{"number": number} for number in range(execution.n_shards or config.n_shards)]

    def work(
        self, shard: ShardPlan, inputs: Inputs, config: NumbersConfig, execution: NumbersExecution, work: Work
    ) -> ShardOutput:
        time.sleep(execution.pause_s)
        if execution.log is not None:
            with open(execution.log, "a", encoding="utf-8") as log:
                log.write(f"{shard.id}\n")
        number = shard.spec["number"]
        if number == execution.fail_at:
            raise RuntimeError("the work failed")
        mark = secrets.token_hex(8) if config.by_chance else str(seed_from(work.seed, work.draw, number))
        rows = [row | {"task_id": f"s{number}-{row['task_id']}", "answer": mark} for row in task_rows(config.n_rows)]
        note = work.scratch / "note"
        note.write_text(mark)
        work.progress(config.n_rows, config.n_rows)
        return ShardOutput(
            {"tasks": table_from_rows("tasks", rows)},
            [FileOutput("page", f"note-{number}.txt", note)],
            {"n_tasks": len(rows)},
        )


def numbers_request(seed: int = 7, draw: int = 0, execution: NumbersExecution | None = None, **config: Any) -> Request:
    """Work of the ``Numbers`` stage."""
    return Request(Numbers(), NumbersConfig(**config), execution or NumbersExecution(), {}, seed, draw)


def given(
    store: Store,
    kind: str,
    *shards: Mapping[str, Sequence[Mapping[str, Any]]],
    parts: Mapping[str, Mapping[str, bytes]] | None = None,
    inputs: Mapping[str, Sequence[Manifest]] | None = None,
) -> Manifest:
    """Stores an artifact of ``kind`` that holds exactly these rows and files.

    Args:
        shards: for each shard, rows by table name.
        parts: bytes by file name by part (``{"checkpoint": {"config.json": b"{}"}}``), made by the first shard.
        inputs: by input name, what it is said to be made from.
    """
    tables = [{name: table_from_rows(name, rows) for name, rows in shard.items()} for shard in shards or ({},)]
    parts, inputs = parts or {}, inputs or {}
    content = canonical_hash(
        [
            [{name: repr(table.to_pydict()) for name, table in shard.items()} for shard in tables],
            {part: {name: data.hex() for name, data in files.items()} for part, files in parts.items()},
        ]
    )
    stage = Given(kind, tables, parts, inputs)
    request = Request(
        stage, GivenConfig(content=content), NoExecution(), {name: list(many) for name, many in inputs.items()}
    )
    return materialise(store, request).manifest


def stored_tasks(store: Store, n: int = 3) -> Manifest:
    """Tasks ``t000``, ``t001``, …"""
    return given(store, "tasks", {"tasks": task_rows(n)})


def stored_policy(store: Store, label: str = "0", inputs: Mapping[str, Sequence[Manifest]] | None = None) -> Manifest:
    """A policy in name only: its checkpoint and optimizer are a few bytes that hold ``label``."""
    probe = [{"probe_id": 0, "ids": [1, 2, 3], "logprobs": [-0.5, -1.5]}]
    return given(
        store,
        "policy",
        {"probe": probe, "metrics": metric_rows("policy", {"loss": 1.0 / (1 + len(label))})},
        parts={
            "checkpoint": {"config.json": canonical_json({"label": label}).encode(), "model.safetensors": b"weights"},
            "optimizer": {"state.safetensors": f"moments of {label}".encode()},
        },
        inputs=inputs,
    )


def stored_rollouts(store: Store, tasks: Manifest, policy: Manifest, *, n_tasks: int = 3, samples: int = 2) -> Manifest:
    """``samples`` scripted attempts at each of the first tasks, one shard a task; all answer "4"."""
    shards = []
    for task in task_rows(n_tasks):
        episodes = episode_rows([task["task_id"]], samples)
        steps = step_rows([episode["episode_id"] for episode in episodes], policy_id=policy.key)
        shards.append({"episodes": episodes, "steps": steps})
    return given(store, "rollouts", *shards, inputs={"tasks": [tasks], "policy": [policy]})


def stored_rewards(
    store: Store, tasks: Manifest, rollouts: Manifest, *, n_tasks: int = 3, samples: int = 2
) -> Manifest:
    """Rewards of ``stored_rollouts``: 1 for the task whose answer is 4, else 0."""
    episodes = episode_rows([task["task_id"] for task in task_rows(n_tasks)], samples)
    rewards = [1.0 if episode["task_id"] == "t002" else 0.0 for episode in episodes]
    rows = reward_rows([episode["episode_id"] for episode in episodes], rewards)
    return given(
        store,
        "rewards",
        {"rewards": rows, "signals": [], "step_rewards": []},
        inputs={"tasks": [tasks], "rollouts": [rollouts]},
    )


def stored_run(store: Store, name: str = "demo", iterations: int = 2) -> RunRecord:
    """A finished run: in each iteration rollouts of the current policy, their rewards and advantages, a new policy."""
    record = RunRecord(
        run=name,
        flow="train",
        config={"iterations": iterations, "policy": {"learning_rate": 1e-3}},
        created_at=NOON,
        code=code_version(),
        nonce=new_nonce(),
    )
    store.put_run(record)
    tasks, policy = stored_tasks(store), stored_policy(store, name)
    for iteration in range(iterations):
        rollouts = stored_rollouts(store, tasks, policy)
        rewards = stored_rewards(store, tasks, rollouts)
        ids = [f"t{index:03d}-{sample}" for index in range(3) for sample in range(2)]
        advantages = given(
            store,
            "advantages",
            {"advantages": advantage_rows(ids, [0.5, -0.5] * 3)},
            inputs={"rollouts": [rollouts], "rewards": [rewards]},
        )
        made_from = {"policy": [policy], "rollouts": [rollouts], "advantages": [advantages]}
        updated = stored_policy(store, f"{name}{iteration + 1}", made_from)
        artifacts = {
            "policy_in": policy.ref,
            "tasks": tasks.ref,
            "rollouts": rollouts.ref,
            "rewards": rewards.ref,
            "advantages": advantages.ref,
            "policy": updated.ref,
        }
        store.put_iteration(
            IterationRecord(run=name, iteration=iteration, artifacts=artifacts, finished_at=NOON, nonce=new_nonce())
        )
        policy = updated
    store.put_run_end(RunEnd(run=name, iterations=iterations, report=None, finished_at=NOON, nonce=new_nonce()))
    return record
