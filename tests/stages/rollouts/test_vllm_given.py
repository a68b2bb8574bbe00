"""The vLLM engine over servers that others have started: which are believed, which are asked, and what happens to calls
whose server fails."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from schemas.errors import StageFailed
from stages.rollouts.engines.base import EngineFault, GenerationRequest, SamplingParams
from stages.rollouts.engines.vllm import VllmEngine
from stages.rollouts.workers.settings import VllmConfig, VllmExecution
from tests.stages.rollouts.processes import eventually
from tests.stages.rollouts.stand_in import CONTEXT, LOGPROB, StandIn, answer_ids, uniform_policy

QUICK = {"health_interval_s": 0.1, "backoff_s": 0.1}
PLAIN = SamplingParams(max_tokens=6)


@pytest.fixture
def servers():
    made: list[StandIn] = []

    def make(count=1):
        made.extend(StandIn() for _ in range(count))
        return made[-count:]

    yield make
    for server in made:
        server.fault = None
        server.close()


@pytest.fixture
def attach():
    made: list[VllmEngine] = []

    def attach(servers, **settings):
        execution = VllmExecution(workers=[server.url for server in servers], **(QUICK | settings))
        made.append(VllmEngine(VllmConfig(type="vllm"), execution, probe_tolerance=1e-4))
        return made[-1]

    yield attach
    for engine in made:
        engine.close()


@pytest.fixture
def policy(tmp_path):
    return uniform_policy(tmp_path / "policy")


def calls(count, prompt=(5, 6, 7), sampling=PLAIN, session=""):
    ids = np.array(prompt, dtype=np.int32)
    return [GenerationRequest(ids, sampling, seed, session) for seed in range(count)]


def ask(engine, requests):
    async def run():
        return await asyncio.gather(*map(engine.generate, requests))

    return asyncio.run(run())


async def reached(what):
    """Waits until it is true."""
    assert await asyncio.to_thread(eventually, what)


def within_a_minute(work):
    """What it returns."""
    return asyncio.run(asyncio.wait_for(work, 60))


def assert_answered(generations, requests, policy):
    for request, generation in zip(requests, generations, strict=True):
        assert generation.response_ids.tolist() == answer_ids(request.seed, request.sampling.max_tokens)
        assert generation.logprobs.tolist() == [np.float32(LOGPROB)] * len(generation.response_ids)
        assert generation.policy_id == policy.policy_id


def test_calls_are_answered_with_their_own_ids_by_named_workers(servers, attach, policy):
    both = servers(2)
    engine = attach(both)
    with engine.serving(policy):
        requests = [call for n in range(10) for call in calls(8, prompt=(5, n))]
        found = ask(engine, requests)
    assert_answered(found, requests, policy)
    assert {generation.worker for generation in found} == {f"vllm:127.0.0.1:{server.port}" for server in both}
    assert engine.facts() == {"vllm_versions": ["0.32.0"]}
    assert engine.context_length == CONTEXT


def test_a_server_with_the_token_api_is_asked_in_it(servers, attach, policy):
    (server,) = servers()
    server.speaks_tokens = True
    engine = attach([server])
    with engine.serving(policy):
        requests = calls(8)
        assert_answered(ask(engine, requests), requests, policy)
    assert server.events.count("generate") > 8, "the probe and the calls"


def adapter_policy(folder, shift):
    """An adapter of the stand-ins' policy that adds ``shift`` to all its logprobs."""
    adapter, base = folder / f"adapter{shift}", uniform_policy(folder / "base")
    adapter.mkdir()
    (adapter / "shift").write_text(str(shift))
    moved = replace(base.probe, logprobs=[one + np.float32(shift) for one in base.probe.logprobs])
    return replace(base, policy_id=f"{shift:f}".ljust(64, "0"), probe=moved, adapter=adapter, digest=f"{shift:f}")


