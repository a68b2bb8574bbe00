"""Tiny policies and engines that hold them, made once a session."""

from typing import Any

import pytest

from stages.rollouts.engines.transformers import TransformersEngine
from tests.stages.rollouts.policies import make_policy


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def other_policy(tmp_path_factory):
    """Same architecture, other weights."""
    return make_policy(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def make_engine():
    """Returns a transformers engine with the given settings; all are closed at the end."""
    made: list[TransformersEngine] = []

    def make(**settings: Any) -> TransformersEngine:
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "device": "cpu",
            "threads": 1,
            "max_batch": 16,
            "probe_tolerance": 1e-4,
        }
        made.append(TransformersEngine(**(defaults | settings)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def engine(make_engine, policy):
    """A transformers engine that holds ``policy``; tests that load another one make their own."""
    engine = make_engine()
    engine.load(policy)
    return engine
