"""Answers of real vLLM that are told while they are sampled."""

import numpy as np
import pytest

from stages.artifacts.store import open_store
from stages.rollouts.engines import close_engines
from tests.stages.rollouts.policies import forward_logprobs, make_policy
from tests.stages.rollouts.stored import frame, request, rolled_out, stored_policy, stored_tasks
from tests.stages.rollouts.test_streaming import AGENTS, check_pieces

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

EXECUTION = {"vllm": {"workers": 1, "env": {"VLLM_CPU_KVCACHE_SPACE": "1"}, "args": {"max_num_seqs": 16}}}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """One that takes milliseconds a token: answers of smaller ones are whole before their beginning is read."""
    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12}
    return make_policy(tmp_path_factory.mktemp("policy"), **shape, num_key_value_heads=12)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One for all tests here."""
    return open_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def made(store, policy):
    """Runs an agent at two tasks: the rollouts."""
    tasks, stored = stored_tasks(store, 2), stored_policy(store, policy)

    def run(agent):
        config = {"agent": f"{AGENTS}:{agent}", "engine": {"type": "vllm"}, "sampling": {"max_tokens": 120}}
        return rolled_out(store, request(tasks, stored, config, EXECUTION)).manifest

    yield run
    close_engines()


def test_text_arrives_in_pieces_through_each_api_and_they_are_what_is_recorded(made, store):
    check_pieces(store, made("through_each_api"))


def test_of_a_stream_that_its_client_hangs_up_what_was_sampled_is_kept(made, store, policy):
    errors = frame(store, made("hangs_up_in_the_middle"), "call_errors")
    assert errors["status"].to_list() == ["abandoned"] * 2
    for row in errors.iter_rows(named=True):
        sampled = row["response_ids"]
        assert sampled
        whole = np.array([*row["prompt_ids"], *sampled], np.int32)
        expected = forward_logprobs(policy.folder, whole)[-len(sampled) :]
        np.testing.assert_allclose(row["logprobs"], expected, atol=1e-4)
