"""Bad input is refused with one message that says what and where, exit code 2, no traceback, and nothing written."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.artifacts.store import open_store
from tests.builders import given, task_rows
from tests.conftest import S3_ENVIRONMENT
from tests.flows.commands import Done, contents, rollmill, rollmill_process
from tests.flows.trained import Trained, recipe

pytestmark = pytest.mark.usefixtures("prefect")

Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Runs a command that must be refused, in an empty folder; returns the message.

    By default with a store that does not exist, and must not exist afterwards.
    """
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path, store: str | Path | None = None) -> str:
        url = store or tmp_path / "new-store"
        before = contents(Path(url))
        done = rollmill(*arguments, "--store", url)
        assert contents(Path(url)) == before, "something was written"
        if store is None:
            assert not Path(url).exists(), "a store was created"
        assert not (tmp_path / "store").exists(), "the default store was created"
        return message_of(done)

    return run


def message_of(done: Done) -> str:
    """The one message of a command that was refused."""
    assert done.code == 2, done.text
    assert done.err.startswith("error: "), done.text
    assert done.err.count("error: ") == 1, done.text
    assert "Traceback" not in done.text
    assert len(done.err) < 1500, done.err
    return done.err


@pytest.fixture
def written(tmp_path: Path, grader_file: Path) -> Callable[..., Path]:
    """Writes the tiny recipe with some settings replaced (dotted names)."""

    def write(**replaced: Any) -> Path:
        settings: dict[str, Any] = recipe(grader_file)
        for dotted, value in replaced.items():
            *parents, last = dotted.split("__")
            place = settings
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(settings))
        return file

    return write


def assert_says(message: str, *fragments: str) -> None:
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, f"{missing} not in: {message}"


def test_a_missing_config_is_named_with_those_that_are_there(refused, written):
    written()
    assert_says(refused("train", "recpe.yaml"), "no config file recpe.yaml", "recipe.yaml")
    assert_says(refused("train", "dmeo"), "there is no recipe 'dmeo'", "did you mean 'demo'?")
    assert_says(refused("stage", "tasks", "-c", "none.yaml"), "no config file none.yaml")


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("iterations: 2\npolicy: {new: [}\n", ["recipe.yaml line 2", "not valid YAML"]),
        ("iterations: 2\nseed: 1\niterations: 3\n", ["recipe.yaml line 3", "'iterations' stands twice"]),
        ("- iterations\n", ["recipe.yaml", "expected a mapping"]),
        ("", ["recipe.yaml", "expected a mapping"]),
        ("iterations: 2\n\tseed: 1\n", ["recipe.yaml line 2", "not valid YAML"]),
    ],
)
def test_a_malformed_config_is_told_with_its_line(refused, tmp_path, text, fragments):
    (tmp_path / "recipe.yaml").write_text(text)
    assert_says(refused("train", "recipe.yaml"), *fragments)


