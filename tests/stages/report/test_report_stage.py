"""The report on stored artifacts: numbers worked out by hand, a page that is safe to open, and what is refused."""

import subprocess
import sys
from html.parser import HTMLParser
from typing import Any

import pytest

from schemas.artifacts import Manifest
from schemas.errors import InputError
from stages.artifacts.commit import Request, materialise
from stages.artifacts.store import Store
from stages.report.stage import STAGE, ReportConfig, ReportExecution
from tests.builders import episode_rows, given, metric_rows, reward_rows, step_rows, task_rows

HOSTILE = "<script>alert('x')</script><img src=http://evil.example/p.png onerror=alert(1)>\"'&"


class Page(HTMLParser):
    """What a browser would see: tags, attributes, text."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, html: str):
        super().__init__()
        self.html, self.tags, self.attributes, self.open, self.text = html, [], [], [], ""  # type: ignore[var-annotated]
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def evaluation(
    store: Store, rewards: dict[str, list[float | None]], *, label: str = "", **columns: Any
) -> dict[str, list[Manifest]]:
    """Tasks, rollouts and rewards in which attempt ``i`` at a task got the task's ``i``-th reward."""
    tasks = given(store, "tasks", {"tasks": task_rows(5)})
    episodes = [row | columns for task, values in rewards.items() for row in episode_rows([task], len(values))]
    for row in episodes:
        row["episode_id"] = label + row["episode_id"]
    ids = [row["episode_id"] for row in episodes]
    rollouts = given(store, "rollouts", {"episodes": episodes, "steps": step_rows(ids)}, inputs={"tasks": [tasks]})
    rows = reward_rows(ids, [value for values in rewards.values() for value in values])
    scores = given(store, "rewards", {"rewards": rows}, inputs={"tasks": [tasks], "rollouts": [rollouts]})
    return {"tasks": [tasks], "rollouts": [rollouts], "rewards": [scores]}


def joined(*many: dict[str, list[Manifest]]) -> dict[str, list[Manifest]]:
    return {"tasks": many[0]["tasks"]} | {
        name: [manifest for one in many for manifest in one[name]] for name in ("rollouts", "rewards")
    }


def report(store: Store, inputs: dict[str, list[Manifest]], **config: Any) -> tuple[Manifest, Page]:
    manifest = materialise(store, Request(STAGE, ReportConfig(**config), ReportExecution(), inputs)).manifest
    return manifest, Page((store.folder(manifest, "page") / "report.html").read_text("utf-8"))


def metrics(store: Store, manifest: Manifest) -> dict[str, float | None]:
    return dict(store.inputs({"it": [manifest]}).scan("it", "metrics").select("name", "value").collect().iter_rows())


def test_headline_numbers_by_hand(store: Store) -> None:
    manifest, page = report(store, evaluation(store, {"t000": [1, 0, 0], "t001": [0, 0, None], "t002": [1, 1, 1]}))
    made = metrics(store, manifest)
    assert made == {
        "pass_rate": 0.5,
        "pass_rate_low": pytest.approx(0.21521, abs=1e-5),
        "pass_rate_high": pytest.approx(0.78479, abs=1e-5),
        "solved_rate": pytest.approx(2 / 3),
        "mean_reward": 0.5,
        "n_tasks": 3,
        "n_episodes": 9,
        "n_trajectories": 9,
        "n_scored": 8,
        "prompt_tokens": 36,
        "response_tokens": 27,
    }
    assert manifest.summary == {"iterations": 1} | made
    assert "50.0%" in page.text
    assert "95% interval 21.5% to 78.5%" in page.text
    assert "1 not graded" in page.text
    assert "the time limit of 5 s passed" in page.text


def test_scores_by_task(store: Store) -> None:
    inputs = evaluation(store, {"t000": [1, 0, 0], "t001": [0, 0, None], "t002": [None]}, response_tokens=7)
    manifest, page = report(store, inputs)
    rows = store.inputs({"it": [manifest]}).scan("it", "task_scores").collect().rows()
    assert rows == [
        ("t000", "default", 3, 3, pytest.approx(1 / 3), pytest.approx(1 / 3), 1.0, 7.0),
        ("t001", "default", 3, 2, 0.0, 0.0, 0.0, 7.0),
        ("t002", "default", 1, 0, None, None, None, 7.0),
    ]
    assert "All 3, the hardest first" in page.text
    assert "What is 0 + 0?" in page.text
    _, page = report(store, inputs, n_tasks=1)
    assert "The 1 hardest of 3" in page.text


