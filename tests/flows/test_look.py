"""Commands that look: every number that they show comes from an artifact, and they write nothing."""

from pathlib import Path

import pytest

import rollmill as public
from schemas.tables import TABLES
from stages.artifacts.store import open_store
from tests.builders import stored_run
from tests.flows.commands import Done, contents, rollmill
from tests.flows.trained import Trained


@pytest.fixture
def look(trained: Trained):
    """Runs a command on the trained store that must succeed and change nothing; returns what it printed."""

    def run(*arguments: str) -> str:
        before = contents(Path(trained.url))
        done = rollmill(*arguments, "--store", trained.url)
        assert done.code == 0, done.text
        assert done.err == ""
        assert contents(Path(trained.url)) == before
        return done.out

    return run


def test_runs_lists_what_each_run_has_finished(look, trained):
    rewards = [trained.store.resolve(f"tiny@{n}:rewards").summary["mean_reward"] for n in (0, 1)]
    (line,) = [line for line in look("runs").splitlines() if line.split()[:1] == ["tiny"]]
    assert " ".join(line.split()).endswith(f"2/2 finished {rewards[0]:.4g} → {rewards[1]:.4g}")


def test_runs_of_an_empty_store_says_how_to_begin(tmp_path):
    (tmp_path / "store").mkdir()
    done = rollmill("runs", "--store", tmp_path / "store")
    assert (done.code, done.err) == (0, "")
    assert "has no runs yet" in done.out
    assert "rollmill train" in done.out


def test_runs_shows_one_that_is_not_finished(tmp_path):
    store = open_store(tmp_path / "store")
    stored_run(store, "demo")
    (tmp_path / "store/runs/demo/end.json").unlink()
    (tmp_path / "store/runs/demo/iterations/00001.json").unlink()
    (line,) = [line for line in rollmill("runs", "--store", store.url).out.splitlines() if "demo" in line]
    assert " 1/2 " in line
    assert "not finished" in line


def test_show_gives_schema_rows_summary_and_sample_rows(look, trained):
    manifest = trained.store.resolve("tiny:rollouts")
    shown = look("show", "tiny:rollouts", "-n", "1")
    for fact in (manifest.key, manifest.digest, str(manifest.inputs["policy"][0]), str(manifest.inputs["tasks"][0])):
        assert fact in shown
    for table in ("episodes", "steps"):
        assert f"{table} version 1, 16 rows" in shown
        for column in TABLES[table].schema.names:
            assert f"\n{column} " in shown, column
    for name, value in manifest.summary.items():
        if isinstance(value, int):
            assert f"summary {name}" in shown
            assert f"{value:,}" in shown
    row = public.scan(manifest, "steps", store=trained.store).head(1).collect().row(0, named=True)
    assert f" {row['seed']} " in shown, "a seed is a name and has no thousands separators"
    assert row["policy_id"] in shown
    assert f"[{', '.join(map(str, row['response_ids']))}] (6)" in shown


def test_show_can_leave_rows_out_and_verify(look):
    assert "response_ids" in look("show", "tiny:rollouts", "-n", "0")
    assert "verified: the checksums of all files hold" in look("show", "tiny:rollouts", "-n", "0", "--verify")
    assert "model.safetensors" in look("show", "tiny:policy", "-n", "0")


def test_an_artifact_is_found_by_every_form_of_its_name(look, trained):
    manifest = trained.store.resolve("tiny@1:rewards")
    forms = ["tiny:rewards", "tiny@1:rewards", f"rewards/{manifest.key}", f"rewards/{manifest.key[:10]}"]
    forms += [f"{trained.url}/artifacts/rewards/{manifest.key}"]
    assert len({look("show", form) for form in forms}) == 1


def test_what_looks_like_markup_is_shown_as_it_stands(trained_copy):
    """Brackets, colons and tags stand in prompts and answers; they are no markup."""
    text = "[/INST] [bold]a[/bold] :heart: {expression}"
    done = rollmill(
        "stage", "tasks", "benchmark=arithmetic", "limit=1", f"fields.instruction='{text}'", "--store", trained_copy.url
    )
    assert done.code == 0, done.text
    (line,) = [line for line in done.out.splitlines() if line.startswith("Look at it: ")]
    ref = line.split("rollmill show ")[1].split()[0]
    shown = rollmill("show", ref, "--store", trained_copy.url)
    assert shown.code == 0, shown.text
    assert shown.out.count("[/INST] [bold]a[/bold] :heart: ") == 2, "in the config, and in the row"
    compared = rollmill("diff", ref, "tiny:tasks", "--store", trained_copy.url)
    assert text in compared.out


def test_lineage_shows_each_artifact_once_with_its_inputs(look, trained):
    shown = look("lineage", "tiny:report")
    nodes = {node.ref for _, _, node, again in trained.store.lineage("tiny:report").walk() if not again}
    for ref in nodes:
        lines = [line for line in shown.splitlines() if str(ref) in line]
        assert sum("shown elsewhere" not in line for line in lines) == 1, ref