def test_a_config_that_is_no_text_or_a_folder_is_told(refused, tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00iterations")
    (tmp_path / "folder.yaml").mkdir()
    assert_says(refused("train", "binary.yaml"), "cannot read binary.yaml")
    assert_says(refused("train", "folder.yaml"), "folder.yaml is a folder")


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("iteration=3", ["unknown key 'iteration'", "did you mean 'iterations'?"]),
        ("rollouts.samples=3", ["unknown key 'rollouts.samples'", "known: ", "sampling"]),
        ("rollouts.sampling.temprature=1", ["unknown key 'rollouts.sampling.temprature'", "'temperature'"]),
        ("update.optimizer.learning_rate=1", ["unknown key 'update.optimizer.learning_rate'", "known: ", "lr"]),
        ("execution.rollouts.worker=2", ["unknown key 'execution.rollouts.worker'", "known: "]),
        ("policy.new.layers=2", ["unknown key 'policy.new.layers'", "n_layers"]),
        ("advantages.params.epsilon=1", ["estimator 'grpo'", "unknown key 'epsilon'", "did you mean 'eps'?"]),
        ("rollouts.n=0", ["rollouts.n", "greater than or equal to 1", "got 0"]),
        ("rollouts.sampling.temperature=-1", ["rollouts.sampling.temperature", "greater than or equal to 0"]),
        ("rollouts.sampling.top_p=1.5", ["rollouts.sampling.top_p", "less than or equal to 1"]),
        ("iterations=0", ["iterations", "greater than or equal to 1"]),
        ("iterations=many", ["iterations", "valid integer", "many"]),
        ("update.optimizer.lr=0", ["update.optimizer.lr", "greater than 0"]),
        ("update.optimizer.lr=nan", ["update.optimizer.lr"]),
        ("policy.new.hidden_size=33", ["policy.new.hidden_size", "multiple of 32"]),
        ("policy.source=model", ["policy", "exactly one of new, source and ref", "new, source"]),
        ("seed=-1", ["seed", "greater than or equal to 0"]),
        ("seed=1.5", ["seed", "integer"]),
        ("rollouts=3", ["rollouts"]),
        ("iterations", ["'iterations'", "key=value"]),
        ("iterations.more=3", ["'iterations.more=3'", "not a group of settings"]),
    ],
)
def test_a_wrong_setting_is_told_with_its_path_and_the_nearest_known_one(refused, written, override, fragments):
    assert_says(refused("train", written(), override), *fragments)


def test_every_wrong_setting_of_a_config_is_told_at_once(refused, written):
    file = written(rollouts__n=0, iteration=3, update__optimizer__lr=-1)
    assert_says(refused("train", file), "rollouts.n", "'iteration'", "update.optimizer.lr", str(file))


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("tasks.benchmark=arithmetics", ["unknown benchmark 'arithmetics'", "did you mean 'arithmetic'?"]),
        ("tasks.benchmark=mine.yaml", ["benchmark", "no file mine.yaml"]),
        ("tasks.split=trian", ["benchmark arithmetic has no split 'trian'", "did you mean 'train'?"]),
        ("rewards.grader=numerc", ["unknown grader 'numerc'", "did you mean 'numeric'?"]),
        ("rewards.grader=nowhere.py:f", ["nowhere.py:f", "there is no file"]),
        ("rewards.grader=rollmill_nowhere:f", ["rollmill_nowhere"]),
        ("advantages.estimator=gprо", ["unknown estimator", "did you mean 'grpo'?"]),
        ("rollouts.engine.type=vlm", ["unknown engine 'vlm'", "transformers"]),
        ("rollouts.agent=singleturn", ["unknown agent 'singleturn'", "did you mean 'single_turn'?"]),
        ("rollouts.agent=nowhere.py:solve", ["nowhere.py"]),
        ("policy={ref: policy/abcd}", ["policy/abcd", "the store is empty"]),
        ("policy={ref: 'other:policy'}", ["run 'other'"]),
        ("policy={source: ./no-model}", ["no-model"]),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_before_anything_is_written(refused, written, override, fragments):
    assert_says(refused("train", written(), override), *fragments)


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("tasks.grader=numerc", ["the tasks ask for the grader 'numerc'", "did you mean 'numeric'?"]),
        ("tasks.grader=grader.py:letters", ["the tasks ask for the grader 'grader.py:letters'", "rewards.grader=NAME"]),
        ("tasks.agent=singleturn", ["the tasks ask for the agent 'singleturn'", "did you mean 'single_turn'?"]),
    ],
)
def test_a_name_that_only_the_tasks_give_is_refused_before_rollouts_are_made(refused, written, override, fragments):
    assert_says(refused("train", written(rewards={}), override), *fragments)


