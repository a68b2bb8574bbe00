"""Records: what is stored is frozen and exact; what agents and graders see comes from rows."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from schemas.artifacts import FileEntry, Manifest, Plan, Receipt, Ref, ShardPlan
from schemas.canonical import canonical_json
from schemas.records import Episode, Step, Task, Trajectory, instruction_from
from stages.artifacts.store import Store
from tests.builders import stored_policy, task_rows


def test_a_manifest_survives_its_json_exactly(store: Store) -> None:
    manifest = stored_policy(store)
    again = Manifest.model_validate_json(canonical_json(manifest))
    assert again == manifest
    assert canonical_json(again) == canonical_json(manifest)


@pytest.mark.parametrize("model", [Manifest, Plan, Receipt, Ref, FileEntry, ShardPlan])
def test_a_stored_object_refuses_unknown_fields_and_changes(model: Any) -> None:
    assert model.model_config["extra"] == "forbid"
    assert model.model_config["frozen"]


def test_a_reference_is_short_for_people_and_cannot_change() -> None:
    ref = Ref(kind="tasks", key="a" * 64, digest="b" * 64)
    assert str(ref) == "tasks/aaaaaaaaaaaa"
    with pytest.raises(ValidationError):
        ref.key = "c"


def test_a_plan_keeps_any_plain_spec() -> None:
    spec = {"first": 0, "ids": ["a", None, 1.5], "nested": {"x": [True]}}
    plan = Plan(
        kind="tasks",
        key="k",
        stage="s",
        shards=[ShardPlan(id="00000", spec=spec)],
        created_at=datetime(2026, 9, 1, 12, 0, 0, 123456, tzinfo=UTC),
        nonce="n",
    )
    assert Plan.model_validate_json(canonical_json(plan)) == plan


def test_a_task_comes_from_its_row() -> None:
    (row,) = task_rows(1, grader="exact")
    task = Task.from_row(row)
    assert (task.id, task.answer, task.grader, task.agent) == ("t000", "0", "exact", None)
    assert task.metadata == {"index": 0}
    assert Task.from_row(row | {"metadata": None}).metadata == {}
    with pytest.raises(KeyError):
        Task.from_row({name: value for name, value in row.items() if name != "answer"})


@pytest.mark.parametrize(
    ("column", "instruction"),
    [
        ("What is 1 + 1?", "What is 1 + 1?"),
        ('[{"type":"text","text":"hi"}]', [{"type": "text", "text": "hi"}]),
        ('[{"a": 1}]', '[{"a": 1}]'),
        ('[{"type": broken', '[{"type": broken'),
        ('["type"]', '["type"]'),
        ("[1, 2]", "[1, 2]"),
        ("", ""),
    ],
)
def test_an_instruction_is_text_unless_it_is_a_list_of_content_parts(column: str, instruction: Any) -> None:
    assert instruction_from(column) == instruction
    if not isinstance(instruction, str):
        assert instruction_from(json.dumps(instruction)) == instruction


def test_the_response_is_that_of_the_last_step_or_unknown() -> None:
    assert Episode().response is None
    assert Trajectory().response is None
    episode = Episode(
        trajectories=[Trajectory(steps=[Step(response="a")]), Trajectory(steps=[Step(), Step(response="b")])]
    )
    assert episode.response == "b"
    assert Step().logprobs is None, "what is not known is not 0"
