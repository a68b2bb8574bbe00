"""Adapters in the transformers engine: they reproduce their probe, and a change of adapter leaves the base loaded."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import InputError, StageFailed
from stages.rollouts.engines.base import GenerationRequest, PolicyFiles, SamplingParams
from stages.rollouts.engines.transformers import TransformersEngine
from tests.stages.rollouts.policies import make_adapter, make_policy


@pytest.fixture
def base(tmp_path: Path) -> PolicyFiles:
    return make_policy(tmp_path / "base")


@pytest.fixture
def fresh() -> Iterator[TransformersEngine]:
    """An engine that holds no policy yet."""
    engine = TransformersEngine(dtype="float32", device="cpu", threads=1, max_batch=8, probe_tolerance=1e-4)
    yield engine
    engine.close()


def first_ids(engine: TransformersEngine) -> list[int]:
    prompt = np.arange(3, 12, dtype=np.int32)
    request = GenerationRequest(prompt, SamplingParams(temperature=0, max_tokens=8), seed=1)
    generation = asyncio.run(engine.generate(request))
    assert generation.policy_id == engine.policy_id
    return generation.response_ids.tolist()


def test_adapters_come_and_go_and_the_base_is_read_once(fresh, base, tmp_path):
    one, two = (make_adapter(base, tmp_path / str(seed), seed) for seed in (1, 2))
    fresh.load(base)
    plain = first_ids(fresh)
    (base.folder / "model.safetensors").unlink()  # it could not be read a second time
    found = []
    for adapter in (one, two, one):
        fresh.load(adapter)  # reproduces its probe, or raises
        found.append(first_ids(fresh))
    assert found[0] == found[2]
    assert plain not in found
    fresh.load(base)
    assert first_ids(fresh) == plain


def test_an_adapter_on_the_wrong_base_is_refused_with_by_how_much(fresh, base, tmp_path):
    other = make_policy(tmp_path / "other", seed=5)
    adapter = make_adapter(base, tmp_path / "adapter", seed=1)
    misled = PolicyFiles(adapter.policy_id, other.folder, adapter.probe, adapter.adapter)
    with pytest.raises(StageFailed, match=r"off by up to \d"):
        fresh.load(misled)
    fresh.load(adapter)
    first_ids(fresh)


def test_an_adapter_that_does_not_fit_or_is_of_another_kind_is_refused(fresh, base, tmp_path):
    adapter = make_adapter(base, tmp_path / "adapter", seed=1)
    small = make_policy(tmp_path / "small", num_hidden_layers=1)
    with pytest.raises(InputError, match="does not fit its base"):
        fresh.load(PolicyFiles("a", small.folder, adapter.probe, adapter.adapter))
    assert adapter.adapter is not None
    dora = Path(shutil.copytree(adapter.adapter, tmp_path / "dora"))
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(InputError, match="use_dora=True"):
        fresh.load(PolicyFiles("b", base.folder, adapter.probe, dora))
