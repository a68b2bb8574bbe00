"""Answers of real vLLM that are told while they are sampled."""

import numpy as np
import pytest

from stages.artifacts.store import open_store
from stages.rollouts.engines import close_engines
from tests.stages.rollouts.live import CONTEXT
from tests.stages.rollouts.policies import forward_logprobs, make_endless_policy
from tests.stages.rollouts.stored import frame, request, rolled_out, stored_policy, stored_tasks
from tests.stages.rollouts.test_streaming import AGENTS, check_pieces

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

LONG = CONTEXT - 200
"""Tokens that take any machine seconds."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """One that does not end its answers: they take as long as their tokens are many."""
    return make_endless_policy(tmp_path_factory.mktemp("endless"), seed=2, context=CONTEXT)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One for all tests here."""
    return open_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def made(store, attached, policy):
    """Runs an agent at two tasks: the rollouts."""
    tasks, stored = stored_tasks(store, 2), stored_policy(store, policy)

    def run(agent, max_tokens):
        config = {"agent": f"{AGENTS}:{agent}", "engine": {"type": "vllm"}, "sampling": {"max_tokens": max_tokens}}
        return rolled_out(store, request(tasks, stored, config, attached(policy))).manifest

    yield run
    close_engines()


def test_text_arrives_in_pieces_through_each_api_and_they_are_what_is_recorded(made, store):
    check_pieces(store, made("through_each_api", 400))


def test_of_a_stream_that_its_client_hangs_up_what_was_sampled_is_kept(made, store, policy):
    errors = frame(store, made("hangs_up_in_the_middle", LONG), "call_errors")
    assert errors["status"].to_list() == ["abandoned"] * 2
    for row in errors.iter_rows(named=True):
        sampled = row["response_ids"]
        assert 0 < len(sampled) < LONG
        whole = np.array([*row["prompt_ids"], *sampled], np.int32)
        expected = forward_logprobs(policy.folder, whole)[-len(sampled) :]
        np.testing.assert_allclose(row["logprobs"], expected, atol=1e-4)