def test_lineage_says_what_is_no_longer_there(trained_copy):
    start = trained_copy.store.iterations("tiny")[0].artifacts["policy_in"]
    (Path(trained_copy.url) / f"artifacts/policy/{start.key}/manifest.json").unlink()
    shown = rollmill("lineage", "tiny:policy", "--store", trained_copy.url)
    assert shown.code == 0, shown.text
    assert f"{start} (no longer in the store)" in shown.out


def test_diff_shows_config_inputs_and_summary(look, trained):
    first, last = (trained.store.resolve(f"tiny@{n}:rewards") for n in (0, 1))
    shown = look("diff", "tiny@0:rewards", "tiny:rewards")
    for text in (str(first.ref), str(last.ref), str(first.inputs["rollouts"][0]), str(last.inputs["rollouts"][0])):
        assert text in shown
    (line,) = [line for line in shown.splitlines() if "mean_reward" in line]
    assert line.split()[-2:] == [f"{m.summary['mean_reward']:.4g}" for m in (first, last)]
    assert "their content is different" in shown
    assert look("diff", "tiny:rewards", "tiny:rewards").startswith("nothing differs")


def test_verify_reads_everything_of_an_artifact_and_of_its_lineage(look, trained):
    manifest = trained.store.resolve("tiny:policy")
    size = sum(entry.bytes for entry in manifest.files)
    assert look("verify", "tiny:policy") == f"{manifest.ref}: every checksum holds ({size:,} bytes read)\n"
    assert len(look("verify", "tiny:policy", "--lineage").splitlines()) == 10


def test_gc_shows_leftovers_and_deletes_only_when_told(trained_copy):
    left = Path(trained_copy.url) / "artifacts/tasks" / ("0" * 64) / "data/tasks/00000-000000000000.parquet"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"left by a process that was killed")

    def gc(*arguments: str) -> Done:
        done = rollmill("gc", *arguments, "--store", trained_copy.url)
        assert done.code == 0, done.text
        return done

    assert gc().out == "nothing to collect\n", "what is young stays"
    shown = gc("--grace-hours", "0").out
    assert left.name in shown
    assert "would go; delete with --delete" in shown
    assert left.exists()
    assert "deleted" in gc("--grace-hours", "0", "--delete").out
    assert not left.exists()
    assert rollmill("verify", "tiny:policy", "--lineage", "--store", trained_copy.url).code == 0


def test_a_policy_is_exported_as_a_folder_that_transformers_loads(look, trained, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "model"
    assert str(folder) in look("policy", "export", "tiny:policy", str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.hidden_size == 32
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "What is 1 + 1?"}], tokenize=False)
    assert "What is 1 + 1?" in text
    assert (folder / "model.safetensors").stat().st_mode & 0o200, "the copy may be changed"


def test_doctor_tells_what_is_there_and_leaves_no_store_behind(tmp_path):
    url = tmp_path / "new"
    done = rollmill("doctor", "--store", url)
    assert done.code == 0, done.text
    for what in ("python", "torch", "deepspeed", "engine transformers", "compiler", f"store {url}"):
        assert any(what in line for line in done.out.splitlines()), what
    assert "can be written" in done.out
    assert not url.exists()


def test_doctor_fails_where_the_store_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = rollmill("doctor", "--store", tmp_path / "file" / "store")
    assert done.code == 1
    (line,) = [line for line in done.out.splitlines() if "cannot be written" in line]
    assert line.split()[0] == "bad"


def test_doctor_of_a_store_with_runs_counts_them(look):
    assert "1 runs" in look("doctor")


@pytest.mark.parametrize(
    "command",
    ["train", "eval", "stage", "policy", "runs", "show", "lineage", "diff", "doctor", "verify", "gc", "serve"],
)
def test_help_says_what_a_command_does_and_what_it_takes(command):
    done = rollmill(command, "--help")
    assert done.code == 0
    assert len(done.out.splitlines()) > 8
    assert command in rollmill("--help").out


@pytest.mark.parametrize("stage", ["tasks", "rollouts", "rewards", "advantages", "policy", "report"])
def test_describe_lists_the_inputs_and_settings_of_a_stage(stage, tmp_path, monkeypatch):
    from flows.cli.stage import described
    from flows.registry import stage_named

    monkeypatch.chdir(tmp_path)
    done = rollmill("stage", stage, "--describe")
    assert done.code == 0
    chosen = stage_named(stage)
    for name, _ in [*described(chosen.Config), *described(chosen.Execution)]:
        assert f"\n {name} " in done.out, name
    for name in chosen.inputs:
        assert f"input {name}: kind" in done.out
    assert not list(tmp_path.iterdir())