def test_an_estimator_made_for_another_objective_is_refused_before_anything_is_written(refused, written):
    message = refused("train", written(advantages={"estimator": "rejection"}))
    assert_says(message, "rejection", "cross_entropy", "update.objective is policy_gradient")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["rewrads"], ["unknown stage 'rewrads'", "did you mean 'rewards'?"]),
        (["tasks"], ["no source", "name a benchmark"]),
        (["tasks", "benchmark=gsm9k"], ["unknown benchmark 'gsm9k'", "did you mean 'gsm8k'?"]),
        (["tasks", "benchmark=arithmetic", "shard_rows=3"], ["no input or setting 'shard_rows'", "execution"]),
        (["tasks", "benchmark=arithmetic", "execution.shard_rows=0"], ["execution of tasks", "shard_rows"]),
        (["rewards", "rollouts=tiny:rollouts", "grader=numerc"], ["unknown grader 'numerc'", "'numeric'"]),
        (["rewards", "rollouts=tiny:rollouts", "grader=exact", "params.ignore_csae=true"], ["ignore_csae", "'exact'"]),
        (["rewards", "rollout=tiny:rollouts", "grader=exact"], ["'rollout'", "did you mean 'rollouts'?"]),
        (["rewards", "grader=exact"], ["needs the input 'tasks'", "tasks=REF"]),
        (["advantages", "rewards=tiny:rewards", "estimator=rlo"], ["unknown estimator 'rlo'", "'rloo'"]),
        (["rollouts", "tasks=tiny:tasks", "policy=tiny:policy", "engine.type=vlm"], ["unknown engine 'vlm'"]),
        (["rollouts", "tasks=tiny:tasks", "policy=tiny:policy", "agent=solo"], ["unknown agent 'solo'"]),
        (
            ["rollouts", "tasks=tiny:tasks", "policy=tiny:policy", "agent_config.sytem=x"],
            ["single_turn", "'sytem'", "did you mean 'system'?"],
        ),
        (["rollouts", "tasks=tiny:tasks", "policy=tiny:policy", "batch.size=13"], ["a batch of 13", "there are 12"]),
        (["policy", "advantages=tiny:advantages", "optimizer.lr=-1"], ["optimizer.lr", "greater than 0"]),
        (["policy", "advantages=tiny:advantages", "objective=cross_entropy"], ["objective policy_gradient"]),
        (["policy", "advantages=tiny:advantages", "kl.coefficient=0.1"], ["needs the input 'reference'"]),
        (["report", "rewards=tiny:rewards", "n_exmaples=3"], ["no input or setting 'n_exmaples'", "'n_examples'"]),
        (["tasks", "benchmark=arithmetic", "--draw", "1"], ["tasks", "draws nothing at random"]),
    ],
)
def test_a_stage_refuses_what_it_does_not_know(refused, trained, arguments, fragments):
    assert_says(refused("stage", *arguments, store=trained.url), *fragments)


ROWS = [json.dumps({"id": f"t{index}", "instruction": f"What is {index} + 1?"}) for index in range(4)]


@pytest.mark.parametrize(
    ("lines", "fragments"),
    [
        ([*ROWS, ROWS[1]], ["questions.jsonl, line 5", "task id 't1'", "line 2"]),
        ([*ROWS, '{"id": "t9", "question": "?"}'], ["questions.jsonl, line 5", "no column 'instruction'", "question"]),
        ([*ROWS[:2], '{"id": "t9", ', *ROWS[2:]], ["questions.jsonl, line 3", "invalid JSON"]),
        ([*ROWS, '{"id": null, "instruction": "?"}'], ["questions.jsonl, line 5", "'id'", "null"]),
        ([], ["questions.jsonl", "no rows"]),
        (["", "  "], ["questions.jsonl", "no rows"]),
        (None, ["no file", "questions.jsonl"]),
    ],
)
@pytest.mark.parametrize("how", ["stage", "train"])
def test_a_task_file_that_cannot_be_used_is_told_with_its_line(refused, written, tmp_path, lines, fragments, how):
    file = tmp_path / "questions.jsonl"
    if lines is not None:
        file.write_text("\n".join(lines))
    if how == "stage":
        arguments = ["source.type=file", "fields.id={id}", f"execution.location={file}"]
        assert_says(refused("stage", "tasks", *arguments), *fragments)
    else:
        settings = {"source": {"type": "file"}, "fields": {"id": "{id}"}}
        recipe_file = written(tasks=settings, execution__tasks__location=str(file))
        assert_says(refused("train", recipe_file), *fragments)