def test_adapters_are_loaded_under_names_of_their_own_and_only_once(servers, attach, policy, tmp_path):
    (server,) = servers()
    engine = attach([server])
    small, large = adapter_policy(tmp_path / "a", -0.5), adapter_policy(tmp_path / "b", -1.0)
    for current, shift in ((small, -0.5), (large, -1.0), (policy, 0.0), (small, -0.5)):
        with engine.serving(current):
            found = ask(engine, calls(4))
        assert np.allclose([one.logprobs for one in found], LOGPROB + shift)
        assert {one.policy_id for one in found} == {current.policy_id}
    loads = [event for event in server.events if event.startswith("load")]
    assert loads == [f"load {one.adapter_name}" for one in (small, large)]
    assert [body["model"] for body in server.asked[::4]] == [
        small.adapter_name, large.adapter_name, "base", small.adapter_name,
    ]  # fmt: skip


def test_an_adapter_on_another_base_is_refused_by_how_much(servers, attach, tmp_path):
    (server,) = servers()
    server.shift = -0.25
    with pytest.raises(StageFailed, match=r"off by up to 0\.25"):
        attach([server]).load(adapter_policy(tmp_path, -0.5))


def test_a_server_that_takes_no_adapters_is_told_how_it_would(servers, attach, tmp_path):
    (server,) = servers()
    server.takes_adapters = False
    with pytest.raises(StageFailed, match=r"does not load the adapter.*\n.*--enable-lora"):
        attach([server]).load(adapter_policy(tmp_path, -0.5))


@pytest.mark.parametrize("listed", [None, [{"x": 1}], [3], "models"])
def test_a_server_that_lists_no_models_is_told(servers, attach, policy, listed):
    (server,) = servers()
    server.listed = listed
    with pytest.raises(StageFailed, match="did not answer with a list of models"):
        attach([server]).load(policy)


@pytest.mark.parametrize("url", ["http://", "http://h:99999", "host:8000", "ftp://h:1", "http://:80", "http://h:0"])
def test_what_is_no_url_is_refused_when_it_is_read(url):
    with pytest.raises(ValueError, match="is no URL such as"):
        VllmExecution(workers=[url])


def test_a_server_that_cannot_be_changed_is_told_how_it_could(servers, attach, policy, tmp_path):
    (server,) = servers()
    server.takes_weights = False
    with pytest.raises(StageFailed, match=r"does not let its weights be changed.*\n.*VLLM_SERVER_DEV_MODE"):
        attach([server], update="in_place").load(uniform_policy(tmp_path / "other", 1, shift=-0.5))


def test_a_group_goes_to_one_worker_and_groups_are_spread(servers, attach, policy):
    both = servers(2)
    engine = attach(both)
    with engine.serving(policy):
        ask(engine, [call for n in range(20) for call in calls(6, prompt=(5, n))])
    homes = [{tuple(body["prompt"]) for body in server.asked} for server in both]
    assert homes[0] | homes[1] == {(5, n) for n in range(20)}
    assert not homes[0] & homes[1]
    assert min(map(len, homes)) >= 8


def test_a_session_stays_with_its_worker(servers, attach, policy):
    both = servers(2)
    engine = attach(both)
    with engine.serving(policy):
        for turn in range(1, 6):
            ask(engine, [calls(1, prompt=[5] * turn + [n], session=f"s{n}")[0] for n in range(8)])
    sessions = [{body["prompt"][-1] for body in server.asked} for server in both]
    assert not sessions[0] & sessions[1]


def test_a_full_home_does_not_hold_up_a_group(servers, attach, policy):
    both = servers(2)
    for server in both:
        server.seconds = 0.05
    engine = attach(both, max_in_flight=4)
    with engine.serving(policy):
        ask(engine, calls(24))
    assert all(server.asked for server in both)
    assert max(server.most_running for server in both) <= 4


