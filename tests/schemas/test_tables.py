"""The declared tables keep the design's rules; the columns themselves are spelled out in the schema."""

import pyarrow as pa
import pytest

from schemas.tables import TABLES, TableSpec

tables = pytest.mark.parametrize("spec", TABLES.values(), ids=list(TABLES))

DESIGN_COLUMNS = {
    "tasks": "task_id instruction answer metadata benchmark split grader agent",
    "episodes": "episode_id task_id rollout_index agent status error_kind error artifacts seed started_at duration_s",
    "steps": "episode_id trajectory step_index messages response reasoning tool_calls finish_reason prefix_length "
    "prompt_ids response_ids logprobs policy_id logprob_mode temperature top_p top_k seed started_at latency_s worker",
    "rewards": "episode_id trajectory status reward is_correct verdict explanation grader grader_version duration_s",
    "signals": "episode_id trajectory name value",
    "step_rewards": "episode_id trajectory step_index reward",
    "advantages": "episode_id trajectory group_id advantage token_advantages baseline group_mean group_std group_size "
    "kept drop_reason",
    "metrics": "run iteration stage name value recorded_at",
}


@pytest.mark.parametrize("name", DESIGN_COLUMNS)
def test_a_table_has_every_column_of_the_design(name: str) -> None:
    assert set(DESIGN_COLUMNS[name].split()) <= set(TABLES[name].schema.names)


@tables
def test_ids_are_present_and_never_null(spec: TableSpec) -> None:
    assert all(not spec.schema.field(name).nullable for name in spec.id_columns)


@tables
def test_lists_are_large_with_non_null_items_named_element(spec: TableSpec) -> None:
    for field in spec.schema:
        assert not pa.types.is_list(field.type)
        if pa.types.is_large_list(field.type):
            assert field.type.value_field.name == "element"
            assert not field.type.value_field.nullable
            assert pa.types.is_primitive(field.type.value_type), "no list of structs"


@tables
def test_no_column_is_dictionary_encoded_and_times_are_utc_microseconds(spec: TableSpec) -> None:
    for field in spec.schema:
        assert not pa.types.is_dictionary(field.type)
        if pa.types.is_timestamp(field.type):
            assert field.type == pa.timestamp("us", tz="UTC")


@tables
def test_scalars_come_first_and_heavy_columns_last(spec: TableSpec) -> None:
    heavy = [pa.types.is_large_list(field.type) or pa.types.is_large_string(field.type) for field in spec.schema]
    assert heavy == sorted(heavy)


@tables
def test_every_column_is_explained_and_says_what_null_means(spec: TableSpec) -> None:
    for field in spec.schema:
        doc = (field.metadata or {})[b"doc"].decode()
        assert len(doc) > 5
        if field.nullable:
            assert "null" in doc, f"{spec.name}.{field.name}"


def test_the_name_of_a_table_is_its_key() -> None:
    assert {spec.name for spec in TABLES.values()} == set(TABLES)
    assert all(spec.version >= 1 for spec in TABLES.values())