def test_a_parquet_task_file_that_is_damaged_is_told(refused, tmp_path):
    file = tmp_path / "questions.parquet"
    file.write_bytes(b"PAR1 this is no parquet file PAR1")
    message = refused("stage", "tasks", "source.type=file", f"execution.location={file}")
    assert_says(message, "questions.parquet", "cannot be read as Parquet")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["show", "rollouts/ffffffff"], ["no artifact rollouts/ffffffff", "rollouts/"]),
        (["show", "rolouts/ff"], ["no artifact rolouts/ff", "did you mean 'rollouts'?"]),
        (["show", "tiny"], ["'tiny' is not a reference", "RUN:KIND"]),
        (["show", "tiny:reward"], ["tiny", "'reward'", "did you mean 'rewards'?"]),
        (["show", "tinny:rewards"], ["run 'tinny'", "tiny"]),
        (["show", "tiny@7:rewards"], ["no finished iteration 7", "0, 1"]),
        (["show", "../../etc/passwd"], ["is not a reference"]),
        (["show", "rollouts/../rewards"], ["is not a reference"]),
        (["lineage", "policy/0000"], ["no artifact policy/0000"]),
        (["diff", "tiny:rewards", "tiny:rewrads"], ["'rewrads'", "did you mean 'rewards'?"]),
        (["verify", "tiny:nothing"], ["'nothing'"]),
        (["policy", "export", "tiny:rollouts", "folder"], ["kind rollouts", "policy is needed"]),
        (["policy", "export", "tiny:policy", "."], ["exists already"]),
        (["stage", "rewards", "rollouts=rollouts/ffffffff", "grader=exact"], ["no artifact rollouts/ffffffff"]),
        (["stage", "rewards", "rollouts=tiny:tasks", "grader=exact"], ["kind tasks", "rollouts is needed"]),
        (["stage", "policy", "advantages=tiny:rewards"], ["kind rewards", "advantages is needed"]),
        (["eval", "arithmetic", "--policy", "tiny:tasks"], ["kind tasks", "policy is needed"]),
        (["eval", "arithmetic", "--policy", "policy/ffffffff"], ["no artifact policy/ffffffff"]),
        (["eval", "arithmetic"], ["eval needs a policy", "--policy"]),
        (["eval", "arithmetics", "--policy", "tiny:policy"], ["unknown benchmark 'arithmetics'"]),
        (["eval", "arithmetic", "--policy", "tiny:policy", "--grader", "numerc"], ["unknown grader 'numerc'"]),
        (["eval", "arithmetic", "--policy", "tiny:policy", "rollout.n=2"], ["unknown key 'rollout'", "'rollouts'"]),
    ],
)
def test_a_reference_that_leads_nowhere_or_elsewhere_is_refused(refused, trained, arguments, fragments):
    assert_says(refused(*arguments, store=trained.url), *fragments)


def test_a_reference_that_could_be_several_artifacts_lists_them(refused, tmp_path):
    store = open_store(tmp_path / "many")
    made = [given(store, "tasks", {"tasks": task_rows(1, benchmark=f"b{n}")}) for n in range(17)]
    first = [manifest.key[0] for manifest in made]
    shared = next(digit for digit in first if first.count(digit) > 1)
    message = refused("show", f"tasks/{shared}", store=store.url)
    assert_says(message, f"tasks/{shared} could be {first.count(shared)} artifacts", "give more of the key")
    assert all(f"tasks/{m.key[:16]}" in message for m in made if m.key[0] == shared)