FAULTS = [
    "error", "garbage", "two choices", "too few logprobs", "too many logprobs", "a missing logprob", "no logprobs",
    "a padded logprob", "logprobs of other tokens", "ids of another vocabulary", "text for ids", "no ids",
    "too many ids", "another prompt", "an aborted answer", "a stop that is none",
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_server_spoils_another_answers(servers, attach, policy, fault):
    good, bad = servers(2)
    engine = attach([bad, good], max_failures=99)
    with engine.serving(policy):
        bad.fault = fault
        requests = [call for n in range(6) for call in calls(3, prompt=(5, n))]
        found = ask(engine, requests)
    assert bad.asked
    assert_answered(found, requests, policy)
    assert {generation.worker for generation in found} == {f"vllm:127.0.0.1:{good.port}"}


def test_where_every_server_spoils_its_answers_the_call_fails_and_says_how(servers, attach, policy):
    both = servers(2)
    engine = attach(both)
    with engine.serving(policy):
        for server in both:
            server.fault = "too few logprobs"
        with pytest.raises(EngineFault, match="5 logprobs for 6 sampled tokens"):
            ask(engine, calls(1))


@pytest.mark.parametrize("fault", ["deaf", "stalled", "dead"])
def test_a_server_that_stops_answering_loses_its_calls_to_another(servers, attach, policy, fault):
    good, bad = servers(2)
    bad.seconds = good.seconds = 0.2
    # The good one, too, may seem to hang where the machine is busy: it comes back.
    engine = attach([bad, good], hang_timeout_s=1, stall_timeout_s=1, max_failures=99)
    with engine.serving(policy):
        requests = [call for n in range(4) for call in calls(4, prompt=(5, n))]

        async def run():
            asked = [asyncio.create_task(engine.generate(request)) for request in requests]
            await reached(lambda: bad.running > 0)
            bad.fault = fault
            return await asyncio.gather(*asked)

        found = within_a_minute(run())
    assert bad.asked
    assert_answered(found, requests, policy)
    assert {generation.worker for generation in found} == {f"vllm:127.0.0.1:{good.port}"}
    assert eventually(lambda: bad.running == 0)  # its calls were taken back


def test_a_slow_server_that_advances_is_left_in_peace(servers, attach, policy):
    (server,) = servers()
    server.seconds = 0.6
    engine = attach([server], max_in_flight=1, stall_timeout_s=2.5)
    with engine.serving(policy):
        assert_answered(ask(engine, calls(5)), calls(5), policy)
    assert len(server.asked) == 5


def test_a_server_that_comes_back_serves_again_once_it_has_proved_its_weights(servers, attach, policy):
    good, other = servers(2)
    engine = attach([good, other], max_failures=99)
    with engine.serving(policy):
        other.stop_listening()
        assert_answered(ask(engine, calls(4)), calls(4), policy)
        assert eventually(lambda: engine.workers[1].policy is None)
        other.shift = 0.5  # it comes back with other weights
        other.listen_again()
        assert eventually(lambda: "off by up to 0.5" in str(engine.workers[1].trouble))
        assert [worker.policy is not None for worker in engine.workers] == [True, False]
        other.shift = 0.0
        assert eventually(lambda: all(worker.policy is not None for worker in engine.workers))
        good.stop_listening()
        assert_answered(ask(engine, calls(4)), calls(4), policy)


@pytest.mark.parametrize("max_failures", [2, 99])
def test_with_all_workers_gone_calls_fail_in_time_and_say_why(servers, attach, policy, max_failures, monkeypatch):
    monkeypatch.setattr("stages.rollouts.engines.vllm._FAULT_HOLDS_S", 0.5)
    both = servers(2)
    for server in both:
        server.seconds = 3600
    engine = attach(both, max_failures=max_failures, gone_timeout_s=1.5)

    async def run():
        asked = [asyncio.create_task(engine.generate(call)) for call in calls(6)]
        await reached(lambda: sum(server.running for server in both) == 6)
        for server in both:
            server.stop_listening()
        return await asyncio.gather(*asked, return_exceptions=True)

    with engine.serving(policy):
        found = within_a_minute(run())
    assert {type(fault) for fault in found} == {EngineFault}
    told = str(found[0])
    assert ("all workers are gone" if max_failures == 2 else "no worker has served for 1.5 s") in told
    assert all(f"127.0.0.1:{server.port} cannot be reached" in told for server in both)
    with pytest.raises(StageFailed), engine.serving(policy):  # who comes next need not wait
        pass
    for server in both:
        server.seconds = 0
        server.listen_again()

    def serves():
        with suppress(StageFailed), engine.serving(policy):
            assert_answered(ask(engine, calls(4)), calls(4), policy)
            return True
        return False

    assert eventually(serves)


def test_a_refusal_is_not_asked_again(servers, attach, policy):
    both = servers(2)
    engine = attach(both)
    with engine.serving(policy):
        for server in both:
            server.fault = "refuses"
        with pytest.raises(EngineFault, match="no such thing"):
            ask(engine, calls(1))
    assert sum(len(server.asked) for server in both) == 1


def test_a_cancelled_call_is_taken_back_from_the_server(servers, attach, policy):
    (server,) = servers()
    server.seconds = 3600
    engine = attach([server])

    async def run():
        asked = asyncio.create_task(engine.generate(calls(1)[0]))
        await reached(lambda: server.running == 1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    with engine.serving(policy):
        asyncio.run(run())
        assert eventually(lambda: (server.broken_off, server.running) == (1, 0))


def test_concurrency_shrinks_to_what_the_server_can_take(servers, attach, policy):
    (server,) = servers()
    server.seconds = 2.0  # it runs 4 at a time, and lets the rest wait
    engine = attach([server])

    async def run():
        asked = [asyncio.create_task(engine.generate(call)) for call in calls(400)]
        while engine.workers[0].limit.value > 4 + 16:
            await asyncio.sleep(0.02)
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    with engine.serving(policy):
        within_a_minute(run())
    assert server.most_running > 20


def test_a_server_that_was_started_anew_must_prove_its_weights_again(servers, attach, policy):
    (server,) = servers()
    engine = attach([server], max_failures=99)
    with engine.serving(policy):
        ask(engine, calls(8))
        seen = server.looks
        assert eventually(lambda: server.looks > seen + 1)
        server.progress, server.shift = 0, 0.5  # so quickly that nobody missed it
        assert eventually(lambda: "off by up to 0.5" in str(engine.workers[0].trouble))
        server.shift = 0.0
        assert_answered(ask(engine, calls(4)), calls(4), policy)


def test_weights_that_are_not_the_policys_are_refused_by_how_much_and_left_alone(servers, attach, tmp_path):
    (server,) = servers()
    engine = attach([server])
    with pytest.raises(StageFailed, match=r"off by up to 0.25, and 0.0001 is tolerated.*\n.*update=in_place"):
        engine.load(uniform_policy(tmp_path / "moved", 1, shift=0.25))
    assert server.events == []
    assert engine.policy_id is None


def test_one_server_with_other_weights_does_not_serve_while_the_others_do(servers, attach, policy, caplog):
    good, other = servers(2)
    other.shift = 0.25
    engine = attach([good, other])
    with engine.serving(policy):
        assert_answered(ask(engine, calls(12)), calls(12), policy)
    assert other.asked == []
    assert "off by up to 0.25" in caplog.text


def test_a_given_server_is_updated_where_that_is_allowed_and_its_cache_is_reset(servers, attach, policy, tmp_path):
    (server,) = servers()
    engine = attach([server], update="in_place")
    with engine.serving(policy):
        assert server.events == []  # it had these weights already
        before = ask(engine, calls(1))
    moved = uniform_policy(tmp_path / "moved", 1, shift=-0.25)
    with engine.serving(moved):
        assert server.events == ["reload_weights", "reset"]
        after = ask(engine, calls(1))
    assert [before[0].policy_id, after[0].policy_id] == [policy.policy_id, moved.policy_id]
    assert after[0].logprobs[0] == np.float32(LOGPROB - 0.25)
    salts = {body["cache_salt"] for body in server.asked}
    assert len(salts) == 2  # nothing computed with old weights is used for the new ones


def test_a_server_that_silently_keeps_its_old_weights_is_found_out(servers, attach, policy, tmp_path):
    (server,) = servers()
    server.reloads = False
    engine = attach([server], update="in_place")
    with engine.serving(policy):
        pass
    with pytest.raises(StageFailed, match=r"off by up to 0\.25"):
        engine.load(uniform_policy(tmp_path / "moved", 1, shift=0.25))
    assert "reload_weights" in server.events


@pytest.mark.parametrize("told", [0.0, -1.0])
def test_logprobs_after_temperature_are_not_taken_for_the_models_own(servers, attach, policy, told):
    (server,) = servers()
    server.forced = told
    with pytest.raises(StageFailed, match="raw_logprobs"):
        attach([server]).load(policy)


@pytest.mark.parametrize(("version", "fits"), [("0.19.1", False), ("0.20.0", True), ("1.0", True), ("dev", True)])
def test_versions_from_020_on_are_spoken_to(servers, attach, policy, version, fits):
    (server,) = servers()
    server.version = version
    engine = attach([server])
    if not fits:
        with pytest.raises(StageFailed, match=r"0\.19\.1, and 0\.20 is the oldest"):
            engine.load(policy)
        return
    engine.load(policy)
    assert engine.facts() == {"vllm_versions": [version]}


def test_a_server_with_a_shorter_context_shortens_that_of_the_engine(servers, attach, policy):
    both = servers(2)
    both[1].context = 40
    engine = attach(both)
    engine.load(policy)
    assert engine.context_length == 40


def test_an_unreachable_server_is_named_without_its_password(servers, attach, policy):
    (server,) = servers()
    server.stop_listening()
    execution = VllmExecution(workers=[f"http://me:secret@127.0.0.1:{server.port}"])
    engine = VllmEngine(VllmConfig(type="vllm"), execution, probe_tolerance=1e-4)
    with pytest.raises(StageFailed, match=f"127.0.0.1:{server.port} cannot be reached") as told:
        engine.load(policy)
    assert "secret" not in str(told.value)
    engine.close()


def test_many_threads_and_loops_may_ask_at_once(servers, attach, policy):
    from concurrent.futures import ThreadPoolExecutor

    engine = attach(servers(2))
    with engine.serving(policy), ThreadPoolExecutor(8) as threads:
        requests = [[replace(call, seed=call.seed + 100 * n) for call in calls(10)] for n in range(8)]
        for asked, found in zip(requests, threads.map(lambda some: ask(engine, some), requests), strict=True):
            assert_answered(found, asked, policy)


def test_event_loops_that_are_at_home_share_the_workers_and_survive_the_loss_of_one(servers, attach, policy):
    first, second = servers(2)
    first.seconds = second.seconds = 0.05
    engine = attach([first, second], max_in_flight=4)

    async def here(requests):
        async with engine.at_home():
            asked = [asyncio.ensure_future(engine.generate(request)) for request in requests]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            first.fault = "dead"
            return await asyncio.gather(*asked)

    with engine.serving(policy), ThreadPoolExecutor() as threads:
        loops = [calls(24, prompt=(5, n)) for n in range(3)]
        found = list(threads.map(lambda requests: asyncio.run(here(requests)), loops))
    for requests, generations in zip(loops, found, strict=True):
        assert_answered(generations, requests, policy)


def test_a_closed_engine_refuses_the_calls_of_loops_that_are_at_home(servers, attach, policy):
    (server,) = servers()
    server.seconds = 30
    engine = attach([server], max_in_flight=2)

    async def here():
        async with engine.at_home():
            asked = [asyncio.ensure_future(engine.generate(request)) for request in calls(4)]
            await asyncio.to_thread(eventually, lambda: server.running == 2)
            await asyncio.to_thread(engine.close)
            return await asyncio.gather(*asked, return_exceptions=True)

    with engine.serving(policy):
        found = asyncio.run(here())
    assert all(isinstance(one, EngineFault) and "closed" in str(one) for one in found), found


def test_a_closed_engine_answers_no_more(servers, attach, policy):
    engine = attach(servers())
    engine.load(policy)
    engine.close()
    engine.close()
    with pytest.raises(EngineFault, match="closed"):
        ask(engine, calls(1))
