"""Finished episodes as rows of the ``episodes`` and ``steps`` tables."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.canonical import canonical_json
from schemas.tables import CALL_ERRORS, EPISODES, STEPS
from stages.rollouts.episodes import EpisodeRecord
from stages.rollouts.sources import AnyStep


def episodes_table(episodes: Sequence[EpisodeRecord]) -> pa.Table:
    """One row an episode, sorted by id."""
    rows = [
        {
            "episode_id": episode.attempt.episode_id,
            "task_id": episode.attempt.task.id,
            "rollout_index": episode.attempt.rollout_index,
            "agent": episode.agent,
            "status": episode.status,
            "error_kind": episode.error_kind,
            "error": episode.error,
            "artifacts": episode.artifacts,
            "seed": episode.attempt.seed,
            "started_at": episode.started_at,
            "duration_s": episode.duration_s,
            "n_steps": len(episode.steps),
            "prompt_tokens": total(step.prompt_tokens for step in episode.steps),
            "response_tokens": total(step.response_tokens for step in episode.steps),
        }
        for episode in sorted(episodes, key=lambda episode: episode.attempt.episode_id)
    ]
    return pa.Table.from_pylist(rows, schema=EPISODES.schema)


def steps_table(episodes: Sequence[EpisodeRecord], logprob_mode: str | None) -> pa.Table:
    """One row a model call, sorted by episode, trajectory and step.

    Where an answer was kept to a JSON schema, vLLM gives the logprobs of what the schema has left (it rules the other
    ids out before it takes logprobs, raw ones too), so these are not the model's own.
    """
    by_id = sorted(episodes, key=lambda episode: episode.attempt.episode_id)
    found = [(episode.attempt.episode_id, step) for episode in by_id for step in episode.steps]
    columns: dict[str, Any] = {
        "episode_id": [episode_id for episode_id, _ in found],
        "trajectory": [step.trajectory for _, step in found],
        "step_index": [step.step_index for _, step in found],
        "finish_reason": [step.finish_reason for _, step in found],
        "policy_id": [step.generation.policy_id for _, step in found],
        "logprob_mode": [_mode(step, logprob_mode) for _, step in found],
        "temperature": [step.sampling.temperature for _, step in found],
        "top_p": [step.sampling.top_p for _, step in found],
        "top_k": [step.sampling.top_k for _, step in found],
        "seed": [step.seed for _, step in found],
        "started_at": [step.generation.started_at for _, step in found],
        "latency_s": [step.generation.latency_s for _, step in found],
        "worker": [step.generation.worker for _, step in found],
        "prefix_length": [step.prefix_length for _, step in found],
        "messages": [canonical_json(step.messages) for _, step in found],
        "response": [step.response for _, step in found],
        "reasoning": [step.reasoning for _, step in found],
        "tool_calls": [
            canonical_json([call.as_message_part() for call in step.tool_calls]) if step.tool_calls else None
            for _, step in found
        ],
        "prompt_ids": [step.prompt_ids for _, step in found],
        "response_ids": [step.response_ids for _, step in found],
        "logprobs": [step.logprobs for _, step in found],
    }
    return pa.table([_column(columns[field.name], field) for field in STEPS.schema], schema=STEPS.schema)


def call_errors_table(episodes: Sequence[EpisodeRecord]) -> pa.Table:
    """One row a failed call, sorted by episode and trajectory."""
    rows = []
    for episode in sorted(episodes, key=lambda episode: episode.attempt.episode_id):
        seen: Counter[str] = Counter()
        for error in episode.call_errors:
            partial = error.partial
            rows.append(
                {
                    "episode_id": episode.attempt.episode_id,
                    "trajectory": error.trajectory,
                    "error_index": seen[error.trajectory],
                    "started_at": error.started_at,
                    "status": error.status,
                    "kind": error.kind,
                    "policy_id": None if partial is None else partial.policy_id,
                    "message": error.message,
                    "prompt_ids": None if partial is None else partial.prompt_ids,
                    "response_ids": None if partial is None else partial.response_ids,
                    "logprobs": None if partial is None else partial.logprobs,
                }
            )
            seen[error.trajectory] += 1
    return pa.Table.from_pylist(rows, schema=CALL_ERRORS.schema)


def total(counts: Iterable[int | None]) -> int | None:
    """The sum; None where one of them is not known."""
    known = list(counts)
    return None if None in known else sum(filter(None, known))


def _mode(step: AnyStep, logprob_mode: str | None) -> str | None:
    if step.logprobs is None:
        return None
    return logprob_mode if step.sampling.json_schema is None else "constrained"


def _column(values: list[Any], field: "pa.Field[Any]") -> pa.Array:
    if not pa.types.is_large_list(field.type):
        return pa.array(values, type=field.type)
    if all(value is None for value in values):  # the ids of an endpoint, which gives none
        return pa.nulls(len(values), field.type)
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in values], dtype=np.int64)])
    flat = np.concatenate(values) if values else np.zeros(0)
    elements = pa.array(flat.astype(field.type.value_type.to_pandas_dtype(), copy=False))
    return pa.LargeListArray.from_arrays(pa.array(offsets, type=pa.int64()), elements, type=field.type)
