"""The advantages stage on stored rewards: numbers worked out by hand, what is dropped and why, what is refused."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from schemas.errors import ConfigError, InputError, NotFoundError
from stages.advantages.stage import STAGE, AdvantagesConfig, AdvantagesExecution
from stages.artifacts.store import Store
from tests.builders import episode_rows, given, reward_rows, step_rows
from tests.stages.advantages.helpers import Rewards, column, estimate, request, scored


def test_grpo_by_hand(store: Store) -> None:
    manifest, frame = estimate(store, scored(store, {"a": [1, 0, 0, 1], "b": [2, 4, 9]}))
    root = (1 / 3) ** 0.5  # four squares of 0.5, over three
    assert column(frame, "advantage") == pytest.approx([x / (root + 1e-6) for x in (0.5, -0.5, -0.5, 0.5)], rel=1e-14)
    assert column(frame, "baseline") == [0.5] * 4
    root = 13**0.5  # mean 5: (9 + 1 + 16) / 2
    assert column(frame, "advantage", "b") == pytest.approx([x / (root + 1e-6) for x in (-3, -1, 4)], rel=1e-14)
    assert column(frame, "group_std", "b") == pytest.approx([root] * 3, rel=1e-15)
    assert set(frame["kept"]) == {True}
    assert frame["drop_reason"].null_count() == 7
    assert frame["token_advantages"].null_count() == 7
    assert manifest.summary == {
        "estimator": "grpo",
        "objective": "policy_gradient",
        "n": 7,
        "n_kept": 7,
        "dropped": {},
        "n_groups": 2,
        "n_groups_kept": 2,
        "n_groups_of_one": 0,
        "n_groups_zero_variance": 0,
        "n_groups_without_reward": 0,
    }


def test_population_and_no_std_by_config(store: Store) -> None:
    inputs = scored(store, {"a": [2, 4, 9]})
    _, frame = estimate(store, inputs, params={"std": "population"})
    root = (26 / 3) ** 0.5
    assert column(frame, "advantage") == pytest.approx([x / (root + 1e-6) for x in (-3, -1, 4)], rel=1e-14)
    assert column(frame, "group_std") == pytest.approx([13**0.5] * 3)
    _, frame = estimate(store, inputs, params={"std": "none"})
    assert column(frame, "advantage") == [-3, -1, 4]


def test_rloo_by_hand(store: Store) -> None:
    _, frame = estimate(store, scored(store, {"a": [2, 4, 9]}), estimator="rloo")
    assert column(frame, "advantage") == pytest.approx([2 - 6.5, 4 - 5.5, 9 - 3], rel=1e-14)
    assert column(frame, "baseline") == pytest.approx([6.5, 5.5, 3], rel=1e-14)


def test_reinforce_by_hand(store: Store) -> None:
    inputs = scored(store, {"a": [2, 4], "b": [9]})
    _, frame = estimate(store, inputs, estimator="reinforce")
    assert column(frame, "advantage") == [-3, -1]
    assert column(frame, "advantage", "b") == [4]
    assert set(frame["baseline"]) == {5}
    assert set(frame["kept"]) == {True}
    _, frame = estimate(store, inputs, estimator="reinforce", params={"baseline": "none"})
    assert column(frame, "advantage") == [2, 4]
    assert frame["baseline"].null_count() == 3


def test_rejection_takes_the_best_of_each_group(store: Store) -> None:
    manifest, frame = estimate(store, scored(store, {"a": [0.1, 0.9, 0.3], "b": [5, 1, 2]}), estimator="rejection")
    assert column(frame, "advantage") == [0, 1, 0]
    assert column(frame, "advantage", "b") == [1, 0, 0]
    assert column(frame, "kept") == [False, True, False]
    assert column(frame, "drop_reason") == ["not_chosen", None, "not_chosen"]
    assert manifest.summary["objective"] == "cross_entropy"
    assert manifest.summary["dropped"] == {"not_chosen": 4}


def test_rejection_takes_all_that_reach_the_threshold(store: Store) -> None:
    inputs = scored(store, {"a": [0.1, 0.9, 0.5], "b": [0.2, 0.2, 0.2], "c": [1]})
    _, frame = estimate(store, inputs, estimator="rejection", params={"choose": "all", "threshold": 0.5})
    assert [column(frame, "kept", task) for task in "abc"] == [[False, True, True], [False] * 3, [True]]
    _, frame = estimate(store, inputs, estimator="rejection", params={"threshold": 0.5})
    assert [column(frame, "kept", task) for task in "abc"] == [[False, True, False], [False] * 3, [True]]


def test_a_tie_for_the_best_is_broken_the_same_way_whatever_the_order(store: Store) -> None:
    rewards = {f"task{index}": [1, 1, 0, 1] for index in range(20)}
    _, frame = estimate(store, scored(store, rewards), estimator="rejection")
    assert frame["kept"].sum() == 20
    chosen = frame.filter("kept")["episode_id"].to_list()
    assert len({episode[-1] for episode in chosen}) > 1
    _, other = estimate(store, scored(store, rewards, shuffle=1), estimator="rejection")
    assert other.filter("kept")["episode_id"].to_list() == chosen


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "rejection"])
def test_flat_groups_are_exactly_zero_counted_and_dropped(store: Store, estimator: str) -> None:
    rewards: Rewards = {"a": [0.35] * 7, "b": [3], "c": [0.1 + 0.2] * 3, "d": [1, 0]}
    manifest, frame = estimate(store, scored(store, rewards), estimator=estimator)
    for task in "abc":
        assert column(frame, "advantage", task) == [0.0] * len(rewards[task])
        assert set(column(frame, "kept", task)) == {False}
    assert set(column(frame, "drop_reason")) == {"zero_variance"}
    assert column(frame, "group_mean") == [0.35] * 7
    assert column(frame, "group_std") == [0.0] * 7
    assert column(frame, "drop_reason", "b") == ["group_of_one"]
    assert column(frame, "group_std", "b") == [None]
    assert manifest.summary["n_groups_of_one"] == 1
    assert manifest.summary["n_groups_zero_variance"] == 2
    _, frame = estimate(store, scored(store, rewards), estimator=estimator, drop_flat_groups=False)
    assert column(frame, "advantage") == [0.0] * 7
    assert "zero_variance" not in set(frame["drop_reason"])


def test_a_small_difference_is_not_shrunk_by_a_floor(store: Store) -> None:
    _, frame = estimate(store, scored(store, {"a": [1, 1.00001]}))
    root = 0.5e-5 * 2**0.5
    assert column(frame, "advantage") == pytest.approx([-0.5e-5 / (root + 1e-6), 0.5e-5 / (root + 1e-6)], rel=1e-9)
    assert column(frame, "advantage")[1] == pytest.approx(0.6195, abs=1e-4)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce", "rejection"])
def test_a_reward_that_is_not_known_takes_no_part(store: Store, estimator: str) -> None:
    with_gaps = scored(store, {"a": [None, 1, 3, None, 8], "b": [None, None], "c": [None, 2]})
    manifest, frame = estimate(store, with_gaps, estimator=estimator)
    _, without = estimate(store, scored(store, {"a": [1, 3, 8], "c": [2]}), estimator=estimator)
    assert [value for value in column(frame, "advantage") if value is not None] == column(without, "advantage")
    unknown = frame.filter(pl.col("drop_reason") == "no_reward")
    assert unknown["episode_id"].to_list() == ["a-0", "a-3", "b-0", "b-1", "c-0"]
    assert unknown["advantage"].null_count() == 5
    assert not unknown["kept"].any()
    assert column(frame, "group_size") == [3] * 5
    assert column(frame, "group_mean") == [4] * 5
    assert column(frame, "group_size", "b") == [0, 0]
    assert column(frame, "group_mean", "b") == [None, None]
    assert column(frame, "group_size", "c") == [1, 1]
    assert manifest.summary["dropped"]["no_reward"] == 5
    assert manifest.summary["n_groups_without_reward"] == 1


def test_rewards_that_are_all_unknown_leave_nothing_to_train_on(store: Store) -> None:
    manifest, frame = estimate(store, scored(store, {"a": [None, None]}), estimator="reinforce")
    assert (manifest.summary["n"], manifest.summary["n_kept"]) == (2, 0)
    assert frame["advantage"].null_count() == 2


@pytest.mark.parametrize("status", ["truncated", "max_turns", "timeout"])
def test_episodes_cut_short_are_left_out_by_config_and_still_count(store: Store, status: str) -> None:
    episodes = episode_rows(["a"], 3)
    episodes[0]["status"] = status
    ids = [row["episode_id"] for row in episodes]
    rollouts = given(store, "rollouts", {"episodes": episodes, "steps": step_rows(ids)})
    rewards = given(store, "rewards", {"rewards": reward_rows(ids, [2, 4, 9])}, inputs={"rollouts": [rollouts]})
    _, kept = estimate(store, (rollouts, rewards))
    _, dropped = estimate(store, (rollouts, rewards), truncated="drop")
    assert column(kept, "kept") == [True] * 3
    assert column(dropped, "kept") == [False, True, True]
    assert column(dropped, "drop_reason") == ["truncated", None, None]
    assert column(dropped, "advantage") == column(kept, "advantage")


def test_no_characters_in_ids_merge_groups(store: Store) -> None:
    pairs = [("a:b", "c"), ("a", "b:c"), ('a","b', "c"), ("a", 'b","c'), ("a/b", "c"), ("a", "b/c"), ("a ", "c")]
    episodes, rewards = [], []
    for number, (task, trajectory) in enumerate(pairs):
        for row in episode_rows([task], 2):
            row["episode_id"] = f"{number}-{row['rollout_index']}"
            episodes.append(row)
            rewards += [
                reward | {"trajectory": trajectory}
                for reward in reward_rows([row["episode_id"]], [number + row["rollout_index"]])
            ]
    rollouts = given(store, "rollouts", {"episodes": episodes, "steps": []})
    scores = given(store, "rewards", {"rewards": rewards}, inputs={"rollouts": [rollouts]})
    manifest, frame = estimate(store, (rollouts, scores))
    assert manifest.summary["n_groups"] == len(pairs)
    assert set(frame["group_size"]) == {2}
    assert not frame["group_id"].str.contains("a").all()


def test_roles_of_one_episode_are_groups_of_their_own(store: Store) -> None:
    episodes = episode_rows(["a"], 2)
    rewards = [
        row | {"trajectory": role, "reward": value}
        for role, values in (("solver", [1.0, 0.0]), ("judge", [10.0, 30.0]))
        for row, value in zip(reward_rows(["a-0", "a-1"], values), values, strict=True)
    ]
    rollouts = given(store, "rollouts", {"episodes": episodes, "steps": []})
    scores = given(store, "rewards", {"rewards": rewards}, inputs={"rollouts": [rollouts]})
    _, frame = estimate(store, (rollouts, scores), estimator="rloo")
    assert frame.filter(trajectory="solver")["advantage"].to_list() == [1, -1]
    assert frame.filter(trajectory="judge")["advantage"].to_list() == [-20, 20]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"estimator": "gpro"}, NotFoundError, "unknown estimator 'gpro': did you mean 'grpo'"),
        ({"params": {"epsilon": 1}}, ConfigError, "unknown key 'epsilon': did you mean 'eps'"),
        ({"estimator": "rloo", "params": {"eps": 1}}, ConfigError, "unknown key 'eps'"),
        ({"params": {"eps": -1}}, ConfigError, "eps"),
        ({"estimator": "rejection", "params": {"choose": "all"}}, ConfigError, "needs a threshold"),
        ({"estimator": 3}, ValueError, "valid string"),
        ({"truncated": "mask"}, ValueError, "keep"),
    ],
)
def test_wrong_settings_are_refused(config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AdvantagesConfig(**config)


def test_rewards_of_other_rollouts_are_refused(store: Store) -> None:
    _, rewards = scored(store, {"a": [1, 0]})
    others, _ = scored(store, {"b": [1, 0]})
    with pytest.raises(InputError, match="score other rollouts") as caught:
        STAGE.check(
            store.inputs({"rollouts": [others], "rewards": [rewards]}), AdvantagesConfig(), AdvantagesExecution()
        )
    assert caught.value.exit_code == 2


def test_the_key_changes_with_each_setting_and_not_with_a_default_spelt_out(store: Store) -> None:
    inputs = scored(store, {"a": [1, 0]})
    keys = [
        request(inputs, **config).key
        for config in (
            {},
            {"estimator": "rloo"},
            {"params": {"eps": 1e-5}},
            {"drop_flat_groups": False},
            {"truncated": "drop"},
        )
    ]
    assert len(set(keys)) == 5
    assert request(inputs, estimator="grpo", params={"eps": 1e-6, "std": "sample"}).key == keys[0]


_HASH = """
import hashlib, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from stages.advantages.stage import AdvantagesConfig, _advantages
from stages.artifacts.parquet import table_from_frame, write_parquet
from stages.advantages.estimators import ESTIMATORS
import polars as pl
n = 60_000
rng = np.random.default_rng(0)
ids = pl.Series([f"e{i:06d}" for i in rng.permutation(n)])
number = ids.str.slice(1).cast(pl.Int64)
tables = {
    "episodes": pl.DataFrame({"episode_id": ids, "task_id": (number % 37).cast(pl.String)}),
    "rewards": pl.DataFrame({"episode_id": ids, "reward": (number * 0.7).sin()}),
}
class Given:
    def manifest(self, name):
        return SimpleNamespace(inputs={})
    def scan(self, name, table):
        return tables[table].lazy().with_columns(status=pl.lit("completed"), trajectory=pl.lit("x"))
