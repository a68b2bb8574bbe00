"""Where an artifact comes from, and how two differ."""

from stages.artifacts.code import code_version
from stages.artifacts.diff import ABSENT, diff, rows_by_table
from stages.artifacts.layout import manifest_path
from stages.artifacts.lineage import lineage
from stages.artifacts.store import Store
from tests.builders import (
    given,
    metric_rows,
    numbers_request,
    stored_policy,
    stored_rollouts,
    stored_run,
    stored_tasks,
)


def test_lineage_leads_from_a_policy_back_to_the_first(any_store: Store) -> None:
    stored_run(any_store, "demo", iterations=2)
    first, second = any_store.iterations("demo")
    node = any_store.lineage("demo:policy")
    assert node.ref == second.artifacts["policy"]
    assert sorted(node.inputs) == ["advantages", "policy", "rollouts"]
    (before,) = node.inputs["policy"]
    assert before.ref == first.artifacts["policy"]
    (rollouts,) = node.inputs["rollouts"]
    assert rollouts.inputs["policy"][0] is before, "one artifact is one node"
    assert before.inputs["policy"][0].ref == first.artifacts["policy_in"]
    assert before.inputs["policy"][0].inputs == {}


def test_a_walk_shows_each_artifact_once_under_the_nearest_that_used_it(store: Store) -> None:
    stored_run(store, "demo", iterations=2)
    walk = [
        (depth, name, node.ref.kind) for depth, name, node, again in store.lineage("demo:policy").walk() if not again
    ]
    assert walk == [
        (0, None, "policy"),
        (1, "advantages", "advantages"),
        (2, "rewards", "rewards"),
        (1, "policy", "policy"),
        (2, "advantages", "advantages"),
        (3, "rewards", "rewards"),
        (2, "policy", "policy"),
        (2, "rollouts", "rollouts"),
        (1, "rollouts", "rollouts"),
        (2, "tasks", "tasks"),
    ]
    repeated = [node.ref.kind for _, _, node, again in store.lineage("demo:policy").walk() if again]
    assert set(repeated) == {"policy", "rollouts", "tasks"}


def test_a_long_chain_of_iterations_is_read_in_linear_time(memory_store: Store) -> None:
    policy = stored_policy(memory_store, "0")
    for number in range(1, 200):
        made_from = {"policy": [policy]}
        policy = given(memory_store, "policy", {"metrics": metric_rows("policy", {"n": number})}, inputs=made_from)
    walk = list(lineage(memory_store, policy).walk())
    assert [depth for depth, *_ in walk] == list(range(200))


def test_an_input_that_is_gone_is_shown_by_its_reference(store: Store) -> None:
    tasks = stored_tasks(store)
    rollouts = stored_rollouts(store, tasks, stored_policy(store))
    store.storage.delete(manifest_path("tasks", tasks.key))
    (node,) = store.lineage(rollouts).inputs["tasks"]
    assert (node.ref, node.manifest) == (tasks.ref, None)


def test_a_difference_names_only_what_differs(store: Store) -> None:
    tasks, policy = stored_tasks(store), stored_policy(store)
    a = stored_rollouts(store, tasks, policy)
    b = stored_rollouts(store, tasks, stored_policy(store, "other"), samples=1)
    found = diff(store, a, str(b.ref))
    assert (found.a, found.b, found.same_content) == (a.ref, b.ref, False)
    assert found.rows == {"episodes": (6, 3), "steps": (6, 3)}
    assert found.summary == {"n_rows": (12, 6)}
    assert list(found.inputs) == ["policy"]
    assert str(policy.ref) in found.inputs["policy"][0][0]
    assert list(found.config) == ["content"]
    assert found.code == {}


def test_the_same_content_made_twice_is_recognised(store: Store) -> None:
    from stages.artifacts.commit import materialise

    a = materialise(store, numbers_request(n_shards=1)).manifest
    b = materialise(store, numbers_request(n_shards=1, draw=1)).manifest
    assert diff(store, a, a).same_content
    found = diff(store, a, b)
    assert not found.same_content
    assert found.config == {"draw": (0, 1)}
    older = b.model_copy(
        update={"code": code_version().model_copy(update={"version": "0"}), "libraries": {}, "config": {"new": 1}}
    )
    found = diff(store, a, older)
    assert found.code["rollmill version"] == (code_version().version, "0")
    assert found.code["pyarrow"] == (a.libraries["pyarrow"], ABSENT)
    assert found.config["new"] == (ABSENT, 1)


def test_rows_are_counted_by_table_also_where_there_are_none(store: Store) -> None:
    assert rows_by_table(stored_policy(store)) == {"metrics": 1, "probe": 1}
    assert rows_by_table(given(store, "rewards", {"signals": []})) == {"signals": 0}