@pytest.mark.parametrize("command", [["runs"], ["show", "tiny:rewards"], ["stage", "tasks", "benchmark=arithmetic"]])
def test_a_store_that_cannot_be_is_refused(refused, tmp_path, command):
    (tmp_path / "a-file").write_text("not a folder")
    assert_says(refused(*command, store=tmp_path / "a-file"), "a-file")
    assert_says(refused(*command, store=tmp_path / "a-file" / "below"), "a-file/below")
    assert_says(refused(*command, store="nowhere://bucket/shelf"), "nowhere")
    assert_says(refused(*command, store="s3://"), "no bucket")
    assert_says(refused(*command, store="s3://key:word@bucket/shelf"), "credential")


def test_a_store_that_cannot_be_written_is_refused_by_every_command_that_writes(refused, written, trained):
    cannot = "/proc/rollmill/store"  # a file system without room for it, also for the superuser
    for command in (["stage", "tasks", "benchmark=arithmetic"], ["train", written()], ["gc", "--delete"]):
        assert_says(refused(*command, store=cannot), cannot, "cannot be written")


def test_a_store_that_is_not_there_is_not_created_by_looking(refused, tmp_path):
    for command in (
        ["runs"],
        ["show", "tiny:rewards"],
        ["lineage", "tiny:rewards"],
        ["gc"],
        ["verify", "tiny:rewards"],
    ):
        assert_says(refused(*command), "there is no store at", "new-store")


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_told(tmp_path, monkeypatch):
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    words = ("stage", "tasks", "benchmark=arithmetic", "--store", "s3://bucket/shelf")
    message = message_of(rollmill_process(*words, cwd=tmp_path, timeout_s=180))
    assert_says(message, "s3://bucket/shelf")
    assert S3_ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in message


def test_a_bucket_that_is_not_there_is_told(refused, s3_client):
    for command in (["stage", "tasks", "benchmark=arithmetic"], ["runs"]):
        assert_says(refused(*command, store="s3://rollmill-nowhere/shelf"), "s3://rollmill-nowhere")


@pytest.mark.parametrize("lacking", ["tokenizer", "chat template", "config.json"])
@pytest.mark.parametrize("how", ["import", "train"])
def test_a_policy_folder_without_a_part_is_refused(refused, written, trained, tmp_path, lacking, how):
    folder = tmp_path / "model"
    assert rollmill("policy", "export", "tiny:policy", folder, "--store", trained.url).code == 0
    files = {"tokenizer": "tokenizer*", "chat template": "chat_template*", "config.json": "config.json"}
    for file in folder.glob(files[lacking]):
        file.unlink()
    if how == "import":
        message = refused("policy", "import", folder)
    else:
        message = refused("train", written(policy={"source": str(folder)}))
    assert_says(message, str(folder), lacking)


def manifest_of(trained: Trained, name: str) -> tuple[Path, dict[str, Any]]:
    found = trained.store.resolve(f"{trained.run}:{name}")
    path = Path(trained.url) / "artifacts" / found.kind / found.key / "manifest.json"
    return path, json.loads(path.read_text())


def file_of(trained: Trained, name: str, table: str) -> Path:
    path, manifest = manifest_of(trained, name)
    return path.parent / next(entry["path"] for entry in manifest["files"] if entry["table"] == table)


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.unlink()
    if how == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :])
    elif how == "overwritten":
        path.write_bytes(b"x" * len(content))
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        assert how == "removed"


@pytest.mark.parametrize("how", ["flipped", "overwritten", "truncated", "removed"])
def test_a_damaged_parquet_file_is_named_by_every_command_that_reads_it(refused, trained_copy, how):
    file = file_of(trained_copy, "rollouts", "episodes")
    damage(file, how)
    commands = [["verify", "tiny:rollouts"], ["stage", "rewards", "rollouts=tiny:rollouts", "grader=exact"]]
    if how != "flipped":  # no reader of Parquet notices every flipped byte; verifying is for that
        commands.append(["show", "tiny:rollouts"])
    for command in commands:
        assert_says(refused(*command, store=trained_copy.url), file.name)


