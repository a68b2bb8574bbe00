"""README and manual are true: their code runs, their answers are right, their commands, files and links exist.

Every Python block of every page is run, those of a page one after the other:

- ``README.md`` and ``docs/data.md`` beside the store of a finished run;
- ``docs/agents.md``: each block is a file, which ``rollmill agent check`` or the rewards stage uses;
- ``docs/gateway.md`` against a real gateway, with the scripted engine and the test's own address and token;
- ``docs/design.md``: the estimator, on rewards of two groups.
"""

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
import typer.main
import yaml

import rollmill
from flows.cli import app
from flows.recipes import Execution, TrainRecipe
from flows.registry import STAGE_NAMES, stage_named
from schemas import errors
from schemas.config import ConfigModel
from schemas.runner import RunnerConfig
from schemas.tables import TABLES
from stages.advantages.estimators import ESTIMATORS
from stages.advantages.estimators.base import Samples
from stages.advantages.groups import with_statistics
from stages.policy.aggregation import Aggregation
from stages.policy.kl import ESTIMATORS as KL_ESTIMATORS
from stages.rewards.graders import GRADERS
from stages.rollouts.config import ENGINE_TYPES
from stages.rollouts.patterns import PATTERNS
from stages.rollouts.patterns.environments import ENVIRONMENTS
from stages.tasks.benchmarks import load_benchmark
from tests.flows.commands import rollmill as command_line
from tests.flows.gateways import TOKEN, gateway
from tests.flows.trained import Trained
from tests.stages.rollouts.endpoint_server import KEY, MODEL, EndpointServer
from tests.stages.rollouts.policies import make_policy
from tests.stages.rollouts.stored import stored_policy

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.M | re.S)
_PRIVATE = re.compile(r"\b(shel(f|ves)|desks?|told|asked|teller)\b", flags=re.I)
"""Words that once had a meaning of their own here."""


def sections(page: str) -> dict[str, str]:
    """The text below each heading, up to the next one; what is commented in code is no heading."""
    hidden = _FENCE.sub(lambda match: re.sub(r"[^\n]", "x", match[0]), PAGES[page])
    heads = list(re.finditer(r"^#+ (.+)\n", hidden, flags=re.M))
    ends = [head.start() for head in heads[1:]] + [len(hidden)]
    titles = [head[1] for head in heads]
    assert len(set(titles)) == len(titles), f"two headings of {page} are the same"
    return {head[1]: PAGES[page][head.end() : end] for head, end in zip(heads, ends, strict=True)}


def blocks(page: str, language: str, section: str | None = None) -> list[str]:
    """The code blocks of a language, of one section or of the whole page."""
    text = PAGES[page] if section is None else sections(page)[section]
    return [code for name, code in _FENCE.findall(text) if name == language]


def prose(page: str) -> str:
    """The page without its blocks of code."""
    return _FENCE.sub("", PAGES[page])