digest = hashlib.sha256()
for name in ESTIMATORS:
    config = AdvantagesConfig(estimator=name)
    rows = _advantages(Given(), ESTIMATORS[name](), config)
    file = Path(sys.argv[1], name)
    write_parquet(table_from_frame("advantages", rows), "advantages", file)
    digest.update(file.read_bytes())
print(digest.hexdigest())
"""


def test_identical_input_gives_identical_bytes_on_any_number_of_threads(tmp_path: Path) -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", _HASH, str(tmp_path)],
            env=os.environ | {"POLARS_MAX_THREADS": str(threads)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in (1, 7)
    }
    assert len(digests) == 1


def test_importing_the_stage_loads_nothing_heavy() -> None:
    code = "import stages.advantages.stage, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"polars", "numpy", "torch", "prefect"} & set(loaded)


def _roles(store: Store, rewards: dict[tuple[str, str], list[float]]) -> tuple[Any, Any]:
    """Rollouts and rewards of episodes with several roles: by (task, role), one reward an attempt."""
    n = len(next(iter(rewards.values())))
    episodes = episode_rows(sorted({task for task, _ in rewards}), n)
    steps, graded = [], []
    for (task, role), values in rewards.items():
        ids = [f"{task}-{index}" for index in range(n)]
        steps += [row | {"trajectory": role} for row in step_rows(ids)]
        graded += [row | {"trajectory": role} for row in reward_rows(ids, values)]
    rollouts = given(store, "rollouts", {"episodes": episodes, "steps": steps})
    return rollouts, given(store, "rewards", {"rewards": graded}, inputs={"rollouts": [rollouts]})


def test_each_role_is_compared_with_itself_alone(store: Store) -> None:
    inputs = _roles(store, {("a", "solver-0"): [0, 1], ("a", "judge"): [10, 30], ("b", "judge"): [5, 5]})
    _, frame = estimate(store, inputs, params={"std": "none"})
    by_role = dict(iter(frame.sort("episode_id").group_by("trajectory", "group_mean")))
    assert {key: rows["advantage"].to_list() for key, rows in by_role.items()} == {
        ("solver-0", 0.5): [-0.5, 0.5],
        ("judge", 20): [-10, 10],
        ("judge", 5): [0, 0],
    }
    assert frame["group_id"].n_unique() == 3


def test_only_the_named_roles_are_trained_on_and_the_others_say_so(store: Store) -> None:
    rewards = {("a", role): [0.0, 1.0] for role in ("solver-0", "solver-1", "solver.0", "judge", "the judge")}
    inputs = _roles(store, rewards)
    manifest, frame = estimate(store, inputs, trajectories=["solver-*", "judge"])
    assert set(frame.filter("kept")["trajectory"]) == {"solver-0", "solver-1", "judge"}
    assert set(frame.filter(~pl.col("kept"))["drop_reason"]) == {"not_trained"}
    assert manifest.summary["dropped"] == {"not_trained": 4}
