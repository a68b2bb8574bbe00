"""The built-in graders on single answers: what is right, and why something is not."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from schemas.records import Episode, Step, Task, Trajectory
from stages.rewards.graders import GRADERS
from stages.rewards.graders.base import Grader
from stages.rewards.graders.exact import Exact
from stages.rewards.graders.numeric import Numeric


def judged(grader: Grader, response: str | None, reference: str | None, **how: Any) -> Any:
    steps = [] if response is None else [Step(response=response, finish_reason=how.get("finish_reason", "stop"))]
    episode = Episode(status=how.get("status", "completed"), trajectories=[Trajectory(steps=steps)])
    return grader(Task("t", "?", answer=reference), episode, episode.trajectories[0])


@pytest.mark.parametrize(
    ("name", "response", "reference"),
    [
        ("exact", " Paris\n", "Paris"),
        ("exact", "a  b", "a b"),
        ("numeric", "so she makes $18 every day.", "18"),
        ("numeric", "= 1,000", "1000.0"),
        ("numeric", "0.3333333", "1/3"),
        ("numeric", "it is 72", "48/2=<<48/2=24>>24\n48+24=72\n#### 72"),
        ("math", r"thus \boxed{\frac{1}{2}}", "0.5"),
        ("math", "The answer is $x^2+2x+1$.", "(x+1)^2"),
        ("math", r"\boxed{(1,2]}", "(1,2]"),
        ("math", r"\boxed{\{3, 1, 2\}}", r"\{1,2,3\}"),
        ("math", "so it is 12", "$12$"),
    ],
)
def test_right_answers_get_one(name: str, response: str, reference: str) -> None:
    output = judged(GRADERS[name](), response, reference)
    assert (output.reward, output.is_correct, output.verdict) == (1.0, True, "correct")


@pytest.mark.parametrize(
    ("name", "params", "response", "reference", "verdict"),
    [
        ("exact", {}, "paris", "Paris", "wrong_answer"),
        ("exact", {}, "  ", "Paris", "no_answer"),
        ("numeric", {}, "18.1", "18", "wrong_answer"),
        ("numeric", {}, "no idea", "18", "no_answer"),
        ("numeric", {"extract": "marker"}, "it is 18", "18", "bad_format"),
        ("numeric", {"extract": "marker"}, "", "18", "no_answer"),
        ("numeric", {"extract": "boxed"}, r"\boxed{3 or 4}", "4", "bad_format"),
        ("numeric", {}, "1e999999", "18", "wrong_answer"),
        ("math", {}, r"\boxed{\frac{1}{3}}", "0.5", "wrong_answer"),
        ("math", {}, "", "0.5", "no_answer"),
        ("math", {"extract": "boxed"}, "it is 0.5", "0.5", "bad_format"),
    ],
)
def test_other_answers_get_zero_and_say_why(
    name: str, params: dict[str, Any], response: str, reference: str, verdict: str
) -> None:
    output = judged(GRADERS[name](**params), response, reference)
    assert (output.reward, output.is_correct, output.verdict) == (0.0, False, verdict)


@pytest.mark.parametrize(
    "how", [{"finish_reason": "length"}, {"status": "truncated"}, {"status": "timeout"}, {"status": "max_turns"}]
)
def test_an_answer_that_was_cut_short_is_marked_truncated_unless_it_is_right(how: dict[str, str]) -> None:
    numeric = GRADERS["numeric"]()
    assert judged(numeric, "we add 5 and", "7", **how).verdict == "truncated"
    assert judged(numeric, "we add and", "7", **how).verdict == "truncated"
    assert judged(numeric, "it is 7, because", "7", **how).verdict == "correct"


def test_tolerances_are_those_of_the_params() -> None:
    assert judged(Numeric(abs_tol=0.1), "18.1", "18").reward == 1.0
    assert judged(Numeric(rel_tol=0.01), "99", "100").reward == 1.0
    assert judged(Numeric(abs_tol=0), "0.1", "1/10").reward == 1.0
    assert judged(Exact(ignore_case=True), "paris", "Paris").reward == 1.0
    assert judged(Exact(collapse_spaces=False), "a  b", "a b").reward == 0.0


@pytest.mark.parametrize(
    ("name", "reference"), [("exact", None), ("numeric", None), ("numeric", "twelve"), ("math", None)]
)
def test_a_reference_that_cannot_be_read_is_an_exception_and_no_wrong_answer(name: str, reference: str | None) -> None:
    with pytest.raises(ValueError, match="reference answer"):
        judged(GRADERS[name](), "12", reference)


@pytest.mark.parametrize(
    "params", [{"extract": "regex"}, {"pattern": "x"}, {"extract": "regex", "pattern": "("}, {"marker": ""}]
)
def test_params_that_cannot_work_are_refused(params: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        GRADERS["exact"](**params)


@pytest.mark.shared_data
def test_each_gsm8k_solution_is_right_by_numeric(shared_data: Path) -> None:
    lines = (shared_data / "gsm8k" / "test.jsonl").read_text("utf-8").split("\n")
    answers = [json.loads(line)["answer"] for line in lines if line]
    numeric = GRADERS["numeric"]()
    assert {judged(numeric, answer, answer).verdict for answer in answers} == {"correct"}
    wrong = [judged(numeric, other, answer).reward for answer, other in itertools.pairwise(answers)]
    assert sum(wrong) < 0.1 * len(wrong)


@pytest.mark.shared_data
def test_each_olympiad_answer_is_right_by_math(shared_data: Path) -> None:
    lines = (shared_data / "olympiadbench_en_maths" / "test.jsonl").read_text("utf-8").split("\n")
    answers = [json.loads(line)["final_answer"][0] for line in lines if line][::5]
    grader = GRADERS["math"]()
    for answer in answers:
        assert judged(grader, f"Hence \\boxed{{{answer.strip('$')}}}.", answer).verdict == "correct", answer
