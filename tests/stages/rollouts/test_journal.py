"""Finished model calls survive the stage that made them."""

from pathlib import Path

import numpy as np
import pytest

from schemas.errors import StageFailed
from stages.artifacts.cache import cache_root
from stages.rollouts.journal import _read
from tests.stages.rollouts.stored import AGENTS, frame, request, rolled_out, stored_policy, stored_tasks

CONFIG = {"agent": f"{AGENTS}:three_turns", "engine": {"type": "scripted", "n_tokens": 5}}


@pytest.fixture
def shelf(memory_store, policy):
    return memory_store, stored_tasks(memory_store), stored_policy(memory_store, policy)


def journals(key: str) -> list[Path]:
    return sorted((cache_root() / "journal" / key[:32]).glob("*.calls"))


def test_calls_of_interrupted_episodes_are_answered_from_the_journal(shelf):
    store, tasks, stored = shelf
    asked = request(tasks, stored, CONFIG | {"agent_config": {"a": 1}}, {"max_concurrency": 1, "shard_tasks": 3})
    seen = []

    def interrupt(shard, done, total):
        seen.append(done)
        if done == 2:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        rolled_out(store, asked, progress=interrupt)
    (file,) = journals(asked.key)
    written = [generation for _, generation in _read(file.read_bytes())]
    assert len(written) == 6
    steps = frame(store, rolled_out(store, asked).manifest, "steps")
    assert len(steps) == 9
    # The time at which a call was sampled is the journal's for the first six, so they were not sampled again.
    assert set(steps["started_at"]) >= {generation.started_at for generation in written}
    stored_ids = {tuple(ids) for ids in steps["response_ids"].to_list()}
    assert {tuple(generation.response_ids.tolist()) for generation in written} <= stored_ids


def test_a_torn_end_is_not_read(shelf):
    store, tasks, stored = shelf
    asked = request(tasks, stored, CONFIG | {"agent_config": {"a": 2}}, {"shard_tasks": 3})
    rolled_out(store, asked)
    (file,) = journals(asked.key)
    content = file.read_bytes()
    whole = list(_read(content))
    assert len(whole) == 9
    assert all(np.isfinite(generation.logprobs).all() for _, generation in whole)
    torn = content[:-1]
    assert len(list(_read(torn))) == 8
    damaged = content[:-1] + bytes([content[-1] ^ 1])
    assert len(list(_read(damaged))) == 8


def test_an_answer_that_is_a_fault_is_not_written_down(shelf):
    store, tasks, stored = shelf
    asked = request(tasks, stored, {"engine": {"type": "scripted", "replies": [[]]}})
    with pytest.raises(StageFailed, match="0 logprobs"):
        rolled_out(store, asked)
    assert all(list(_read(file.read_bytes())) == [] for file in journals(asked.key))
