"""The best and the worst trajectories in text. All of it comes from models and data: the page escapes it."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

    from stages.artifacts.stage import Inputs
    from stages.report.numbers import Iteration


@dataclass(frozen=True)
class Turn:
    """One message of a transcript."""

    role: str
    text: str
    sampled: bool
    """Whether the model said it."""


@dataclass(frozen=True)
class Transcript:
    """One trajectory and how it was scored."""

    row: dict[str, Any]
    """Its row of ``numbers.trajectories``."""
    answer: str | None
    turns: list[Turn]


def chosen(frame: "pl.DataFrame", n: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows with the smallest and those with the largest rewards, at most one of a task in each list, and none in
    both; ties by episode id."""
    import polars as pl

    known = frame.filter(pl.col("reward").is_not_null())
    picked = []
    for largest_first in (False, True):
        ranked = known.sort("reward", "episode_id", "trajectory", descending=[largest_first, False, False])
        picked.append(ranked.unique("task_id", keep="first", maintain_order=True).head(n).to_dicts())
    worst, best = picked
    if worst and best and worst[0]["reward"] == best[0]["reward"]:
        return worst, []
    middle = {(row["episode_id"], row["trajectory"]) for row in best}
    return [row for row in worst if (row["episode_id"], row["trajectory"]) not in middle], best


def transcripts(
    inputs: "Inputs", iteration: "Iteration", rows: list[dict[str, Any]], answers: dict[str, str | None], limit: int
) -> list[Transcript]:
    """The rows with their text.

    Args:
        answers: reference answers by task id.
        limit: longest text of a message, characters; the middle of a longer one is left out.
    """
    import polars as pl

    episode_ids = [row["episode_id"] for row in rows]
    steps = (
        inputs.scan("rollouts", "steps", artifact=iteration.rollouts)
        .filter(pl.col("episode_id").is_in(episode_ids))
        .select("episode_id", "trajectory", "step_index", "messages", "response", "reasoning", "tool_calls")
        .sort("episode_id", "trajectory", "step_index")
        .collect()
    )
    turns: dict[tuple[str, str], list[Turn]] = {}
    for step in steps.iter_rows(named=True):
        turns.setdefault((step["episode_id"], step["trajectory"]), []).extend(_turns(step, limit))
    return [
        Transcript(row, answers.get(row["task_id"]), turns.get((row["episode_id"], row["trajectory"]), []))
        for row in rows
    ]


def _turns(step: dict[str, Any], limit: int) -> list[Turn]:
    made = [
        Turn(str(message.get("role", "?")), shortened(_content(message), limit), sampled=False)
        for message in json.loads(step["messages"])
    ]
    for role, text in (
        ("reasoning", step["reasoning"]),
        ("assistant", step["response"]),
        ("tool call", step["tool_calls"]),
    ):
        if text:
            made.append(Turn(role, shortened(text, limit), sampled=True))
    return made


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "\n".join(part["text"] for part in content)
    return json.dumps({name: value for name, value in message.items() if name != "role"}, ensure_ascii=False)


def shortened(text: str, limit: int) -> str:
    """``text``, without its middle where it is longer than ``limit``."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    return f"{text[:head]}\n[… {len(text) - head - tail} characters …]\n{text[-tail:]}"
