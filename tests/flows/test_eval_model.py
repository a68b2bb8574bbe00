"""``rollmill eval --model``: the same agents against other people's models, over HTTP and through the gateway."""

import json
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import polars as pl
import pytest
from aiohttp import web

import rollmill as public
from flows.models import store_model, stored_model
from stages.artifacts.store import open_store
from tests.flows.commands import Done, rollmill
from tests.stages.rollouts.endpoint_server import KEY, MODEL, EndpointServer, answer_with, refusal

NULL = ("policy_id", "logprob_mode", "prefix_length", "prompt_ids", "response_ids", "logprobs")


@pytest.fixture
def server() -> Iterator[EndpointServer]:
    made = EndpointServer()
    yield made
    made.close()


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: EndpointServer) -> str:
    """A store, with the server stored as the model ``other``."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MY_ENDPOINT", KEY)
    flags = ("--base-url", server.url, "--model", MODEL, "--key-env", "MY_ENDPOINT")
    assert rollmill("model", "setup", "other", *flags).code == 0
    return str(tmp_path / "store")


def evaluate(url: str, *more: str, model: str = "other", limit: int = 4) -> Done:
    return rollmill("eval", "arithmetic", "--model", model, "--limit", str(limit), "run=e", *more, "--store", url)


def rows(url: str, table: str) -> pl.DataFrame:
    return public.scan("e", table, store=open_store(url)).collect()


def files_below(folder: str) -> list[Path]:
    return [path for path in Path(folder).parent.rglob("*") if path.is_file()]


def test_an_evaluation_of_an_endpoint_has_text_and_usage_and_null_for_what_it_does_not_give(url, server):
    done = evaluate(url, "-n", "2")
    assert done.code == 0, done.text
    (record,) = open_store(url).iterations("e")
    assert set(record.artifacts) == {"tasks", "rollouts", "rewards", "report"}
    steps, rewards, episodes = (rows(url, name) for name in ("steps", "rewards", "episodes"))
    assert steps.height == 8
    for name in NULL:
        assert steps[name].null_count() == 8, name
    assert set(rewards["verdict"]) == {"correct"}, "the server adds and multiplies"
    assert set(episodes["prompt_tokens"]) == {11}
    assert set(episodes["response_tokens"]) == {3}
    assert set(steps["finish_reason"]) == {"stop"}
    assert sorted(steps["seed"]) == sorted(body["seed"] for body in server.asked)
    assert len(set(steps["seed"])) == 8
    for body in server.asked:
        assert (body["temperature"], body["top_p"], body["max_tokens"]) == (1.0, 1.0, 256)
        assert "top_k" not in body
    said = json.loads(steps["messages"][0])
    assert said in [body["messages"] for body in server.asked]
    manifest = open_store(url).manifest(record.artifacts["rollouts"])
    assert manifest.summary["response_tokens"] == 24
    assert manifest.config["engine"]["base_url"] == server.url
    assert manifest.config["engine"]["model"] == MODEL


def test_what_looks_at_a_run_looks_at_this_one_too(url):
    done = evaluate(url)
    assert done.code == 0, done.text
    (page,) = [line.rpartition("Report: ")[2] for line in done.out.splitlines() if "Report: " in line]
    assert "<!doctype html>" in Path(page).read_text().lower()
    for words in (
        ("runs",), ("show", "e:rollouts"), ("show", "e:report"), ("show", "e:rewards", "--verify"),
        ("lineage", "e:report"), ("diff", "e:rollouts", "e:rewards"),
    ):  # fmt: skip
        looked = rollmill(*words, "--store", url)
        assert looked.code == 0, looked.text
    again = evaluate(url)
    assert "has finished; no stage was executed" in again.out


def test_the_key_is_in_no_file_and_no_word(url, server, monkeypatch, tmp_path):
    server.answer = lambda body: answer_with({"role": "assistant", "content": f"the key is {KEY}", "reasoning": KEY})
    agent = tmp_path / "teller.py"
    agent.write_text(
        "import os\n\nimport rollmill\n\n\n@rollmill.rollout\nasync def tell(task, config):\n"
        "    await config.chat([{'role': 'user', 'content': 'tell me'}])\n"
        "    if task.instruction.endswith('?'):\n        raise ValueError(os.environ['MY_ENDPOINT'])\n"
    )
    done = evaluate(url, f"rollouts.agent={agent}:tell")
    assert done.code == 0, done.text
    assert set(rows(url, "steps")["response"]) == {"the key is ***"}
    assert set(rows(url, "episodes")["error"]) == {"***"}
    assert server.keys[0] == KEY
    assert KEY not in done.text
    found = files_below(url)
    assert any("journal" in path.parts for path in found)
    for path in found:
        assert KEY.encode() not in path.read_bytes(), path
        if path.suffix == ".parquet":
            assert KEY not in str(pl.read_parquet(path).to_dicts()), path


def test_the_name_and_the_address_are_in_the_key_and_how_it_is_asked_is_not(url, server):
    def key_with(*more: str) -> str:
        run = f"run-{len(open_store(url).runs())}"
        words = ("eval", "arithmetic", "--model", "other", "--limit", "1", f"run={run}", *more, "--store", url)
        done = rollmill(*words)
        assert done.code == 0, done.text
        (record,) = open_store(url).iterations(run)
        return record.artifacts["rollouts"].key

    first = key_with()
    n_asked = len(server.asked)
    assert key_with("rollouts.engine.requests_per_minute=6000", "rollouts.engine.max_concurrency=2") == first
    assert len(server.asked) == n_asked, "it was on the shelf"
    same_place = server.url.replace("127.0.0.1", "localhost")
    assert key_with(f"rollouts.engine.base_url={same_place}") != first
    assert len(server.asked) == n_asked + 1


def in_a_second_as_a_date() -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=1.5), usegmt=True)


@pytest.mark.parametrize("wait", [lambda: "1", in_a_second_as_a_date], ids=["seconds", "date"])
def test_a_call_that_came_too_often_waits_as_long_as_it_is_told_and_so_do_the_others(url, server, wait):
    server.faults = [lambda: refusal(429, "slow down", Retry_After=wait())]
    done = evaluate(url, "rollouts.engine.max_concurrency=1")
    assert done.code == 0, done.text
    assert rows(url, "steps").height == 4
    gaps = [later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)]
    assert len(server.times) == 5
    assert gaps[0] > 0.4, "a date has whole seconds"
    assert set(rows(url, "episodes")["status"]) == {"completed"}


def test_calls_are_spread_and_never_more_at_once_than_they_may(url, server):
    server.seconds = 0.05
    done = evaluate(url, "rollouts.engine.requests_per_minute=1200", "rollouts.engine.max_concurrency=2", limit=12)
    assert done.code == 0, done.text
    assert server.most_running <= 2
    first, *_, last = server.times
    assert last - first > 11 * 60 / 1200 * 0.9


def test_a_server_that_fails_now_and_then_is_asked_again(url, server):
    server.faults = [
        lambda: refusal(500, "the model is in pieces"),
        lambda: web.Response(text="<html>it works!</html>", content_type="text/html"),
        lambda: web.json_response({"choices": []}),
        lambda: web.json_response({"error": {"message": "upstream failed"}}),
    ]
    done = evaluate(url, "rollouts.engine.max_concurrency=4")
    assert done.code == 0, done.text
    assert set(rows(url, "rewards")["verdict"]) == {"correct"}


Fault = Callable[[EndpointServer], None]


def fails_with(answer: Callable[[], web.Response]) -> Fault:
    def set_up(server: EndpointServer) -> None:
        server.fails = lambda body: answer()

    return set_up


def hangs(server: EndpointServer) -> None:
    server.seconds = 30


@pytest.mark.parametrize(
    ("fault", "setting", "said"),
    [
        (lambda server: None, "rollouts.engine.key_env=OTHER_VARIABLE", "is the key in OTHER_VARIABLE the right one"),
        (fails_with(lambda: web.Response(text="<html>")), "seed=0", "makes no sense (it is no JSON): <html>"),
        (fails_with(lambda: refusal(400, "no seed here")), "seed=0", "has answered no call of model"),
    ],
)
def test_an_evaluation_that_cannot_be_made_ends_with_what_to_do(url, server, monkeypatch, fault, setting, said):
    monkeypatch.setenv("OTHER_VARIABLE", "sk-wrong-0123456789")
    fault(server)
    done = evaluate(url, setting, "rollouts.engine.attempts=2")
    assert done.code == 1, done.text
    assert said in done.err
    assert "Traceback" not in done.err
    assert KEY not in done.text
    assert "sk-wrong-0123456789" not in done.text


@pytest.mark.parametrize(
    ("fault", "changed", "said"),
    [
        (lambda server: None, {"model": "other-2"}, "has no model 'other-2'"),
        (lambda server: None, {"base_url": "http://127.0.0.1:1/v1"}, "asked 2 times in vain"),
        (lambda server: None, {"base_url": "http://no-such-host.invalid/v1"}, "asked 2 times in vain"),
        (lambda server: None, {"key_env": None}, "it wants a key: name the variable that holds it"),
        (fails_with(lambda: refusal(500, "in pieces")), {}, "asked 2 times in vain; the last time: status 500"),
        (fails_with(lambda: web.json_response({"choices": [{}]})), {}, "makes no sense (its choice has no message)"),
        (fails_with(lambda: refusal(429, "later", Retry_After="3600")), {}, "asks to wait 3600 s"),
        (fails_with(lambda: refusal(429, "pay", code="insufficient_quota")), {}, "wants to be paid first"),
        (fails_with(lambda: web.Response(status=302, headers={"Location": "/"})), {}, "is no such endpoint"),
        (hangs, {"timeout_s": 0.2}, "no answer within 0.2 s"),
    ],
)
def test_an_endpoint_that_cannot_answer_is_named_with_what_to_do(url, server, fault, changed, said):
    store_model("other", stored_model("other").model_copy(update={"attempts": 2, **changed}))
    fault(server)
    done = rollmill("model", "test", "other")
    assert done.code == 1, done.text
    assert said in done.err
    assert KEY not in done.text


def test_a_missing_key_and_an_unknown_model_are_refused_before_anything_is_asked(url, server, monkeypatch):
    monkeypatch.delenv("MY_ENDPOINT")
    done = evaluate(url)
    assert done.code == 2
    assert "the environment variable MY_ENDPOINT holds no key" in done.err
    done = evaluate(url, model="othr")
    assert done.code == 2
    assert "did you mean 'other'?" in done.err
    done = rollmill("eval", "arithmetic", "--store", url)
    assert "eval needs a policy, or a model that others serve" in done.err
    done = rollmill("eval", "arithmetic", "--model", "other", "--policy", "x:policy", "--store", url)
    assert "and not both" in done.err
    assert not server.times


def test_the_same_command_goes_on_with_the_calls_that_were_answered(url, server):
    server.fails = lambda body: refusal(401, "the key was revoked") if len(server.asked) >= 2 else None
    done = evaluate(url, "rollouts.engine.max_concurrency=1")
    assert done.code == 1
    assert "the key was revoked" in done.err
    answered = [json.dumps(body["messages"]) for body in server.asked]
    assert len(answered) == 2
    server.fails = lambda body: None
    done = evaluate(url, "rollouts.engine.max_concurrency=1")
    assert done.code == 0, done.text
    asked = [json.dumps(body["messages"]) for body in server.asked]
    assert len(asked) == 4
    assert len(set(asked)) == 4, "none was asked twice"
    assert set(rows(url, "rewards")["verdict"]) == {"correct"}


def test_a_call_that_is_refused_is_its_own_episodes_error(url, server):
    refused = iter([True])
    server.fails = lambda body: refusal(400, "too long", code="context_length_exceeded") if next(refused, 0) else None
    done = evaluate(url)
    assert done.code == 0, done.text
    episodes, errors = rows(url, "episodes"), rows(url, "call_errors")
    assert sorted(episodes["status"]) == ["completed"] * 3 + ["error"]
    (message,) = errors["message"]
    assert "refuses the call (status 400: too long)" in message


def test_tool_calls_reasoning_and_finish_reasons_pass_through_the_gateway(url, server, tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}

    def answer(body):
        if body["messages"][-1]["role"] == "tool":
            return answer_with({"role": "assistant", "content": "so it is 3"}, "length", usage=False)
        message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "I must add"}
        return answer_with(message, "tool_calls")

    server.answer = answer
    agent = tmp_path / "adder.py"
    agent.write_text(
        "from openai import OpenAI\n\n"
        "TOOLS = [{'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object'}}}]\n\n\n"
        "def add(task, config):\n"
        "    client = OpenAI(base_url=config.base_url, api_key=config.api_key)\n"
        "    ask = client.chat.completions.create\n"
        "    messages = [{'role': 'user', 'content': task.instruction}]\n"
        "    first = ask(model=config.model, messages=messages, tools=TOOLS, logprobs=True).choices[0]\n"
        "    assert first.finish_reason == 'tool_calls' and first.logprobs is None\n"
        "    assert first.message.reasoning_content == 'I must add'\n"
        "    (call,) = first.message.tool_calls\n"
        "    messages += [first.message, {'role': 'tool', 'tool_call_id': call.id, 'content': '3'}]\n"
        "    stream = list(ask(model=config.model, messages=messages, tools=TOOLS, stream=True))\n"
        "    return ''.join(part.choices[0].delta.content or '' for part in stream)\n"
    )
    done = evaluate(url, f"rollouts.agent={agent}:add", limit=1)
    assert done.code == 0, done.text
    first, second = rows(url, "steps").sort("step_index").to_dicts()
    assert (first["response"], first["reasoning"], first["finish_reason"]) == (None, "I must add", "tool_calls")
    assert json.loads(first["tool_calls"]) == [call]
    assert (second["response"], second["finish_reason"]) == ("so it is 3", "length")
    assert [message["role"] for message in json.loads(second["messages"])] == ["tool"], "only what is new"
    (episode,) = rows(url, "episodes").to_dicts()
    assert (episode["status"], episode["response_tokens"]) == ("truncated", None)
    assert json.loads(episode["artifacts"])["answer"] == "so it is 3"


@pytest.mark.parametrize("agent", ["solver_judge", "react", f"{{command: [{sys.executable}, program.py]}}"])
def test_built_in_agents_and_programs_ask_it_too(url, server, tmp_path, monkeypatch, agent):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(
        "import os, sys\n\nfrom openai import OpenAI\n\n"
        "said = [{'role': 'user', 'content': sys.stdin.read()}]\n"
        "answer = OpenAI().chat.completions.create(model=os.environ['OPENAI_MODEL'], messages=said)\n"
        "print(answer.choices[0].message.content)\n"
    )
    done = evaluate(url, f"rollouts.agent={agent}", limit=2)
    assert done.code == 0, done.text
    steps = rows(url, "steps")
    assert steps.height >= 2
    assert steps["response_ids"].null_count() == steps.height
    assert set(rows(url, "episodes")["status"]) == {"completed"}


def test_settings_that_a_model_refuses_are_not_sent_and_are_null(url, server):
    done = evaluate(
        url, "rollouts.engine.omit=[temperature, seed]", "rollouts.engine.token_limit=max_completion_tokens"
    )
    assert done.code == 0, done.text
    for body in server.asked:
        assert not {"temperature", "seed", "max_tokens"} & set(body)
        assert body["max_completion_tokens"] == 256
    steps = rows(url, "steps")
    assert (steps["temperature"].null_count(), steps["seed"].null_count(), set(steps["top_p"])) == (4, 4, {1.0})


def test_what_an_endpoint_said_is_refused_by_name_where_ids_are_needed(url):
    assert evaluate(url, "-n", "2").code == 0
    policy = rollmill("stage", "policy_init", "--store", url)
    assert policy.code == 0, policy.text
    for estimator, objective in (("grpo", "policy_gradient"), ("rejection", "cross_entropy")):
        settings = ("rewards=e:rewards", f"estimator={estimator}", "drop_flat_groups=false")
        made = rollmill("stage", "advantages", *settings, "--store", url)
        assert made.code == 0, made.text
        inputs = (f"advantages={made.out.split()[1]}", f"policy={policy.out.split()[1]}")
        done = rollmill("stage", "policy", *inputs, f"objective={objective}", "--store", url)
        assert done.code == 2, done.text
        assert "were answered by an endpoint, which gives no token ids and no logprobs" in done.err
        assert any(f"{row['episode_id']}" in done.err for row in rows(url, "episodes").to_dicts())


def test_training_on_an_endpoint_is_refused_before_anything_is_asked(url, server):
    engine = f"rollouts.engine={{type: endpoint, base_url: '{server.url}', model: m}}"
    for more in ((), ("policy=null",)):
        done = rollmill("train", "demo", engine, *more, "--store", url)
        assert done.code == 2
        assert "rollouts.engine.type=endpoint" in done.err
    assert not server.times


def test_clients_of_the_other_apis_reach_it_too(url, server, tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "not json"}}

    def answer(body):
        if body.get("tools"):
            return answer_with({"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls", usage=False)
        return answer_with({"role": "assistant", "content": "hi"}, "content_filter")

    server.answer = answer
    agent = tmp_path / "many.py"
    agent.write_text(
        "from anthropic import Anthropic\nfrom openai import OpenAI\n\n\n"
        "def ask(task, config):\n"
        "    key, model, said = config.api_key, config.model, [{'role': 'user', 'content': 'hi'}]\n"
        "    other = Anthropic(base_url=config.base_url.removesuffix('/v1'), api_key=key).messages\n"
        "    tool = {'name': 'add', 'input_schema': {'type': 'object'}}\n"
        "    called = other.create(model=model, messages=said, max_tokens=9, tools=[tool])\n"
        "    assert called.content[0].input == {'arguments': 'not json'} and called.usage.output_tokens is None\n"
        "    assert other.create(model=model, messages=said, max_tokens=9).stop_reason == 'refusal'\n"
        "    own = OpenAI(base_url=config.base_url, api_key=key)\n"
        "    assert own.responses.create(model=model, input='hi').usage.output_tokens == 3\n"
        "    assert own.completions.create(model=model, prompt='hi').choices[0].text == 'hi'\n"
        "    form = {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': {'type': 'object'}}}\n"
        "    own.chat.completions.create(model=model, messages=said, response_format=form)\n"
    )
    done = evaluate(url, f"rollouts.agent={agent}:ask", limit=1)
    assert done.code == 0, done.text
    (episode,) = rows(url, "episodes").to_dicts()
    assert (episode["status"], episode["error"]) == ("completed", None)
    assert rows(url, "steps").height == 5
    assert server.asked[-1]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert server.asked[-2]["prompt"] == "hi"
