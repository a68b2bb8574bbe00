"""How a step is cut, packed and ordered changes neither its loss nor its gradient."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.policy.sequences import Sequences
from stages.policy.trainer.forward import logprobs_of, row_of, sampled_logits
from stages.policy.trainer.job import Job
from stages.policy.trainer.model import load_model
from stages.policy.trainer.update import Sums, micro_batch_loss, micro_batches
from tests.stages.policy.conftest import random_sequences

AGGREGATIONS = [
    {"aggregation": "token-mean"},
    {"aggregation": "seq-mean-token-mean"},
    {"aggregation": "seq-mean-token-sum"},
    {"aggregation": "constant", "constant": 7},
    {"aggregation": "prompt-mean"},
]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Any:
    return load_model(tiny_folder, torch.float32, trained=True)


@pytest.fixture(scope="module")
def sequences(model: Any) -> Sequences:
    """Sequences whose stored logprobs are near the model's, so that some tokens are clipped and some are not."""
    made = random_sequences()
    row = row_of(made, CPU)
    with torch.no_grad():
        logprobs = logprobs_of(sampled_logits(model, row), row).numpy()
    stored = made.logprobs_T.copy()
    stored[made.sampled_T] = logprobs + np.random.default_rng(5).normal(0, 0.3, size=len(logprobs))
    return replace(made, logprobs_T=stored)


def loss_and_gradient(
    model: Any, sequences: Sequences, job: Job, n_ranks: int = 1
) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    """Of one step, with the work of every process done here, one after the other."""
    model.zero_grad()
    sums, total = Sums(CPU), 0.0
    for batches in micro_batches(sequences, job, n_ranks):
        for part in batches:
            loss = micro_batch_loss(model, None, job, part, [sums])
            loss.backward()
            total += loss.item()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return total, gradient, sums.values


