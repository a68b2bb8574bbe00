"""``rollmill model``: other people's models are stored under names, without their keys, and tried."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.commands import command, rollmill
from tests.stages.rollouts.endpoint_server import KEY, MODEL, EndpointServer, answer_with


@pytest.fixture
def server() -> Iterator[EndpointServer]:
    made = EndpointServer()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MY_ENDPOINT", KEY)
    return tmp_path / "config"


def stored(config_home: Path) -> str:
    return (config_home / "rollmill" / "models.yaml").read_text()


def test_a_model_that_flags_describe_is_stored_listed_tried_and_removed(server, config_home):
    flags = ("--base-url", f"{server.url}/", "--model", MODEL, "--key-env", "MY_ENDPOINT", "--max-concurrency", "3")
    done = rollmill("model", "setup", "big", *flags)
    assert done.code == 0, done.text
    assert KEY not in stored(config_home)
    listed = rollmill("model", "list").out.splitlines()[1].split()
    assert listed == ["big", MODEL, server.url, "MY_ENDPOINT", "no", "limit", "3"]
    tried = rollmill("model", "test", "big")
    assert tried.code == 0, tried.text
    assert f"{MODEL} at {server.url} answers in " in tried.out
    assert "(3 tokens): hello" in tried.out
    assert rollmill("model", "remove", "big").code == 0
    assert "no models are stored yet" in rollmill("model", "list").out
    again = rollmill("model", "test", "big")
    assert again.code == 2
    assert "no model is stored as 'big'" in again.err


def test_setup_asks_for_what_is_not_given(server, config_home):
    answers = f"asked\n{server.url}\n{MODEL}\nMY_ENDPOINT\n120\n"
    done = subprocess.run(command("model", "setup"), input=answers, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed = rollmill("model", "list").out.splitlines()[1].split()
    assert listed == ["asked", MODEL, server.url, "MY_ENDPOINT", "120", "16"]


def test_a_name_is_replaced_and_the_others_stay(server):
    for name, model in (("one", "a"), ("two", "b"), ("one", "c")):
        assert rollmill("model", "setup", name, "--base-url", server.url, "--model", model).code == 0
    assert [line.split()[:2] for line in rollmill("model", "list").out.splitlines()[1:]] == [["one", "c"], ["two", "b"]]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--base-url", "host/v1"), "the base URL must be like https://host/v1"),
        (("--base-url", "https://me:secret-word@host/v1"), "may hold no user, key or question mark"),
        (("--base-url", "https://host/v1?api_key=secret-word"), "may hold no user, key or question mark"),
        (("--key-env", "sk-secret-word"), "must be the name of an environment variable"),
        (("--key-env", "secret-word"), "must be the name of an environment variable"),
        (("--omit", "colour"), "omit.0"),
        (("--requests-per-minute", "0"), "requests_per_minute"),
    ],
)
def test_what_cannot_be_right_is_refused_and_nothing_is_stored(config_home, flags, said):
    given = {"--base-url": "https://host/v1", "--model": "m"} | {flags[0]: flags[1]}
    done = rollmill("model", "setup", "bad", *[word for pair in given.items() for word in pair])
    assert done.code == 2
    assert said in done.err
    assert "secret-word" not in done.text
    assert not list(config_home.rglob("*.yaml"))


def test_a_name_that_could_be_a_path_is_refused(server):
    done = rollmill("model", "setup", "../x", "--base-url", server.url, "--model", "m")
    assert done.code == 2
    assert "model name '../x'" in done.err


@pytest.mark.parametrize(
    ("key", "model", "said"),
    [
        ("sk-wrong-0123456789", MODEL, "is the key in MY_ENDPOINT the right one"),
        (KEY, "modle", "has no model 'modle'"),
        ("", MODEL, "the environment variable MY_ENDPOINT holds no key"),
    ],
)
def test_a_test_says_what_is_wrong_and_never_the_key(server, monkeypatch, key, model, said):
    monkeypatch.setenv("MY_ENDPOINT", key)
    rollmill("model", "setup", "m", "--base-url", server.url, "--model", model, "--key-env", "MY_ENDPOINT")
    done = rollmill("model", "test", "m")
    assert done.code in (1, 2)
    assert said in done.err
    assert not key or key not in done.text


def test_a_key_that_the_endpoint_repeats_is_not_shown(server):
    server.answer = lambda body: answer_with({"role": "assistant", "content": f"your key is {KEY}"})
    rollmill("model", "setup", "m", "--base-url", server.url, "--model", MODEL, "--key-env", "MY_ENDPOINT")
    done = rollmill("model", "test", "m")
    assert "your key is ***" in done.out
    assert KEY not in done.text


def test_a_file_that_was_spoilt_by_hand_is_named(config_home):
    (config_home / "rollmill").mkdir(parents=True)
    (config_home / "rollmill" / "models.yaml").write_text("models: {a: {base_url: http://x/v1, modle: b}}\n")
    done = rollmill("model", "list")
    assert done.code == 2
    assert "models.yaml" in done.err
    assert "did you mean 'model'?" in done.err


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    done = rollmill("model", "setup", "m", "--base-url", "http://x/v1", "--model", "m")
    assert done.code == 2
    assert "cannot write" in done.err
