"""Collects outcomes into the three tables of the rewards artifact and the numbers of its summary."""

import math
from collections import Counter
from typing import Any

import pyarrow as pa

from schemas.tables import TABLES
from stages.rewards.outcome import Outcome
from stages.rewards.worker import Item


class RewardRows:
    """The rows of one shard; ``tables`` sorts them by id.

    Args:
        versions: the version of each grader by its name.
    """

    def __init__(self, versions: dict[str, str]):
        self._versions = versions
        self._rewards: list[dict[str, Any]] = []
        self._signals: list[dict[str, Any]] = []
        self._step_rewards: list[dict[str, Any]] = []

    def add(self, item: Item, outcomes: list[Outcome]) -> None:
        """One episode's outcomes, one a trajectory."""
        for outcome in outcomes:
            ids = {"episode_id": item.episode.id, "trajectory": outcome.trajectory}
            self._rewards.append(
                ids
                | {
                    "status": outcome.status,
                    "reward": outcome.reward,
                    "is_correct": outcome.is_correct,
                    "verdict": outcome.verdict,
                    "explanation": outcome.explanation,
                    "grader": item.grader,
                    "grader_version": self._versions[item.grader],
                    "duration_s": outcome.duration_s,
                }
            )
            self._signals += [ids | {"name": name, "value": value} for name, value in outcome.signals.items()]
            self._step_rewards += [
                ids | {"step_index": index, "reward": reward} for index, reward in outcome.step_rewards.items()
            ]

    def tables(self) -> dict[str, pa.Table]:
        """The tables in their declared schemas, sorted by id."""
        made = {}
        for name, rows in (
            ("rewards", self._rewards),
            ("signals", self._signals),
            ("step_rewards", self._step_rewards),
        ):
            spec = TABLES[name]
            table = pa.Table.from_pylist(rows, schema=spec.schema)
            made[name] = table.sort_by([(column, "ascending") for column in spec.id_columns])
        return made

    def summary(self) -> dict[str, Any]:
        """Counts and sums, so that the summaries of shards add up exactly."""
        statuses = Counter(row["status"] for row in self._rewards)
        return {
            "n": len(self._rewards),
            **{f"n_{status}": statuses[status] for status in ("ok", "timeout", "error", "infra")},
            "n_judged": sum(row["is_correct"] is not None for row in self._rewards),
            "n_correct": sum(row["is_correct"] is True for row in self._rewards),
            "reward_sum": math.fsum(row["reward"] for row in self._rewards if row["reward"] is not None),
            "verdicts": dict(
                sorted(Counter(row["verdict"] for row in self._rewards if row["verdict"] is not None).items())
            ),
        }

    def failures(self) -> tuple[int, int]:
        """Gradings that failed, and all that were tried."""
        statuses = Counter(row["status"] for row in self._rewards)
        failed = statuses["timeout"] + statuses["error"]
        return failed, failed + statuses["ok"]

    def commonest_failure(self) -> str:
        """The message of most failures."""
        messages = Counter(row["explanation"] for row in self._rewards if row["status"] in ("timeout", "error"))
        return str(messages.most_common(1)[0][0])