def test_several_iterations_show_progress_and_training(store: Store) -> None:
    first = evaluation(store, {"t000": [0, 0, 0, 1]}, label="a")
    second = evaluation(store, {"t000": [1, 1, 0, 1]}, label="b")
    inputs = joined(first, second)
    measured: list[dict[str, float | None]] = [
        {"loss": 0.5, "odd": None, "kl": 1.0},
        {"loss": 0.25, "odd": float("nan"), "kl": float("inf")},
    ]
    policies = [
        given(store, "policy", {"metrics": metric_rows("policy", values)}, inputs={"rollouts": [rollouts]})
        for values, rollouts in zip(measured, inputs["rollouts"], strict=True)
    ]
    manifest, page = report(store, inputs | {"policy": policies[::-1]}, first_iteration=3)
    assert metrics(store, manifest)["pass_rate"] == 0.75
    assert "2 iterations, 3 to 4" in page.text
    assert "was 25.0%" in page.text
    assert "24 in all iterations" in page.text
    assert ("aria-label", "reward and pass rate by iteration") in page.attributes
    assert ("aria-label", "loss by iteration") in page.attributes
    assert ("aria-label", "odd by iteration") not in page.attributes
    assert page.text.index("loss: 0.5") < page.text.index("loss: 0.25")
    only, _ = report(store, second)
    assert metrics(store, only)["pass_rate"] == 0.75


def test_rewards_are_matched_to_rollouts_by_reference_and_not_by_place(store: Store) -> None:
    first = evaluation(store, {"t000": [0, 0]}, label="a")
    second = evaluation(store, {"t000": [1, 1]}, label="b")
    inputs = joined(first, second)
    inputs["rewards"] = inputs["rewards"][::-1]
    manifest, _ = report(store, inputs)
    assert metrics(store, manifest)["pass_rate"] == 1.0


