"""Answers that end at a text: what was sampled is kept whole, and the client gets what stands before the text."""

import asyncio
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.rollouts.calls import ModelCall
from stages.rollouts.chat_template import chat_template_in
from stages.rollouts.engines.base import GenerationRequest, SamplingParams
from stages.rollouts.engines.scripted import ScriptedEngine
from stages.rollouts.engines.stopping import found_in, is_completed_by_last, n_until_stop
from stages.rollouts.session import Session

USER = [{"role": "user", "content": "what is 12 + 7?"}]
ids_of_any_kind = st.lists(st.integers(0, 299), min_size=1, max_size=40).map(lambda ids: np.array(ids, dtype=np.int32))


def first_complete(ids, stops, text_of):
    """The definition: the fewest ids whose text holds a stop."""
    return next((n for n in range(1, len(ids) + 1) if any(stop in text_of(ids[:n]) for stop in stops)), None)


@st.composite
def stops_in(draw, text):
    """One to three texts, most of which are somewhere in the text."""
    stops = draw(st.lists(st.text("ab1# ?é", min_size=1, max_size=3), max_size=2))
    if text:
        begin = draw(st.integers(0, len(text) - 1))
        stops.append(text[begin : draw(st.integers(begin + 1, min(len(text), begin + 12)))])
    return tuple(stops or ["#"])


@settings(max_examples=200, deadline=None)
@given(data=st.data(), ids=ids_of_any_kind)
def test_an_answer_ends_with_the_first_id_that_completes_a_stop(data, ids, policy):
    text_of = chat_template_in(policy.folder).decode
    stops = data.draw(stops_in(text_of(ids).replace("\ufffd", "")))
    expected = first_complete(ids, stops, text_of)
    assert n_until_stop(ids, stops, text_of) == expected
    one_by_one = (n for n in range(1, len(ids) + 1) if is_completed_by_last(ids[:n], stops, text_of))
    assert next(one_by_one, None) == expected


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one\nObservation: two", ["Observation:"], (4, "Observation:")),
        ("abcd", ["abcd", "bc"], (1, "bc")),
        ("abab", ["b"], (1, "b")),
        ("abc", ["bc", "c"], (1, "bc")),
        ("abc", ["d"], None),
        ("abc", [], None),
    ],
)
def test_the_stop_that_is_complete_first_counts(text, stops, expected):
    assert found_in(text, stops) == expected


@cache
def emoji_ids(folder):
    return chat_template_in(folder).encode("say 😀 and ÄÖÜ #12 go").tolist()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_was_sampled_is_recorded_and_the_next_prompt_continues_from_it(data, policy):
    template = chat_template_in(policy.folder)
    drawn = data.draw(ids_of_any_kind | st.just(np.array(emoji_ids(policy.folder), dtype=np.int32)))
    stops = data.draw(stops_in(template.decode(drawn).replace("\ufffd", "")))
    heard = []

    def script(request, vocabulary):
        heard.append(request.prompt_ids.tolist())
        return drawn

    engine = ScriptedEngine(script)
    engine.load(policy)
    sampling = SamplingParams(max_tokens=60, stop_token_ids=template.stop_token_ids)
    session = Session(
        "default", template=template, engine=engine, policy_id=policy.policy_id, sampling=sampling, max_turns=None,
        seed=3, uid="e",
    )  # fmt: skip

    async def run():
        answer = await session.call(ModelCall(USER, stop=stops))
        said = [*USER, answer.message, {"role": "user", "content": "and?"}]
        await session.call(ModelCall(said))
        return answer

    answer = asyncio.run(run())
    first, second = session.steps()
    at_token = np.flatnonzero(np.isin(drawn, template.stop_token_ids))
    until_token = drawn[: at_token[0] + 1] if len(at_token) else drawn
    n = first_complete(until_token, stops, template.decode)
    expected = until_token if n is None else until_token[:n]
    assert first.generation.response_ids.tolist() == expected.tolist()
    assert len(first.generation.logprobs) == len(expected)
    assert first.finish_reason == answer.finish_reason == ("length" if n is None and not len(at_token) else "stop")
    found = found_in(template.decode(expected), stops)
    assert (answer.stop_text, found is None) == (None if found is None else found[1], n is None)
    assert not any(stop in answer.content for stop in stops)
    assert first.response == answer.content
    assert second.prefix_length == len(heard[0]) + len(expected)
    assert heard[1][: second.prefix_length] == [*heard[0], *expected.tolist()]


def test_a_model_in_this_process_samples_the_same_up_to_the_stop(engine, policy):
    text_of = chat_template_in(policy.folder).decode
    prompts = [np.arange(3, 9 + n, dtype=np.int32) for n in range(8)]

    def ask(stops):
        sampling = SamplingParams(max_tokens=60, stop_token_ids=(2,), stop_texts=stops)
        requests = [GenerationRequest(ids, sampling, seed=n, text_of=text_of) for n, ids in enumerate(prompts)]

        async def run():
            return await asyncio.gather(*map(engine.generate, requests))

        return asyncio.run(run())

    stops = ("e", "12", "7#", "\n")
    n_cut = 0
    for whole, stopped in zip(ask(()), ask(stops), strict=True):
        n = first_complete(whole.response_ids, stops, text_of)
        expected = whole.response_ids if n is None else whole.response_ids[:n]
        assert stopped.response_ids.tolist() == expected.tolist()
        assert np.abs(stopped.logprobs - whole.logprobs[: len(expected)]).max() < 1e-5
        assert stopped.finish_reason == (whole.finish_reason if n is None else "stop")
        n_cut += n is not None
    assert n_cut > 2


def test_calls_that_were_given_up_count_for_nothing(policy):
    """The second of two allowed calls is made although one before it was given up."""
    template = chat_template_in(policy.folder)

    class Slow(ScriptedEngine):
        async def generate(self, request):
            if not self.is_quick:
                await asyncio.Event().wait()
            return await super().generate(request)

        is_quick = False

    engine = Slow(lambda request, vocabulary: [70, 2])
    engine.load(policy)
    session = Session(
        "default", template=template, engine=engine, policy_id=policy.policy_id,
        sampling=SamplingParams(max_tokens=9, stop_token_ids=(2,)), max_turns=2, seed=3, uid="e",
    )  # fmt: skip

    async def run():
        given_up = asyncio.ensure_future(session.call(ModelCall(USER)))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        engine.is_quick = True
        for _ in range(2):
            await session.call(ModelCall(USER))

    asyncio.run(run())
    assert len(session.steps()) == 2


def test_an_agents_seed_decides_where_the_agent_samples(policy):
    template = chat_template_in(policy.folder)

    def seeds(agent_samples, *calls):
        engine = ScriptedEngine(lambda request, vocabulary: [70, 2])
        engine.load(policy)
        session = Session(
            "default", template=template, engine=engine, policy_id=policy.policy_id, agent_samples=agent_samples,
            sampling=SamplingParams(max_tokens=9, stop_token_ids=(2,)), max_turns=None, seed=3, uid="e",
        )  # fmt: skip
        for call in calls:
            asyncio.run(session.call(call))
        return [step.seed for step in session.steps()]

    same, other = ModelCall(USER, seed=5), ModelCall(USER, seed=5, choice=1)
    first, again, choice = seeds(True, same, same, other)
    assert first == again != choice
    assert len({*seeds(False, same, same), first}) == 3