@pytest.mark.parametrize("how", ["overwritten", "truncated"])
def test_a_damaged_manifest_is_named_by_every_command_that_reads_it(refused, trained_copy, how):
    path, _ = manifest_of(trained_copy, "rollouts")
    ref = f"rollouts/{path.parent.name}"
    damage(path, how)
    reads = [["show", ref], ["lineage", "tiny:rewards"], ["diff", ref, ref], ["verify", ref]]
    reads += [["stage", "rewards", f"rollouts={ref}", "grader=exact"]]
    for command in reads:
        assert_says(refused(*command, store=trained_copy.url), f"{path.parent.name}/manifest.json", "is damaged")
    done = rollmill("train", trained_copy.recipe, "run=again", "--store", trained_copy.url)
    assert done.code == 2, done.text
    assert "Traceback" not in done.text
    assert_says(done.err, f"error: {trained_copy.url}", f"{path.parent.name}/manifest.json", "is damaged")


def test_a_changed_manifest_is_noticed(refused, trained_copy):
    path, manifest = manifest_of(trained_copy, "rollouts")
    manifest["files"][0]["sha256"] = "0" * 64
    path.unlink()
    path.write_text(json.dumps(manifest))
    assert_says(refused("show", "tiny:rollouts", store=trained_copy.url), "manifest.json", "does not fit")


def test_damaged_records_of_a_run_are_named(refused, trained_copy):
    iteration = Path(trained_copy.url) / "runs/tiny/iterations/00001.json"
    damage(iteration, "truncated")
    assert_says(refused("show", "tiny:rewards", store=trained_copy.url), "iterations/00001.json", "is damaged")
    assert_says(refused("runs", store=trained_copy.url), "iterations/00001.json", "is damaged")
    record = Path(trained_copy.url) / "runs/tiny/run.json"
    damage(record, "overwritten")
    assert_says(refused("train", trained_copy.recipe, "run=tiny", store=trained_copy.url), "run.json", "is damaged")


@pytest.mark.parametrize("name", ["a/b", "../up", "..", "/tmp/here", "a=b", "a b", ".hidden", "x" * 200])
def test_a_run_name_that_could_leave_the_store_is_refused(refused, written, name):
    assert_says(refused("train", written(run=name)), "run name", "folder in the store")


def test_a_run_name_with_a_path_is_refused_by_eval_too(refused, trained):
    message = refused("eval", "arithmetic", "--policy", "tiny:policy", "run=../up", store=trained.url)
    assert_says(message, "run name '../up'")


def test_a_run_name_that_stands_for_another_config_is_refused_with_the_differences(refused, trained):
    message = refused("train", trained.recipe, "run=tiny", "update.optimizer.lr=0.5", store=trained.url)
    assert_says(message, "run 'tiny' exists with another config", "update.optimizer.lr", "0.01", "0.5")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["trian", "demo"], ["No such command 'trian'"]),
        (["train"], ["Missing argument 'CONFIG'"]),
        (["stage", "tasks", "--sede", "1"], ["No such option", "--seed"]),
        (["stage", "tasks", "--seed", "-1"], ["'--seed'", "greater than or equal to 0"]),
        (["eval", "arithmetic", "--limit", "0"], ["'--limit'", "greater than or equal to 1"]),
    ],
)
def test_a_command_line_that_is_wrong_is_explained(tmp_path, monkeypatch, arguments, fragments):
    monkeypatch.chdir(tmp_path)
    done = rollmill(*arguments)
    assert done.code == 2
    assert "Traceback" not in done.text
    assert not list(tmp_path.iterdir())
    assert_says(done.err, *fragments)


def test_the_console_script_prints_one_message_and_exits_with_2(tmp_path):
    done = rollmill_process("train", "nowhere.yaml", "--store", tmp_path / "store", cwd=tmp_path)
    assert message_of(done) == "error: no config file nowhere.yaml\n"
    assert done.out == ""
    assert not list(tmp_path.iterdir())
