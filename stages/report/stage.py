"""The report stage: stored tasks, rollouts, rewards and policies become one page and the tables behind it.

The page loads nothing from anywhere and runs no script; every number in it comes from an artifact.
"""

import math
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from schemas.artifacts import Manifest, ShardPlan
from schemas.config import ConfigModel
from schemas.errors import InputError
from stages.artifacts.stage import FileOutput, Inputs, InputSpec, ShardOutput, Stage, Work
from stages.report.numbers import Iteration, Numbers, linked, numbers_of, task_scores, trajectories

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa


class ReportConfig(ConfigModel):
    """What the page shows."""

    title: str | None = None
    """None: the names of the benchmarks."""
    first_iteration: int = Field(default=0, ge=0)
    """Number of the first iteration given; the others follow."""
    n_examples: int = Field(default=4, ge=0, le=50)
    """Trajectories shown in text: so many of the worst and of the best."""
    n_tasks: int = Field(default=40, ge=0, le=1000)
    """Tasks listed, the ones with the lowest pass rate first."""
    max_message: int = Field(default=3000, ge=100)
    """Longest message shown in full, characters."""


class ReportExecution(ConfigModel):
    """Nothing to set."""


class ReportStage(Stage[ReportConfig, ReportExecution]):
    """Details are of the last iteration; what changes over iterations is shown by iteration."""

    name = "report"
    kind = "report"
    version = 1
    stochastic = False
    inputs: ClassVar = {
        "tasks": InputSpec("tasks", many=True),
        "rollouts": InputSpec("rollouts", many=True),
        "rewards": InputSpec("rewards", many=True),
        "policy": InputSpec("policy", many=True, optional=True),
    }
    tables = ("metrics", "task_scores")
    Config = ReportConfig
    Execution = ReportExecution

    def check(self, inputs: Inputs, config: ReportConfig, execution: ReportExecution) -> None:
        last = linked(inputs, config.first_iteration)[-1]
        if not last.rewards.table_files("rewards"):
            raise InputError(f"the rewards {last.rewards.ref} have no rows: there is nothing to report")

    def plan(
        self, inputs: Inputs, config: ReportConfig, execution: ReportExecution, work: Work
    ) -> list[dict[str, Any]]:
        return [{}]

    def work(
        self, shard: ShardPlan, inputs: Inputs, config: ReportConfig, execution: ReportExecution, work: Work
    ) -> ShardOutput:
        from stages.artifacts.parquet import table_from_frame
        from stages.report.page import rendered

        iterations = linked(inputs, config.first_iteration)
        numbers: list[Numbers] = []
        for index, iteration in enumerate(iterations):
            frame = trajectories(inputs, iteration)
            numbers.append(numbers_of(frame))
            work.progress(index + 1, len(iterations))
        scores = task_scores(frame)
        metrics = _metrics(numbers[-1])
        page = work.scratch / "report.html"
        page.write_bytes(rendered(_context(inputs, config, iterations, numbers, frame, scores)))
        return ShardOutput(
            {
                "metrics": _metrics_table(metrics, iterations[-1].rewards),
                "task_scores": table_from_frame("task_scores", scores),
            },
            files=[FileOutput("page", "report.html", page)],
            summary={"iterations": len(iterations), **metrics},
        )


def _metrics(numbers: Numbers) -> dict[str, float | None]:
    low, high = numbers.passed.interval or (None, None)
    return {
        "pass_rate": numbers.passed.value,
        "pass_rate_low": low,
        "pass_rate_high": high,
        "solved_rate": numbers.solved.value,
        "mean_reward": numbers.mean_reward,
        "n_tasks": numbers.n_tasks,
        "n_episodes": numbers.n_episodes,
        "n_trajectories": numbers.n_trajectories,
        "n_scored": numbers.n_scored,
        "prompt_tokens": numbers.prompt_tokens,
        "response_tokens": numbers.response_tokens,
    }


def _metrics_table(metrics: dict[str, float | None], measured: Manifest) -> "pa.Table":
    from stages.artifacts.parquet import table_from_rows

    rest = {"run": None, "iteration": None, "stage": "report", "recorded_at": measured.finished_at}
    return table_from_rows("metrics", [{**rest, "name": name, "value": value} for name, value in metrics.items()])


