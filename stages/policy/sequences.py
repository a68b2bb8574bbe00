"""Training sequences: ragged arrays over tokens, and how stored model calls become them.

A trajectory's sequence is the concatenation of its steps. A step whose ``prefix_length`` is shorter than
the sequence so far starts another sequence with those first ids, which are not trained on again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import InputError


@dataclass(frozen=True)
class Sequences:
    """``S`` sequences of ``T`` tokens in all, end to end; trajectories and groups are numbers."""

    ids_T: np.ndarray
    """int32."""
    sampled_T: np.ndarray
    """bool: the token is trained on. Everything else is context."""
    logprobs_T: np.ndarray
    """float32, of the sampling policy; NaN where not sampled or not known."""
    temperatures_T: np.ndarray
    """float32: what the logits are divided by before they are compared with ``logprobs_T``; NaN where not sampled."""
    advantages_T: np.ndarray
    """float32; NaN where not sampled."""
    lengths_S: np.ndarray
    """int64."""
    trajectories_S: np.ndarray
    """int64."""
    groups_S: np.ndarray
    """int64."""

    def save(self, path: Path) -> None:
        """Writes the arrays as safetensors."""
        from safetensors.numpy import save_file

        save_file({field.name: np.ascontiguousarray(getattr(self, field.name)) for field in fields(self)}, path)

    @classmethod
    def load(cls, path: Path) -> "Sequences":
        from safetensors.numpy import load_file

        return cls(**load_file(path))

    def take(self, sequences: np.ndarray) -> "Sequences":
        """These sequences in this order.

        Args:
            sequences: their numbers, shape ``(s,)``.
        """
        lengths = self.lengths_S[sequences]
        starts = (np.cumsum(self.lengths_S) - self.lengths_S)[sequences]
        tokens = ranges(starts, lengths)
        per_token = {f.name: getattr(self, f.name)[tokens] for f in fields(self) if f.name.endswith("_T")}
        return Sequences(
            **per_token,
            lengths_S=lengths,
            trajectories_S=self.trajectories_S[sequences],
            groups_S=self.groups_S[sequences],
        )

    def with_sampled_tokens(self) -> "Sequences":
        """Without the sequences in which nothing was sampled."""
        owners_T = np.repeat(np.arange(len(self.lengths_S)), self.lengths_S)
        return self.take(np.unique(owners_T[self.sampled_T]))

    def per_sampled(self, values_S: np.ndarray) -> np.ndarray:
        """A value of each sequence, repeated for its sampled tokens."""
        return np.repeat(values_S, self.lengths_S)[self.sampled_T]

    @property
    def n_sampled(self) -> int:
        return int(self.sampled_T.sum())


def sequences_from_steps(steps: pa.Table) -> Sequences:
    """The training sequences in model calls.

    Args:
        steps: rows sorted by (episode_id, trajectory, step_index) with the columns of the ``steps`` table that name
            the row, ``prefix_length``, ``prompt_ids``, ``response_ids`` and ``logprobs``, and with
            ``temperature`` (never null), ``trajectory_number``, ``group_number``, ``advantage`` and
            ``token_advantages`` (null, or one for each sampled token of the trajectory).
    Raises:
        InputError: ids or logprobs are missing or do not fit each other; the message names the trajectories.
    """
    _refuse(steps, ~_known(steps["prompt_ids"]), "have no prompt_ids")
    _refuse(steps, ~_known(steps["response_ids"]), "have no response_ids")
    prompts, responses, logprobs = (_ragged(steps[name]) for name in ("prompt_ids", "response_ids", "logprobs"))
    n_prompt, n_response = prompts.lengths, responses.lengths
    known = _known(steps["logprobs"])
    _refuse(steps, known & (logprobs.lengths != n_response), "have another number of logprobs than response_ids")

    trajectories = steps["trajectory_number"].to_numpy()
    prefixes = steps["prefix_length"].to_numpy()
    begins = np.diff(trajectories, prepend=-1) != 0
    ends_at = prefixes + n_prompt + n_response
    before = np.where(begins, 0, np.roll(ends_at, 1))
    _refuse(steps, prefixes > before, "have a step that keeps more ids than there were before it")
    _refuse(steps, prefixes + n_prompt == 0, "have a step that was sampled from no prompt")

    opens = begins | (prefixes < before)
    row_sequence = np.cumsum(opens) - 1
    first_rows = np.flatnonzero(opens)
    last_rows = np.append(first_rows[1:], len(opens)) - 1
    lengths = ends_at[last_rows]
    starts = np.cumsum(lengths) - lengths
    total = int(lengths.sum())

    prompt_at = ranges(starts[row_sequence] + prefixes, n_prompt)
    response_at = ranges(starts[row_sequence] + prefixes + n_prompt, n_response)
    ids = np.empty(total, dtype=np.int32)
    ids[prompt_at], ids[response_at] = prompts.values, responses.values
    for sequence in np.flatnonzero(~begins[first_rows]):
        kept = prefixes[first_rows[sequence]]
        ids[starts[sequence] :][:kept] = ids[starts[sequence - 1] :][:kept]

    sampled = np.zeros(total, dtype=bool)
    sampled[response_at] = True
    row_known = np.repeat(known, n_response)
    values = np.full(len(response_at), np.nan, dtype=np.float32)
    values[row_known] = logprobs.values
    temperatures = np.repeat(steps["temperature"].to_numpy().astype(np.float32), n_response)

    def scattered(sampled_values: np.ndarray) -> np.ndarray:
        out = np.full(total, np.nan, dtype=np.float32)
        out[response_at] = sampled_values
        return out

    return Sequences(
        ids_T=ids,
        sampled_T=sampled,
        logprobs_T=scattered(values),
        temperatures_T=scattered(temperatures),
        advantages_T=scattered(_advantages(steps, n_response, begins)),
        lengths_S=lengths,
        trajectories_S=trajectories[first_rows],
        groups_S=steps["group_number"].to_numpy()[first_rows],
    )


def plain_sequences(ids: Sequence[Sequence[int]], n_context: Sequence[int]) -> Sequences:
    """Sequences of given ids, each a trajectory and a group of its own, with weight 1 on what follows the context.

    Args:
        n_context: leading ids of each that are not trained on, at least 1.
    """
    lengths = np.array([len(one) for one in ids], dtype=np.int64)
    places = ranges(np.zeros_like(lengths), lengths)
    sampled = places >= np.repeat(np.array(n_context, dtype=np.int64), lengths)
    ones = np.where(sampled, 1, np.nan).astype(np.float32)
    return Sequences(
        ids_T=np.concatenate([np.asarray(one, dtype=np.int32) for one in ids]),
        sampled_T=sampled,
        logprobs_T=np.full(len(places), np.nan, dtype=np.float32),
        temperatures_T=ones,
        advantages_T=ones,
        lengths_S=lengths,
        trajectories_S=np.arange(len(lengths)),
        groups_S=np.arange(len(lengths)),
    )


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``start, start + 1, …`` for each start, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)


def named(rows: pa.Table, limit: int = 3) -> str:
    """The trajectories of rows, for messages: the first few of them and how many there are."""
    pairs = rows.select(["episode_id", "trajectory"]).group_by(["episode_id", "trajectory"]).aggregate([]).to_pylist()
    shown = [f"episode {pair['episode_id']}, trajectory {pair['trajectory']}" for pair in pairs[:limit]]
    return "; ".join(shown) + (f"; and {len(pairs) - limit} more" if len(pairs) > limit else "")


@dataclass(frozen=True)
class _Ragged:
    values: np.ndarray
    lengths: np.ndarray
    """A null row has length 0."""


def _known(column: pa.ChunkedArray) -> np.ndarray:
    return pc.is_valid(column).to_numpy()


def _ragged(column: pa.ChunkedArray) -> _Ragged:
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    return _Ragged(pc.list_flatten(column).to_numpy(), lengths)


def _advantages(steps: pa.Table, n_response: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """One advantage for each sampled token, row by row."""
    whole = np.repeat(steps["advantage"].to_numpy(zero_copy_only=False).astype(np.float32), n_response)
    by_token = _known(steps["token_advantages"])
    if not by_token.any():
        return whole
    first_rows = np.flatnonzero(begins)
    n_trajectory = np.add.reduceat(n_response, first_rows)
    lists = _ragged(steps["token_advantages"].take(first_rows))
    given = by_token[first_rows]
    wrong = np.zeros(len(begins), dtype=bool)
    wrong[first_rows] = given & (lists.lengths != n_trajectory)
    _refuse(steps, wrong, "have another number of token_advantages than sampled tokens")
    whole[np.repeat(np.repeat(given, np.diff(np.append(first_rows, len(begins)))), n_response)] = lists.values
    return whole


def _refuse(steps: pa.Table, wrong: np.ndarray, what: str) -> None:
    if wrong.any():
        raise InputError(f"rollouts that cannot be trained on: {named(steps.filter(pa.array(wrong)))} {what}")