def test_nothing_that_a_model_or_a_data_set_says_becomes_markup(store: Store) -> None:
    tasks = given(
        store,
        "tasks",
        {"tasks": [task_rows(1)[0] | dict.fromkeys(("task_id", "instruction", "answer", "benchmark"), HOSTILE)]},
    )
    episode = episode_rows(["t"], 1)[0] | {"task_id": HOSTILE, "episode_id": HOSTILE, "error_kind": HOSTILE}
    step = step_rows([HOSTILE], response=HOSTILE, reasoning=HOSTILE, trajectory=HOSTILE)[0]
    said = {"messages": '[{"role": "<b>", "content": "<script>\\ud800"}]', "tool_calls": '["<script>"]'}
    rollouts = given(store, "rollouts", {"episodes": [episode], "steps": [step | said]}, inputs={"tasks": [tasks]})
    graded = reward_rows([HOSTILE], [1.0])[0] | {"trajectory": HOSTILE, "verdict": HOSTILE, "explanation": HOSTILE}
    failed = graded | {"trajectory": "other", "status": "error", "reward": None, "is_correct": None, "verdict": None}
    rewards = given(store, "rewards", {"rewards": [graded, failed]}, inputs={"rollouts": [rollouts]})
    policy = given(store, "policy", {"metrics": metric_rows("policy", {HOSTILE: 1.0})}, inputs={"rollouts": [rollouts]})
    inputs = {"tasks": [tasks], "rollouts": [rollouts], "rewards": [rewards], "policy": [policy]}
    _, page = report(store, inputs, title=HOSTILE)
    assert page.text.count("alert('x')") >= 8
    assert not {"script", "img", "b"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_the_page_loads_nothing_and_closes_what_it_opens(store: Store) -> None:
    _, page = report(store, evaluation(store, {"t000": [1, 0.5], "t001": [0, None]}))
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert not {"src", "href", "srcset", "action", "xlink:href"} & {name for name, _ in page.attributes}
    assert "url(" not in page.html
    assert "@import" not in page.html
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


def test_the_same_artifacts_give_the_same_bytes(store: Store) -> None:
    from stages.artifacts.store import open_store

    inputs = evaluation(store, {"t000": [1, 0.3, 0.1, 0.7], "t001": [0, 0.2, None, 0.9]})
    first, _ = report(store, inputs)
    other = open_store(f"memory://{first.key}")
    for manifest in (manifest for many in inputs.values() for manifest in many):
        for entry in manifest.files:
            path = f"artifacts/{manifest.kind}/{manifest.key}/{entry.path}"
            other.storage.put_if_absent(path, store.storage.read(path))
        path = f"artifacts/{manifest.kind}/{manifest.key}/manifest.json"
        other.storage.put_if_absent(path, store.storage.read(path))
    second = materialise(other, Request(STAGE, ReportConfig(), ReportExecution(), inputs)).manifest
    assert (second.key, second.digest) == (first.key, first.digest)


def test_best_and_worst_are_told_in_text_with_long_ones_shortened(store: Store) -> None:
    tasks = given(store, "tasks", {"tasks": task_rows(3)})
    episodes = episode_rows(["t000", "t001", "t002"], 1)
    ids = [row["episode_id"] for row in episodes]
    steps = [
        row | {"response": response}
        for row, response in zip(step_rows(ids), ["the worst", "in the middle", "best " * 100 + "end"], strict=True)
    ]
    rollouts = given(store, "rollouts", {"episodes": episodes, "steps": steps}, inputs={"tasks": [tasks]})
    scores = given(store, "rewards", {"rewards": reward_rows(ids, [-1.0, 0.5, 2.0])}, inputs={"rollouts": [rollouts]})
    inputs = {"tasks": [tasks], "rollouts": [rollouts], "rewards": [scores]}
    _, page = report(store, inputs, n_examples=1, max_message=100)
    assert page.text.index("Highest rewards") < page.text.index("Lowest rewards") < page.text.index("the worst")
    assert "[… 404 characters …]" in page.text
    assert "in the middle" not in page.text
    _, page = report(store, inputs, n_examples=0)
    assert "the worst" not in page.text


def test_what_is_not_known_is_said_and_not_shown_as_zero(store: Store) -> None:
    inputs = evaluation(store, {"t000": [None, None]}, response_tokens=None, prompt_tokens=None)
    manifest, page = report(store, inputs)
    made = metrics(store, manifest)
    unknown = ("pass_rate", "pass_rate_low", "mean_reward", "solved_rate", "response_tokens")
    assert [made[name] for name in unknown] == [None] * 5
    assert (made["n_trajectories"], made["n_scored"]) == (2, 0)
    assert "does not tell how many tokens" in page.text
    assert "0.0%" not in page.text.partition("Outcomes")[0]


@pytest.mark.parametrize("case", ["no rewards", "other rollouts", "two rewards", "no rows"])
def test_artifacts_that_do_not_belong_together_are_refused(store: Store, case: str) -> None:
    first = evaluation(store, {"t000": [0, 1]}, label="a")
    second = evaluation(store, {"t000": [0, 1]}, label="b")
    empty = given(store, "rewards", {}, inputs={"rollouts": first["rollouts"]})
    again = given(store, "rewards", {"rewards": reward_rows(["a"], [1])}, inputs={"rollouts": first["rollouts"]})
    rewards, message = {
        "no rewards": (first["rewards"], "no rewards were given that score the rollouts"),
        "other rollouts": (first["rewards"] + second["rewards"], "not among the rollouts given"),
        "two rewards": ([*first["rewards"], again], "both score the rollouts"),
        "no rows": ([empty], "nothing to report"),
    }[case]
    rollouts = first["rollouts"] + (second["rollouts"] if case == "no rewards" else [])
    with pytest.raises(InputError, match=message):
        report(store, {"tasks": first["tasks"], "rollouts": rollouts, "rewards": rewards})


def test_importing_the_stage_loads_nothing_heavy() -> None:
    code = "import stages.report.stage, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"polars", "numpy", "jinja2", "torch", "prefect"} & set(loaded)