def _context(
    inputs: Inputs,
    config: ReportConfig,
    iterations: list[Iteration],
    numbers: list[Numbers],
    frame: "pl.DataFrame",
    scores: "pl.DataFrame",
) -> dict[str, Any]:
    """Everything that the template names."""
    import polars as pl

    from stages.report import page, transcripts

    last = iterations[-1]
    listed = scores.sort("pass_rate", "mean_reward", "task_id", "trajectory", nulls_last=True).head(config.n_tasks)
    worst, best = transcripts.chosen(frame, config.n_examples)
    tasks = _tasks(inputs, [*listed["task_id"], *(row["task_id"] for row in worst + best)])
    answers = {task_id: row["answer"] for task_id, row in tasks.items()}
    benchmarks = sorted({row["benchmark"] for row in tasks.values() if row["benchmark"]})
    failed = frame.filter(pl.col("status") != "ok")
    manifests = _unique([m for name in ("tasks", "policy", "rollouts", "rewards") for m in inputs.manifests(name)])
    return {
        "title": config.title or ", ".join(benchmarks) or "Report",
        "benchmarks": benchmarks,
        "last": last,
        "iterations": iterations,
        "now": numbers[-1],
        "first": numbers[0],
        "total_response_tokens": _total(n.response_tokens for n in numbers),
        "progress": page.progress_chart(iterations, numbers) if len(iterations) > 1 else None,
        "verdicts": page.counted(frame["verdict"]),
        "statuses": page.counted(frame["status"]),
        "episode_statuses": page.counted(frame.unique("episode_id")["episode_status"]),
        "failures": page.counted(failed["explanation"])[:12],
        "episode_errors": page.counted(frame.unique("episode_id")["error_kind"])[:12],
        "lengths": page.length_charts(frame),
        "length_quantiles": _quantiles(frame.unique("episode_id")["response_tokens"].drop_nulls()),
        "training": page.metric_charts(_training(inputs, iterations)),
        "task_chart": page.task_distribution(scores),
        "task_outcomes": page.task_outcomes(scores) if scores["pass_rate"].count() else [],
        "scores": listed.to_dicts(),
        "n_scores": scores.height,
        "tasks": {task_id: _beginning(row["instruction"]) for task_id, row in tasks.items()},
        "several_roles": scores["trajectory"].n_unique() > 1,
        "worst": transcripts.transcripts(inputs, last, worst, answers, config.max_message),
        "best": transcripts.transcripts(inputs, last, best, answers, config.max_message),
        "artifacts": page.artifact_rows(manifests),
        "configs": page.configs(manifests),
        "libraries": last.rewards.libraries,
    }


def _tasks(inputs: Inputs, task_ids: list[str]) -> dict[str, dict[str, Any]]:
    """Rows of the tasks that are shown, by id; of a task in several artifacts the first."""
    import polars as pl

    wanted = pl.col("task_id").is_in(sorted(set(task_ids)))
    rows: dict[str, dict[str, Any]] = {}
    for manifest in inputs.manifests("tasks"):
        found = inputs.scan("tasks", "tasks", artifact=manifest).filter(wanted).collect()
        for row in found.iter_rows(named=True):
            rows.setdefault(row["task_id"], row)
    return rows


def _training(inputs: Inputs, iterations: list[Iteration]) -> dict[str, list[tuple[int, float | None]]]:
    """The measurements of each iteration's update, by name; what is not finite cannot be drawn and leaves a gap."""
    series: dict[str, list[tuple[int, float | None]]] = {}
    for iteration in iterations:
        if iteration.policy is not None:
            rows = inputs.scan("policy", "metrics", artifact=iteration.policy).select("name", "value").collect()
            for name, value in rows.iter_rows():
                known = value if value is not None and math.isfinite(value) else None
                series.setdefault(name, []).append((iteration.number, known))
    return series


def _quantiles(lengths: "pl.Series") -> list[tuple[str, float]]:
    if lengths.is_empty():
        return []
    marks = (("shortest", 0.0), ("10%", 0.1), ("median", 0.5), ("90%", 0.9), ("longest", 1.0))
    return [(name, float(lengths.quantile(q, "nearest"))) for name, q in marks]  # type: ignore[arg-type]


def _beginning(text: str) -> str:
    return text if len(text) <= 240 else text[:240] + "…"


def _total(values: Any) -> int | None:
    known = list(values)
    return None if None in known else sum(known)


def _unique(manifests: list[Manifest]) -> list[Manifest]:
    return list({manifest.key: manifest for manifest in manifests}.values())


STAGE = ReportStage()