def rows_of(page: str, section: str) -> list[list[str]]:
    """The cells of all tables of a section, without their heads."""
    lines = [line for line in sections(page)[section].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    heads = {place - 1 for place, row in enumerate(cells) if set(row[0]) == {"-"}}
    return [row for place, row in enumerate(cells) if place not in heads and place - 1 not in heads]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def first_names(page: str, section: str) -> list[str]:
    """What the first column of a section's tables names."""
    return [name for row in rows_of(page, section) for name in names_in(row[0])]


def commands(page: str | None = None) -> Iterator[list[str]]:
    """The words of every ``rollmill`` command in the blocks of one page, or of all."""
    for one in PAGES if page is None else [page]:
        for block in blocks(one, "sh"):
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
    """The names that the blocks of the page on data define, run one after the other beside the store."""
    return run_beside(trained, "docs/data.md", blocks("docs/data.md", "python"))


def run_beside(trained: Trained, page: str, code: list[str]) -> dict[str, Any]:
    """Runs blocks where the store is ``./store``; returns the names that they define."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(trained.url).parent)
        for block in code:
            exec(compile(block, page, "exec"), names)
    return names


@pytest.fixture(scope="module")
def tokens(trained: Trained) -> dict[tuple[str, str], int]:
    """Sampled tokens of each trajectory."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for step in stored(trained, "steps"):
        found[step["episode_id"], step["trajectory"]] += len(step["response_ids"])
    return found


def test_there_are_five_questions():
    assert len(re.findall(r"^\*\*.*\?\*\*", sections("docs/data.md")["Five questions"], flags=re.M)) == 5
    assert len(blocks("docs/data.md", "python", "Five questions")) == 6, "the names, and a block for each question"


def test_the_readme_answers_the_first_of_them(answers, trained):
    found = run_beside(trained, "README.md", blocks("README.md", "python", "Ask the data"))["hardest"]
    assert dict(found.rows()) == dict(answers["pass_rate"].select("task_id", "pass_rate").rows())
    assert found["pass_rate"].is_sorted()


def test_artifacts_and_their_files_are_read_with_other_tools(answers, trained):
    rewards = [row["reward"] for row in stored(trained, "rewards") if row["iteration"] == 1]
    assert answers["mean_reward"] == pytest.approx(mean(rewards))
    assert answers["mean_reward"] == pytest.approx(answers["manifest"].summary["mean_reward"])
    assert sorted(answers["frame"]["reward"]) == sorted(rewards)


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


def code_named(page: str, name: str) -> str:
    (code,) = [block for block in blocks(page, "python") if block.startswith(f"# {name}\n")]
    return code


def command_with(page: str, text: str) -> list[str]:
    (words,) = [words for words in commands(page) if text in " ".join(words)]
    return words


def test_the_agent_of_the_readme_can_be_trained(trained_copy, tmp_path, monkeypatch):
    (tmp_path / "my_agent.py").write_text(code_named("README.md", "my_agent.py"))
    monkeypatch.chdir(tmp_path)
    verb, _, *settings = command_with("README.md", "my_agent.py:solve")
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
    (tmp_path / "my_grader.py").write_text(code_named("README.md", "my_grader.py"))
    monkeypatch.chdir(tmp_path)
    words = [word.replace("RUN", "tiny") for word in command_with("README.md", "my_grader.py:brief_and_right")]
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
    (block,) = blocks("README.md", "sh", "Rerun from the middle")
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
    (block,) = blocks("docs/engines.md", "sh", "Other people's models")
    for line in block.splitlines():
        words = [filled.get(word, word) for word in shlex.split(line, comments=True)[1:]]
        done = command_line(*words)
        assert done.code == 0, done.text
    assert len(server.asked) == 1 + 2 * 16
    server.close()


@pytest.fixture
def agent_files(tmp_path, monkeypatch):
    """The page on agents as files of the folder in which commands are called: each block begins with its name."""
    names = []
    for block in blocks("docs/agents.md", "python"):
        name = block.partition("\n")[0].removeprefix("# ")
        assert re.fullmatch(r"\w+\.py", name)
        (tmp_path / name).write_text(block)
        names.append(name)
    monkeypatch.chdir(tmp_path)
    return names


def test_the_agents_of_the_manual_are_checked_by_its_commands(agent_files):
    checks = [words for words in commands("docs/agents.md") if words[:2] == ["agent", "check"]]
    assert {words[2].partition(":")[0] for words in checks} == set(agent_files) - {"my_grader.py"}
    for words in checks:
        done = command_line(*words)
        assert done.code == 0, done.text
        assert "call of" not in done.out, "no call has failed"
        # One that has asked twice goes on from the sampled ids, which the third column counts.
        assert len(re.findall(r"^ (default|author|critic) +\d ", done.out, flags=re.M)) == 2, done.out


def test_the_grader_of_the_manual_takes_parameters(trained_copy, agent_files):
    scored = [words for words in commands("docs/agents.md") if "grader=my_grader.py:close" in words]
    assert [words[-1] for words in scored] == ["grader=my_grader.py:close", "params.tolerance=0.1"]
    for words in scored:
        done = command_line(*(word.replace("RUN", "tiny") for word in words), "--store", trained_copy.url)
        assert done.code == 0, done.text
        rewards = rollmill.scan(done.out.split()[1], "rewards", store=trained_copy.url).collect()
        assert set(rewards["status"]) == {"ok"}
        assert set(rewards["verdict"]) <= {"bad_format", "correct", "wrong_answer"}
        assert set(rewards["grader_version"]) == {"1"}


def test_the_clients_of_the_manual_talk_to_a_gateway(store, tmp_path):
    policy = stored_policy(store, make_policy(tmp_path / "policy"))
    names: dict[str, Any] = {"TOKEN": TOKEN}
    with gateway(store, policy, tmp_path, "--engine", "scripted", "engine.n_tokens=6") as running:
        for block in blocks("docs/gateway.md", "python"):
            assert "http://127.0.0.1:8080" in block
            exec(compile(block.replace("http://127.0.0.1:8080", running.url), "docs/gateway.md", "exec"), names)
        assert len(names["ids"]) == len(names["logprobs"]) == 6
        assert names["committed"]["episodes"] == 1
        assert names["traces"] == []
        assert names["agent_url"].startswith(running.url)
    episodes = rollmill.scan(names["committed"]["rollouts"], "episodes", store=store).collect()
    assert json.loads(episodes["artifacts"][0]) == {"answer": "7"}
    assert episodes["task_id"].to_list() == ["t1"]


def test_the_estimator_of_the_manual_ranks_groups():
    names: dict[str, Any] = {}
    (block,) = blocks("docs/design.md", "python")
    exec(compile(block, "docs/design.md", "exec"), names)
    rows = pl.DataFrame({"group_id": ["a", "a", "a", "b"], "reward": [3.0, 1.0, 2.0, 5.0]})
    found = names["Rank"]().estimate(Samples(with_statistics(rows), lambda *_: pl.LazyFrame()))
    assert found["advantage"].to_list() == [1.0, -1.0, 0.0, 0.0]


def test_every_block_of_python_is_run():
    assert {page for page in PAGES if blocks(page, "python")} == {
        "README.md", "docs/agents.md", "docs/data.md", "docs/design.md", "docs/gateway.md"
    }  # fmt: skip
    of_readme = blocks("README.md", "python")
    assert of_readme == [
        *blocks("README.md", "python", "Ask the data"),
        code_named("README.md", "my_agent.py"),
        code_named("README.md", "my_grader.py"),
    ]


def test_a_data_set_of_ones_own_becomes_tasks_as_the_manual_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2", "origin": "me"}\n')
    done = command_line(*command_with("docs/data.md", "execution.location=rows.jsonl"))
    assert done.code == 0, done.text
    (task,) = rollmill.scan(done.out.split()[1], "tasks").collect().iter_rows(named=True)
    assert (task["instruction"], task["answer"], task["metadata"]) == ("1 + 1?", "2", '{"origin":"me"}')
    (block,) = blocks("docs/data.md", "yaml", "Tasks and benchmarks")
    (tmp_path / "mine.yaml").write_text(block)
    assert load_benchmark("mine.yaml").fields.instruction == yaml.safe_load(block)["fields"]["instruction"]


def command_named(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words call, and the words after its name."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while hasattr(command, "commands"):
        assert rest, f"rollmill {' '.join(words)} is no command"
        assert rest[0] in command.commands, words
        command = command.commands[rest.pop(0)]
    return command, rest


def test_every_command_can_be_parsed():
    found = list(commands())
    assert len(found) > 40
    context = typer.main.get_command(app).make_context("rollmill", [], resilient_parsing=True)
    for words in found:
        command, rest = command_named(words)
        command.make_context(" ".join(words), rest, parent=context)
    for page in PAGES:
        for text in re.findall(r"`rollmill ([a-z][^`]*)`", prose(page)):
            command_named(text.split())


def test_every_command_is_in_the_manual():
    listed = {tuple(name.split()[1:3]) for name in first_names("docs/operations.md", "Commands")}
    tree: Any = typer.main.get_command(app)
    for name, command in tree.commands.items():
        for inner in getattr(command, "commands", {}):
            assert (name, inner) in listed
        assert hasattr(command, "commands") or any(words[0] == name for words in listed), name


def test_every_file_and_target_that_is_named_is_there():
    folders = "configs|docs|infra|stages|flows|schemas|tests"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for page, text in PAGES.items():
        for path in re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./-]*", text):
            assert (ROOT / path.rstrip("./")).exists(), f"{page}: {path}"
        for line in re.findall(r"^(?:\w+=\S+ )*make ([a-z -]+)|`(?:\w+=\S+ )*make ([a-z -]+)`", text, flags=re.M):
            for target in " ".join(line).split("#")[0].split():
                assert target in targets, f"{page}: make {target}"
    assert set(first_names("docs/operations.md", "Make targets")) == set(targets)


def slug(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_links_lead_to_pages_and_headings_that_are_there():
    linked = set()
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            assert path.is_file(), f"{page}: {target}"
            other = path.resolve().relative_to(ROOT).as_posix()
            linked.add((page, other))
            assert not anchor or anchor in map(slug, sections(other)), f"{page}: {target}"
    assert {other for page, other in linked if page == "README.md"} == set(PAGES) - {"README.md"}


def test_the_table_of_stages_names_each_with_what_it_makes():
    rows = {names_in(row[0])[0]: row for row in rows_of("README.md", "The stages")}
    assert list(rows) == [name for name in STAGE_NAMES if not name.startswith("policy_")]
    for name, row in rows.items():
        stage = stage_named(name)
        for table in stage.tables:
            assert f"`{table}`" in row[2], f"{name} makes {table}"
        for kind in (spec.kind for spec in stage.inputs.values() if not spec.optional):
            assert kind in row[1] or "all of them" in row[1], f"{name} reads {kind}"


def test_the_settings_of_every_stage_are_in_the_manual():
    listed: dict[str, set[str]] = defaultdict(set)
    for page in PAGES:
        for title in sections(page):
            if title.startswith("Settings of `"):
                listed[names_in(title)[0]] |= set(first_names(page, title))
    assert set(listed) == set(STAGE_NAMES)
    for name, found in listed.items():
        stage = stage_named(name)
        execution = {f"execution.{field}" for field in stage.Execution.model_fields}
        assert found - {"execution.…"} | (execution if "execution.…" in found else set()) == {
            *stage.Config.model_fields,
            *execution,
        }, name


def test_the_settings_of_recipes_and_runners_are_in_the_manual():
    assert first_names("docs/operations.md", "Recipes and settings") == [
        *("run", "seed", "iterations", "overlap", "policy", "tasks", "rollouts", "rewards", "advantages", "update"),
        *("report", "execution"),
    ]
    assert set(first_names("docs/operations.md", "Recipes and settings")) == set(TrainRecipe.model_fields)
    text = sections("docs/operations.md")["Recipes and settings"]
    assert all(f"`{name}`" in text for name in Execution.model_fields)
    assert set(first_names("docs/operations.md", "Many machines")) == set(RunnerConfig.model_fields)


def test_the_tables_name_all_that_is_built_in():
    assert first_names("docs/agents.md", "Built-in agents")[: len(PATTERNS)] == list(PATTERNS)
    assert first_names("docs/agents.md", "Environments") == list(ENVIRONMENTS)
    assert first_names("docs/agents.md", "Built-in graders")[: len(GRADERS)] == list(GRADERS)
    assert first_names("docs/algorithms.md", "Estimators") == list(ESTIMATORS)
    assert first_names("docs/algorithms.md", "Aggregation") == list(get_args(Aggregation))
    assert first_names("docs/algorithms.md", "KL") == list(KL_ESTIMATORS)
    assert sorted(first_names("docs/engines.md", "Engines and models")) == sorted(ENGINE_TYPES)


def test_the_settings_of_what_is_built_in_are_in_the_manual():
    def check(page: str, section: str, name: str, model: type[ConfigModel], shared: frozenset[str]) -> None:
        rows = [row for row in rows_of(page, section) if name in names_in(row[0])]
        named = {one for row in rows for cell in row[1:] for one in names_in(cell)}
        assert set(model.model_fields) - shared <= named, (name, set(model.model_fields) - named)

    of_solver_judge = frozenset(PATTERNS["solver_judge"].Config.model_fields)
    for name, pattern in PATTERNS.items():
        shared = frozenset({"system"}) | (of_solver_judge if name == "debate" else frozenset())
        check("docs/agents.md", "Built-in agents", name, pattern.Config, shared)
    for name, game in ENVIRONMENTS.items():
        check("docs/agents.md", "Environments", name, game.Config, frozenset())
    common = frozenset({"of", "extract", "marker", "pattern"})
    for name, grader in GRADERS.items():
        check("docs/agents.md", "Built-in graders", name, grader, common)
    for name, estimator in ESTIMATORS.items():
        check("docs/algorithms.md", "Estimators", name, estimator, frozenset())


def test_every_column_is_in_the_manual_with_its_type_and_what_null_means():
    found = sections("docs/data.md")
    for table in TABLES.values():
        rows = rows_of("docs/data.md", f"`{table.name}`")
        types = {"large_string": "string", "timestamp[us, tz=UTC]": "timestamp"}
        declared = []
        for field in table.schema:
            inner = re.fullmatch(r"large_list<element: (\w+) not null>", str(field.type))
            kind = f"list<{inner[1]}>" if inner else types.get(str(field.type), str(field.type))
            declared.append(([field.name], kind, field.nullable))
        assert [(names_in(row[0]), row[1], row[3] != "never") for row in rows] == declared
        text = found[f"`{table.name}`"]
        assert f"unique by {', '.join(f'`{name}`' for name in table.id_columns)}" in text
        assert f"Version {table.version}." in text


def test_every_kind_of_error_is_in_the_manual_with_its_exit_code():
    kinds = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.RollmillError) and kind is not errors.RollmillError
    }
    rows = rows_of("docs/operations.md", "Errors and exit codes")
    assert {names_in(row[0])[0]: int(row[2]) for row in rows} == kinds


def test_every_environment_variable_is_in_the_manual():
    files = [path for folder in ("flows", "stages", "schemas") for path in (ROOT / folder).rglob("*.py")]
    used = {name for file in files for name in re.findall(r"\bROLLMILL_[A-Z_]+", file.read_text(encoding="utf-8"))}
    listed = {*first_names("docs/operations.md", "Environment variables")}
    listed |= {*first_names("docs/agents.md", "Any program as an agent")}
    internal = {name for name in used if name.startswith("ROLLMILL_TRAINER_")}
    assert used - internal == {name for name in listed if name.startswith("ROLLMILL_")}


def test_the_pages_use_the_fields_own_words():
    for page in PAGES:
        found = [match[0] for match in _PRIVATE.finditer(prose(page))]
        assert not found, f"{page}: {found}"
