"""The README is true: its code runs, its answers are right, its commands exist."""

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
import typer.main

import rollmill
from flows.cli import app
from flows.registry import STAGE_NAMES, stage_named
from stages.rollouts.patterns import PATTERNS
from tests.flows.commands import rollmill as command_line
from tests.flows.trained import Trained
from tests.stages.rollouts.endpoint_server import KEY, MODEL, EndpointServer

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, section: str | None = None) -> list[str]:
    """The code blocks of a language, of one section or of the whole."""
    text = README if section is None else re.split(r"^#+ ", README.split(f"# {section}\n")[1], flags=re.M)[0]
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def commands() -> Iterator[list[str]]:
    """The words of every ``rollmill`` command."""
    for block in blocks("sh"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["rollmill"]:
                yield words[1:]


def stored(trained: Trained, table: str) -> list[dict[str, Any]]:
    """The run's rows of a table, read by the layout that the design gives, without Rollmill."""
    root = Path(trained.url)
    rows = []
    for file in sorted((root / "runs" / trained.run / "iterations").iterdir()):
        record = json.loads(file.read_text())
        for name, ref in record["artifacts"].items():
            folder = root / "artifacts" / ref["kind"] / ref["key"]
            for entry in json.loads((folder / "manifest.json").read_text())["files"]:
                if entry["table"] == table and name not in ("sampled_by", "policy_in"):
                    found = pq.read_table(folder / entry["path"]).to_pylist()
                    rows += [{"iteration": record["iteration"], **row} for row in found]
    return rows


@pytest.fixture(scope="module")
def answers(trained: Trained) -> dict[str, Any]:
    """The names that the blocks of "Ask the data" define, run one after the other beside the store."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(trained.url).parent)
        for block in blocks("python", "Ask the data"):
            exec(compile(block, "README.md", "exec"), names)
    return names


@pytest.fixture(scope="module")
def tokens(trained: Trained) -> dict[tuple[str, str], int]:
    """Sampled tokens of each trajectory."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for step in stored(trained, "steps"):
        found[step["episode_id"], step["trajectory"]] += len(step["response_ids"])
    return found


def test_there_are_five_questions():
    assert len(re.findall(r"^\*\*.*\?\*\*", README.split("# Ask the data")[1].split("\n## ")[0], flags=re.M)) == 5
    assert len(blocks("python", "Ask the data")) == 6, "the names, and a block for each question"


def test_pass_rate_by_task(answers, trained):
    task_of = {row["episode_id"]: row["task_id"] for row in stored(trained, "episodes")}
    right = defaultdict(list)
    for row in stored(trained, "rewards"):
        right[task_of[row["episode_id"]]].append(row["is_correct"])
    frame = answers["pass_rate"]
    assert frame.height == 8
    assert {row["task_id"]: (row["pass_rate"], row["attempts"]) for row in frame.iter_rows(named=True)} == {
        task: (mean(values), len(values)) for task, values in right.items()
    }
    assert frame["pass_rate"].is_sorted()


def test_tokens_by_verdict(answers, trained, tokens):
    by_verdict = defaultdict(list)
    for row in stored(trained, "rewards"):
        by_verdict[row["verdict"]].append(tokens[row["episode_id"], row["trajectory"]])
    assert len(by_verdict) > 1
    frame = answers["tokens_by_verdict"]
    assert {row["verdict"]: (row["mean_tokens"], row["tokens"]) for row in frame.iter_rows(named=True)} == {
        verdict: (pytest.approx(mean(values)), sum(values)) for verdict, values in by_verdict.items()
    }


def test_reward_against_length(answers, trained, tokens):
    pairs = [(tokens[r["episode_id"], r["trajectory"]], r["reward"]) for r in stored(trained, "rewards")]
    quarters: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for length, reward in pairs:
        rank = sum(other <= length for other, _ in pairs)
        quarters[4 * (rank - 1) // len(pairs)].append((length, reward))
    assert len(quarters) > 1
    assert answers["reward_by_length"].to_dicts() == [
        {
            "quarter": quarter,
            "tokens": pytest.approx(mean(length for length, _ in found)),
            "reward": pytest.approx(mean(reward for _, reward in found)),
            "trajectories": len(found),
        }
        for quarter, found in sorted(quarters.items())
    ]


def test_the_worst_trajectories_in_text(answers, trained):
    rewards = [row for row in stored(trained, "rewards") if row["iteration"] == 1]
    steps = {row["episode_id"]: row for row in stored(trained, "steps")}
    worst = sorted(rewards, key=lambda row: (row["reward"], row["episode_id"]))[:10]
    expected = [
        (row["reward"], row["verdict"], steps[row["episode_id"]]["messages"], steps[row["episode_id"]]["response"])
        for row in worst
    ]
    frame = answers["worst"]
    assert frame.rows() == expected
    assert "What is " in frame["messages"][0]


def test_logprob_statistics(answers, trained):
    by_iteration: dict[int, list[float]] = defaultdict(list)
    for row in stored(trained, "steps"):
        by_iteration[row["iteration"]] += row["logprobs"]
    frame = answers["logprobs"]
    assert frame["iteration"].to_list() == [0, 1]
    for row in frame.iter_rows(named=True):
        values = np.array(by_iteration[row["iteration"]], dtype=np.float32)
        assert row["mean"] == pytest.approx(values.mean(), rel=1e-5)
        assert row["p05"] == pytest.approx(np.quantile(values, 0.05, method="nearest"), abs=0.05)
        assert row["share_below_minus_5"] == pytest.approx((values < -5).mean())
        assert row["mean"] == pytest.approx(-np.log(261), abs=0.3), "nearly uniform over the tiny vocabulary"


def test_duckdb_and_pandas_read_the_same_files(answers, trained):
    steps = sorted(Path(trained.url).glob("artifacts/rollouts/*/data/steps/*.parquet"))
    assert len(steps) == 4
    sql = f"select sum(len(response_ids)) from read_parquet({[str(file) for file in steps]})"
    ((n_tokens,),) = duckdb.connect().execute(sql).fetchall()
    assert n_tokens == sum(answers["tokens_by_verdict"]["tokens"])
    frame = pd.concat(pd.read_parquet(file) for file in steps)
    assert frame["logprobs"].map(len).sum() == n_tokens


def test_the_store_is_found_by_the_variable_too(answers, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLMILL_STORE", trained.url)
    assert rollmill.open_store().url == trained.url
    assert rollmill.scan("tiny", "rewards").collect().equals(answers["rewards"].collect())
    done = command_line("runs")
    assert done.code == 0
    assert " tiny " in done.out
    assert not list(tmp_path.iterdir())


def code_named(name: str) -> str:
    (code,) = [block for block in blocks("python") if block.startswith(f"# {name}\n")]
    return code


def command_with(text: str) -> list[str]:
    (words,) = [words for words in commands() if text in " ".join(words)]
    return words


def test_the_agent_of_the_readme_can_be_trained(trained_copy, tmp_path, monkeypatch):
    (tmp_path / "my_agent.py").write_text(code_named("my_agent.py"))
    monkeypatch.chdir(tmp_path)
    verb, _, *settings = command_with("my_agent.py:solve")
    done = command_line(verb, trained_copy.recipe, *settings, "run=own", "iterations=1", "--store", trained_copy.url)
    assert done.code == 0, done.text
    episodes, steps = (pl.DataFrame(rows) for rows in _of_run(trained_copy, "own", "episodes", "steps"))
    assert set(episodes["agent"]) == {"my_agent.py:solve"}
    said = dict(zip(steps["episode_id"], steps["response"], strict=True))
    for row in episodes.iter_rows(named=True):
        assert json.loads(row["artifacts"])["answer"] == said[row["episode_id"]]


def _of_run(trained: Trained, run: str, *tables: str) -> list[list[dict[str, Any]]]:
    other = Trained(trained.url, run, trained.recipe, trained.grader, trained.output)
    return [stored(other, table) for table in tables]


def test_the_grader_of_the_readme_scores_a_stored_run(trained_copy, tmp_path, monkeypatch):
    (tmp_path / "my_grader.py").write_text(code_named("my_grader.py"))
    monkeypatch.chdir(tmp_path)
    words = [word.replace("RUN", "tiny") for word in command_with("my_grader.py:brief_and_right")]
    done = command_line(*words, "--store", trained_copy.url)
    assert done.code == 0, done.text
    rewards = trained_copy.store.resolve(done.out.split()[1])
    (file,) = rewards.table_files("rewards")
    rows = pq.read_table(Path(trained_copy.url) / "artifacts/rewards" / rewards.key / file.path).to_pylist()
    said = {row["episode_id"]: row["response"] or "" for row in stored(trained_copy, "steps")}
    task_of = {row["episode_id"]: row["task_id"] for row in stored(trained_copy, "episodes")}
    answer_of = {row["task_id"]: row["answer"] for row in stored(trained_copy, "tasks")}
    assert len(rows) == 16
    for row in rows:
        text = said[row["episode_id"]]
        right = answer_of[task_of[row["episode_id"]]] in text
        assert (row["status"], row["is_correct"]) == ("ok", right)
        assert row["reward"] == pytest.approx(right - 0.01 * len(text))


def test_the_commands_of_rerun_from_the_middle_run_as_they_stand(trained_copy, monkeypatch):
    monkeypatch.setenv("ROLLMILL_STORE", trained_copy.url)
    (block,) = blocks("sh", "Rerun from the middle")
    made: dict[str, str] = {}
    lines = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    assert len(lines) == 4
    for words in lines:
        filled = [word.replace("RUN", "tiny") for word in words]
        filled = [re.sub(r"(\w+)/KEY", lambda match: made[match[1]], word) for word in filled]
        if "grader=exact" in filled:  # a random policy is never right, and equal rewards leave nothing to train on
            filled[-1] = f"grader={trained_copy.grader}:letters"
            filled.append("timeout_s=5")
        done = command_line(*filled)
        assert done.code == 0, done.text
        if words[0] == "stage":
            made[words[1]] = done.out.split()[1]
    for ref in made.values():
        assert ref in done.out, "the lineage shows the fork"


def test_the_commands_about_other_peoples_models_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("BIG_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    server = EndpointServer()
    filled = {"https://host/v1": server.url, "big-1": MODEL, "gsm8k": "arithmetic", "60": "6000"}
    (block,) = blocks("sh", "Other people's models")
    for line in block.splitlines():
        words = [filled.get(word, word) for word in shlex.split(line, comments=True)[1:]]
        done = command_line(*words)
        assert done.code == 0, done.text
    assert len(server.asked) == 1 + 2 * 16
    server.close()


def test_every_command_of_the_readme_can_be_parsed():
    found = list(commands())
    assert len(found) > 15
    root = typer.main.get_command(app)
    for words in found:
        command: Any = root
        context = command.make_context("rollmill", list(words[:1]), resilient_parsing=True)
        rest = list(words)
        while hasattr(command, "commands"):
            name = rest.pop(0)
            assert name in command.commands, words
            command = command.commands[name]
        command.make_context(" ".join(words), rest, parent=context)


def test_every_file_and_target_that_the_readme_names_is_there():
    for path in re.findall(r"\b(?:configs|infra|stages|flows|schemas|tests)/[\w./-]*", README):
        assert (ROOT / path.rstrip("./")).exists(), path
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for line in re.findall(r"^make ([a-z -]+)|`make ([a-z -]+)`", README, flags=re.M):
        for target in " ".join(line).split("#")[0].split():
            assert target in targets, target


def test_the_table_of_stages_names_each_with_what_it_makes():
    section = README.split("\n## The stages\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    named = {row[0].strip().strip("`"): row for row in rows}
    assert list(named) == [name for name in STAGE_NAMES if not name.startswith("policy_")]
    for name, row in named.items():
        stage = stage_named(name)
        for table in stage.tables:
            assert f"`{table}`" in row[2], f"{name} makes {table}"
        for kind in (spec.kind for spec in stage.inputs.values() if not spec.optional):
            assert kind in row[1] or "all of them" in row[1], f"{name} reads {kind}"


def test_the_table_of_agents_names_each_that_is_built_in():
    section = README.split("\n## Agents that are built in\n")[1].split("\n## ")[0]
    table = section.split("\n\n")[0]
    named = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert named == list(PATTERNS)