def assert_same(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    assert second[0] == pytest.approx(first[0], abs=1e-6)
    torch.testing.assert_close(second[1], first[1], atol=1e-5, rtol=1e-4)
    assert {name: value.item() for name, value in second[2].items()} == pytest.approx(
        {name: value.item() for name, value in first[2].items()}, rel=1e-5, abs=1e-6
    )


@pytest.mark.parametrize("loss", AGGREGATIONS, ids=lambda loss: loss["aggregation"])
@pytest.mark.parametrize(("max_tokens", "n_ranks"), [(1, 1), (40, 1), (4096, 2), (40, 3), (1, 5)])
def test_micro_batches_and_processes_change_nothing(
    model: Any, sequences: Sequences, job_of: Callable[..., Job], loss: dict[str, Any], max_tokens: int, n_ranks: int
) -> None:
    whole = loss_and_gradient(model, sequences, job_of(loss=loss))
    cut = loss_and_gradient(model, sequences, job_of(loss=loss, max_tokens_per_micro_batch=max_tokens), n_ranks)
    assert whole[1].abs().max() > 1e-3
    assert_same(whole, cut)


def test_the_order_of_samples_changes_nothing(model: Any, sequences: Sequences, job_of: Callable[..., Job]) -> None:
    order = np.random.default_rng(2).permutation(len(sequences.lengths_S))
    job = job_of(max_tokens_per_micro_batch=50)
    assert_same(loss_and_gradient(model, sequences, job), loss_and_gradient(model, sequences.take(order), job))


@pytest.mark.parametrize("loss", AGGREGATIONS, ids=lambda loss: loss["aggregation"])
def test_observations_after_the_last_sample_change_nothing(
    model: Any, sequences: Sequences, job_of: Callable[..., Job], loss: dict[str, Any]
) -> None:
    assert_same(
        loss_and_gradient(model, sequences, job_of(loss=loss)),
        loss_and_gradient(model, with_observations(sequences, 5), job_of(loss=loss)),
    )


def test_observations_are_in_no_denominator(sequences: Sequences, job_of: Callable[..., Job]) -> None:
    (plain,), (longer,) = (micro_batches(s, job_of(), 1)[0] for s in (sequences, with_observations(sequences, 5)))
    np.testing.assert_array_equal(np.sort(plain.weights_N), np.sort(longer.weights_N))


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "cross_entropy"},
        {"kl": {"estimator": "k3", "coefficient": 0.3, "against": "sampling"}},
        {"loss": {"entropy_coefficient": 0.2}},
        {"loss": {"ratio_floor": 0.8, "ratio_ceiling": 1.25}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_every_part_of_the_loss_is_cut_alike(
    model: Any, sequences: Sequences, job_of: Callable[..., Job], settings: dict[str, Any]
) -> None:
    plain = loss_and_gradient(model, sequences, job_of())
    whole = loss_and_gradient(model, sequences, job_of(**settings))
    assert whole[0] != pytest.approx(plain[0], abs=1e-4)
    assert_same(whole, loss_and_gradient(model, sequences, job_of(max_tokens_per_micro_batch=30, **settings), 2))


def test_a_limit_on_the_ratio_leaves_the_denominator(
    model: Any, sequences: Sequences, job_of: Callable[..., Job]
) -> None:
    """The loss with a limit is the one without, minus the terms of the tokens that are taken out."""
    job = job_of(loss={"eps_low": 1, "eps_high": 100, "ratio_ceiling": 1.0})
    row = row_of(sequences, CPU)
    with torch.no_grad():
        ratios = torch.exp(
            logprobs_of(sampled_logits(model, row), row) - torch.from_numpy(sequences.logprobs_T[sequences.sampled_T])
        )
    advantages = torch.from_numpy(sequences.advantages_T[sequences.sampled_T])
    kept = ratios <= 1.0
    assert 0 < kept.sum() < len(kept)
    expected = -(ratios * advantages)[kept].sum() / len(kept)
    assert loss_and_gradient(model, sequences, job)[0] == pytest.approx(expected.item(), abs=1e-6)


def test_a_packed_sequence_sees_only_itself(model: Any, tiny_folder: Path, sequences: Sequences) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager").eval()
    row = row_of(sequences, CPU)
    with torch.no_grad():
        packed = logprobs_of(sampled_logits(model, row), row)
        alone = []
        for number in range(len(sequences.lengths_S)):
            one = sequences.take(np.array([number]))
            logits = plain(input_ids=torch.from_numpy(one.ids_T.astype(np.int64)[None])).logits[0]
            logs = torch.log_softmax(logits, -1)
            places = np.flatnonzero(one.sampled_T)
            alone.append(logs[places - 1, one.ids_T[places]])
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=0)


def test_processed_logprobs_are_compared_at_their_temperature(
    model: Any, tiny_folder: Path, sequences: Sequences
) -> None:
    warm = replace(sequences, temperatures_T=np.where(sequences.sampled_T, 0.5, np.nan).astype(np.float32))
    with torch.no_grad():
        row = row_of(warm, CPU)
        at_half = logprobs_of(sampled_logits(model, row), row)
        plain = sampled_logits(model, row_of(sequences, CPU))
        expected = torch.log_softmax(plain / 0.5, -1).gather(1, row.labels_N[:, None])[:, 0]
    torch.testing.assert_close(at_half, expected, atol=1e-5, rtol=0)


def with_observations(sequences: Sequences, n: int) -> Sequences:
    """Every sequence followed by ``n`` tokens that were not sampled."""

    def longer(values: np.ndarray, filler: Any) -> np.ndarray:
        parts = np.split(values, np.cumsum(sequences.lengths_S)[:-1])
        return np.concatenate([np.append(part, np.full(n, filler, dtype=values.dtype)) for part in parts])

    return replace(
        sequences,
        ids_T=longer(sequences.ids_T, 9),
        sampled_T=longer(sequences.sampled_T, False),
        logprobs_T=longer(sequences.logprobs_T, np.nan),
        temperatures_T=longer(sequences.temperatures_T, np.nan),
        advantages_T=longer(sequences.advantages_T, np.nan),
        lengths_S=sequences.lengths_S + n,
    )
