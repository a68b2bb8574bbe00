"""Makes rollouts of captured sessions, so that they lie on the shelf like those of the rollouts stage."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from schemas.artifacts import Receipt, ShardPlan
from schemas.errors import InputError
from stages.artifacts.stage import Inputs, InputSpec, ShardOutput, Stage, Work
from stages.rollouts.capture.config import CaptureConfig, CaptureExecution


class CaptureStage(Stage[CaptureConfig, CaptureExecution]):
    """Sessions of a gateway as rows of ``episodes``, ``steps`` and ``call_errors``."""

    name: ClassVar[str] = "capture"
    kind: ClassVar[str] = "rollouts"
    version: ClassVar[int] = 1
    stochastic: ClassVar[bool] = False
    inputs: ClassVar[dict[str, InputSpec]] = {
        "tasks": InputSpec("tasks"),
        "policy": InputSpec("policy"),
        "base": InputSpec("policy", optional=True),
    }
    tables: ClassVar[tuple[str, ...]] = ("episodes", "steps", "call_errors")
    Config: ClassVar[type[CaptureConfig]] = CaptureConfig
    Execution: ClassVar[type[CaptureExecution]] = CaptureExecution

    def check(self, inputs: Inputs, config: CaptureConfig, execution: CaptureExecution) -> None:
        if content_of(Path(execution.folder)) != config.content:
            raise InputError(f"the captured sessions in {execution.folder} are not those that were to be committed")

    def plan(
        self, inputs: Inputs, config: CaptureConfig, execution: CaptureExecution, work: Work
    ) -> list[dict[str, Any]]:
        from stages.rollouts.capture.episodes import read_folder

        episode_ids = [session.head.episode_id for session in read_folder(Path(execution.folder))]
        size = execution.shard_sessions
        return [{"episode_ids": episode_ids[start : start + size]} for start in range(0, len(episode_ids), size)]

    def work(
        self, shard: ShardPlan, inputs: Inputs, config: CaptureConfig, execution: CaptureExecution, work: Work
    ) -> ShardOutput:
        from stages.rollouts.capture.episodes import episodes_of, read_folder
        from stages.rollouts.rows import call_errors_table, episodes_table, steps_table, total

        episodes = episodes_of(read_folder(Path(execution.folder)), set(shard.spec["episode_ids"]))
        steps = [step for episode in episodes for step in episode.steps]
        return ShardOutput(
            {
                "episodes": episodes_table(episodes),
                "steps": steps_table(episodes, config.logprob_mode),
                "call_errors": call_errors_table(episodes),
            },
            summary={
                "n_episodes": len(episodes),
                "n_steps": len(steps),
                "prompt_tokens": total(step.prompt_tokens for step in steps),
                "response_tokens": total(step.response_tokens for step in steps),
                "status": dict(sorted(Counter(episode.status for episode in episodes).items())),
            },
        )

    def summarise(self, receipts: Iterable[Receipt]) -> dict[str, Any]:
        summaries = [receipt.summary for receipt in receipts]
        status: Counter[str] = Counter()
        for summary in summaries:
            status.update(summary["status"])
        counts = ("n_episodes", "n_steps", "prompt_tokens", "response_tokens")
        return {
            **{name: sum(summary[name] for summary in summaries) for name in counts},
            "status": dict(sorted(status.items())),
        }


def content_of(folder: Path) -> str:
    """A digest of all sessions in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.calls")):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


STAGE = CaptureStage()
