"""Over however many processes an update is done: the same policy or adapter comes out.

What one process makes is made first, then two processes answer one question after the other: to start them takes longer
than all that they are asked here.
"""

from pathlib import Path
from typing import Any

import pytest

from schemas.artifacts import Manifest
from schemas.errors import StageFailed
from stages.artifacts.store import Store
from tests.stages.policy.stored import EXECUTION, updated
from tests.stages.policy.ways import Bench, Made, adapted_twice, assert_same, assert_same_adapter, made_in, shifted_in

pytestmark = pytest.mark.slow

ONE: dict[str, Any] = {"processes": 1, "zero_stage": 0}
ALONE: dict[str, Any] = {"alone": True, "epochs": 1, "minibatches": 3}
"""One sequence in each optimizer step."""


def two(zero_stage: int) -> dict[str, Any]:
    return {"processes": 2, "zero_stage": zero_stage}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("processes"))


@pytest.fixture(scope="module")
def plain(bench: Bench) -> tuple[Store, Manifest]:
    """Without partitions, in one process."""
    return bench.twice("plain", ONE)


@pytest.fixture(scope="module")
def plain_alone(bench: Bench) -> tuple[Store, Manifest]:
    return bench.twice("alone", ONE, **ALONE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_in(tmp_path_factory.mktemp("adapters") / "store")


@pytest.fixture(scope="module")
def plain_adapter(made: Made) -> Manifest:
    return adapted_twice(made, EXECUTION)[1]


@pytest.fixture(scope="module", autouse=True)
def _one_process_comes_first(plain: object, plain_alone: object, plain_adapter: object) -> None:
    """So that its trainer is started once."""


def adapter(made: Made, number: int, *ways: dict[str, Any]) -> Manifest:
    """The second adapter; ``number`` sets it apart, as execution is in no key."""
    executions = [EXECUTION.model_copy(update=way) for way in ways]
    return adapted_twice(made, *executions, logprob_tolerance=0.1 + number)[1]


def test_the_number_of_processes_may_grow_between_updates(bench: Bench, plain: tuple[Store, Manifest]) -> None:
    assert_same(plain, bench.twice("one-two", ONE, two(2)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_processes_make_the_same_policy(bench: Bench, plain: tuple[Store, Manifest], stage: int) -> None:
    assert_same(plain, bench.twice(f"two-{stage}", two(stage)))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_processes_make_the_same_adapter(made: Made, plain_adapter: Manifest, stage: int) -> None:
    assert_same_adapter(made[0], plain_adapter, adapter(made, stage, two(stage)))


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_process_without_work_takes_part(bench: Bench, plain_alone: tuple[Store, Manifest], processes: int) -> None:
    way = {"processes": processes, "zero_stage": 3}
    assert_same(plain_alone, bench.twice(f"alone-{processes}", way, **ALONE))


def test_the_gate_sees_the_tokens_of_all_processes(tmp_path: Path) -> None:
    way = EXECUTION.model_copy(update=two(0) | {"max_tokens_per_micro_batch": 30})
    with pytest.raises(StageFailed, match=r"logprob_diff_max is 0\.2"):
        updated(*shifted_in(tmp_path / "store"), execution=way, gate={"max_difference": 0.1}, minibatches=3)


@pytest.mark.full
def test_the_number_of_processes_may_shrink_between_updates(
    bench: Bench, plain: tuple[Store, Manifest], made: Made, plain_adapter: Manifest
) -> None:
    """Between the updates of a policy, and of an adapter from each way of partitioning."""
    assert_same(plain, bench.twice("two-one", two(2), ONE))
    for stage in (0, 2, 3):
        assert_same_adapter(made[0], plain_adapter, adapter(made, 10 + stage, two(stage), ONE))


@pytest.mark.full
def test_the_compiled_operation_makes_the_same_policy(
    bench: Bench, plain: tuple[Store, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compiled in a folder of its own: in the user's, the lock of a compilation that was killed is waited for for ever.
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert_same(plain, bench.twice("shm", {"processes": 2, "cpu_collectives": "shm"}))
