"""A session's recorded tokens are exactly those that the engine saw and sampled, over any number of turns."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import InputError
from stages.rollouts.chat_template import TemplateRefused, chat_template_in
from stages.rollouts.engines.base import EngineFault, SamplingParams
from stages.rollouts.engines.scripted import ScriptedEngine, drawn_ids
from stages.rollouts.sdk import MaxTurnsReached
from stages.rollouts.sequence import TokenSequence, common_prefix
from stages.rollouts.session import ContextExceeded, Session
from tests.stages.rollouts.policies import CHATML, make_model, make_policy, make_tokenizer

END = 2
"""The id of <|im_end|>."""
USER = [{"role": "user", "content": "what is 12 + 7?"}]
TRIMMED = CHATML.replace("{{ message['content'] }}", "{{ message['content'] | trim }}")
PLAIN = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
DROPS_REASONING = CHATML.replace(
    "{{ message['content'] }}",
    "{{ message['content'].split('#')[-1] if message['role'] == 'assistant' else message['content'] }}",
)


class Heard(ScriptedEngine):
    """A scripted engine that remembers the prompts it was given."""

    def __init__(self, script):
        super().__init__(script)
        self.prompts: list[list[int]] = []

    async def generate(self, request):
        self.prompts.append(request.prompt_ids.tolist())
        return await super().generate(request)


def replies(*answers):
    """A script that gives these answers one after the other."""
    left = iter(answers)
    return lambda request, vocabulary: next(left)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A checkpoint folder for each kind of chat template."""

    def make(name, template, bos=None):
        folder = tmp_path_factory.mktemp(name)
        make_policy(folder)
        make_tokenizer(folder, template, bos)
        return folder

    bos = "<|endoftext|>"
    return {
        "chatml": make("chatml", CHATML),
        "trimmed": make("trimmed", TRIMMED),
        "plain": make("plain", PLAIN),
        "drops": make("drops", DROPS_REASONING),
        "bos": make("bos", "{{ bos_token }}" + CHATML, bos),
    }


@pytest.fixture
def start(folders, policy):
    """Returns (session, engine, template) over a scripted engine."""

    def run(script, kind="chatml", max_turns=None, max_tokens=40):
        template = chat_template_in(folders[kind])
        engine = Heard(script)
        engine.load(policy)
        session = Session(
            "default",
            template=template,
            engine=engine,
            policy_id=policy.policy_id,
            sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=template.stop_token_ids),
            max_turns=max_turns,
            seed=3,
            uid="e",
        )
        return session, engine, template

    return run


def full_prompts(steps):
    """The prompt of each step, put together from what is recorded, as the design says."""
    sequence, prompts = np.zeros(0, dtype=np.int32), []
    for step in steps:
        prompts.append(np.concatenate([sequence[: step.prefix_length], step.prompt_ids]).tolist())
        sequence = np.concatenate([prompts[-1], step.generation.response_ids]).astype(np.int32)
    return prompts


def talk(session, turns, first=USER):
    async def run():
        messages = list(first)
        for turn in range(turns):
            reply = await session.chat(messages)
            messages = [*messages, reply.message, {"role": "user", "content": f"and {turn}?"}]
        return messages

    return asyncio.run(run())


def test_a_stopped_answer_is_continued_after_its_stop_token(start):
    session, engine, template = start(replies([70, 71, END], [72, END]))
    talk(session, 2)
    first, second = session.steps()
    assert first.prefix_length == 0
    assert template.token_text(END) == "<|im_end|>"
    assert first.response == template.decode(np.array([70, 71]))
    assert second.prefix_length == len(first.prompt_ids) + 3
    opened = "\n<|im_start|>user\nand 0?<|im_end|>\n<|im_start|>assistant\n"
    assert second.prompt_ids.tolist() == template.encode(opened).tolist()
    assert engine.prompts[1] == [*engine.prompts[0], 70, 71, END, *second.prompt_ids]
    assert [message["content"] for message in second.messages] == ["and 0?"]


def test_what_an_agent_adds_to_its_own_list_later_is_not_recorded_as_asked(start):
    session, _, _ = start(replies([70, END], [71, END]))
    messages = list(USER)

    async def run():
        messages.append((await session.chat(messages)).message)
        messages.append({"role": "user", "content": "sure?"})
        messages.append((await session.chat(messages)).message)

    asyncio.run(run())
    assert [step.messages for step in session.steps()] == [USER, messages[2:3]]


def test_a_cut_answer_is_closed_for_the_next_turn(start):
    session, engine, template = start(replies([70] * 40, [71, END]))
    talk(session, 2)
    first, second = session.steps()
    assert first.generation.finish_reason == "length"
    closed = "<|im_end|>\n<|im_start|>user\nand 0?<|im_end|>\n<|im_start|>assistant\n"
    assert second.prompt_ids.tolist() == template.encode(closed).tolist()
    assert second.prefix_length == len(engine.prompts[0]) + 40


def test_the_first_prompt_is_what_transformers_renders_with_one_beginning(start):
    for kind in ("chatml", "bos", "plain"):
        session, engine, template = start(replies([70, END]), kind)
        talk(session, 1)
        theirs = template._tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
        assert engine.prompts[0] == theirs
    session, engine, _ = start(replies([70, END], [71, END]), "bos")
    talk(session, 2)
    assert engine.prompts[1].count(0) == 1


def test_ids_that_decode_and_encode_to_others_survive(start):
    session, engine, template = start(drawn_ids(30))
    talk(session, 5)
    steps = session.steps()
    drawn = [step.generation.response_ids for step in steps]
    assert any(template.encode(step.response).tolist() != ids.tolist() for step, ids in zip(steps, drawn, strict=True))
    assert all(step.prefix_length > 0 for step in steps[1:])
    assert full_prompts(steps) == engine.prompts
    assert [step.generation.response_ids.tolist() for step in steps] == [ids.tolist() for ids in drawn]


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["chatml", "trimmed", "plain", "drops", "bos"]),
    answers=st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=12), min_size=1, max_size=6),
    edits=st.lists(st.sampled_from(["keep", "keep", "retry", "edit", "forget"]), min_size=6, max_size=6),
)
def test_recorded_steps_reproduce_every_prompt_whatever_the_agent_does(folders, policy, kind, answers, edits):
    template = chat_template_in(folders[kind])
    engine = Heard(replies(*answers))
    engine.load(policy)
    sampling = SamplingParams(max_tokens=40, stop_token_ids=template.stop_token_ids)
    session = Session(
        "default", template=template, engine=engine, policy_id=policy.policy_id, sampling=sampling, max_turns=None,
        seed=3, uid="e",
    )  # fmt: skip

    async def run():
        messages, said = list(USER), []
        for number, edit in zip(range(len(answers)), edits, strict=False):
            try:
                reply = await session.chat(messages)
            except ContextExceeded:
                return
            said.append([*messages, reply.message])
            if edit == "keep":
                messages = [*said[-1], {"role": "user", "content": f"more {number}"}]
            elif edit == "edit":
                messages = [*messages, {"role": "assistant", "content": "I said"}, {"role": "user", "content": "no"}]
            elif edit == "forget":
                messages = [USER[0], {"role": "assistant", "content": "x"}, {"role": "user", "content": f"{number}"}]

    asyncio.run(run())
    steps = session.steps()
    assert full_prompts(steps) == engine.prompts
    assert [step.step_index for step in steps] == list(range(len(steps)))


@pytest.mark.parametrize(("kind", "said"), [("trimmed", " 19 \n"), ("drops", "think # 19")])
def test_a_template_that_rewrites_the_answer_starts_a_new_sequence(start, folders, kind, said):
    reply = [*chat_template_in(folders[kind]).encode(said).tolist(), END]
    session, engine, _ = start(lambda request, vocabulary: reply, kind)
    talk(session, 2)
    first, second = session.steps()
    assert second.prefix_length < len(first.prompt_ids) + len(reply)
    assert second.prefix_length == common_prefix(np.array(engine.prompts[0] + reply), np.array(engine.prompts[1]))
    assert len(second.messages) == 3
    assert full_prompts([first, second]) == engine.prompts


def test_a_trimming_template_continues_where_nothing_is_trimmed(start, folders):
    reply = [*chat_template_in(folders["trimmed"]).encode("19").tolist(), END]
    session, engine, _ = start(lambda request, vocabulary: reply, "trimmed")
    talk(session, 2)
    assert session.steps()[1].prefix_length == len(engine.prompts[0]) + len(reply)


def test_a_changed_history_starts_a_new_sequence_after_what_is_common(start):
    session, engine, _ = start(replies([70, END], [71, END]))

    async def run():
        await session.chat(USER)
        changed = {"role": "assistant", "content": "something else"}
        await session.chat([*USER, changed, {"role": "user", "content": "go on"}])

    asyncio.run(run())
    first, second = session.steps()
    assert second.prefix_length == common_prefix(np.array([*engine.prompts[0], 70, END]), np.array(engine.prompts[1]))
    assert second.prefix_length >= len(first.prompt_ids)
    assert full_prompts([first, second]) == engine.prompts


def test_asking_the_same_again_repeats_the_prompt_and_not_the_answer(start):
    session, engine, _ = start(replies([70, END], [71, END]))

    async def run():
        await session.chat(USER)
        await session.chat(USER)

    asyncio.run(run())
    first, second = session.steps()
    assert second.prefix_length == len(first.prompt_ids)
    assert second.prompt_ids.tolist() == []
    assert first.seed != second.seed
    assert engine.prompts[0] == engine.prompts[1]


def test_calls_side_by_side_are_kept_apart(start):
    """Three continuations of one answer are asked at once; each goes on from the exact ids that it extends."""
    session, engine, _ = start(drawn_ids(9))

    async def run():
        reply = await session.chat(USER)
        history = [*USER, reply.message]
        asked = [[*history, {"role": "user", "content": word}] for word in ("a", "b", "c")]
        found = await asyncio.gather(*map(session.chat, asked))
        await session.chat([*asked[1], found[1].message, {"role": "user", "content": "d"}])

    asyncio.run(run())
    steps = session.steps()
    assert full_prompts(steps) == engine.prompts
    opening = [*engine.prompts[0], *steps[0].generation.response_ids]
    assert all(prompt[: len(opening)] == opening for prompt in engine.prompts[1:])
    through_b = [*engine.prompts[2], *steps[2].generation.response_ids]
    assert engine.prompts[4][: len(through_b)] == through_b


def test_seeds_depend_on_the_place_of_the_call_only(start):
    seeds = []
    for _ in range(2):
        session, _, _ = start(drawn_ids(3))
        talk(session, 3)
        seeds.append([step.seed for step in session.steps()])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


def test_the_context_limit_cuts_the_answer_and_then_refuses_the_prompt(start):
    session, engine, _ = start(drawn_ids(100), max_tokens=100)
    long = [{"role": "user", "content": "0" * 150}]
    with pytest.raises(ContextExceeded, match=r"the prompt has \d+ tokens.*context of 256"):
        talk(session, 3, first=long)
    steps = session.steps()
    last = steps[-1]
    assert last.prompt_tokens + len(last.generation.response_ids) == 256
    assert last.sampling.max_tokens == 256 - last.prompt_tokens
    assert len(steps) == len(engine.prompts) == 1


def test_one_call_too_many_is_refused(start):
    session, _, _ = start(drawn_ids(3), max_turns=2)
    with pytest.raises(MaxTurnsReached, match="2 model calls"):
        talk(session, 3)
    assert len(session.steps()) == 2


def test_an_engine_that_gives_too_few_logprobs_or_another_policy_is_at_fault(start, policy, other_policy):
    session, engine, _ = start(replies([], []))
    with pytest.raises(EngineFault, match="0 logprobs for 0 sampled"):
        talk(session, 1)
    session, engine, _ = start(drawn_ids(3))
    engine.load(other_policy)
    with pytest.raises(EngineFault, match="has answered"):
        talk(session, 1)


def test_messages_that_the_template_refuses_are_named(start, folders):
    session, _, template = start(drawn_ids(3))
    with pytest.raises(TemplateRefused, match="parts of type image_url"):
        talk(session, 1, first=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert template.render(parts) == template.render([{"role": "user", "content": "a\nb"}])


def test_the_token_that_closes_an_answer_is_a_stop_even_where_the_model_names_another(tmp_path):
    make_policy(tmp_path, eos_token_id=0)
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path)
    assert chat_template_in(tmp_path).stop_token_ids == (0, END)


@pytest.mark.parametrize("missing", ["tokenizer", "template"])
def test_a_policy_without_tokenizer_or_chat_template_is_refused(tmp_path, missing):
    make_policy(tmp_path)
    if missing == "tokenizer":
        for path in tmp_path.glob("tokenizer*"):
            path.unlink()
        with pytest.raises(InputError, match="no tokenizer"):
            chat_template_in(tmp_path)
    else:
        make_tokenizer(tmp_path, chat_template=None)
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
        with pytest.raises(InputError, match="no chat template"):
            chat_template_in(tmp_path)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    make_model(tmp_path, 0, vocab_size=100)
    make_tokenizer(tmp_path)
    with pytest.raises(InputError, match="300 ids, and its model only 100"):
        chat_template_in(tmp_path)


@pytest.mark.shared_data
def test_a_real_tokenizer_with_byte_fallback_keeps_its_samples(shared_data, tmp_path, policy):
    """Stories260K has no chat template and marks words with a leading ▁; a template in plain text is added."""
    from shutil import copytree

    folder = Path(copytree(shared_data / "model_stories260k", tmp_path / "stories"))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + PLAIN)
    template = chat_template_in(folder)
    engine = Heard(drawn_ids(20))
    engine.load(policy)
    sampling = SamplingParams(max_tokens=20, stop_token_ids=template.stop_token_ids)
    session = Session(
        "default", template=template, engine=engine, policy_id=policy.policy_id, sampling=sampling, max_turns=None,
        seed=1, uid="e",
    )  # fmt: skip
    talk(session, 4, first=[{"role": "user", "content": "Once upon a time"}])
    steps = session.steps()
    assert full_prompts(steps) == engine.prompts
    assert engine.prompts[0].count(1) == 1
    assert all(step.prefix_length > 0 for step in steps[1:])
    assert template.decode(steps[1].prompt_ids).strip().startswith("user: and 0?")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 99), max_size=90)), max_size=12))
def test_sequences_that_share_memory_never_change_each_other(steps):
    made: list[tuple[TokenSequence, list[int]]] = [(TokenSequence(), [])]
    for parent, ids in steps:
        sequence, wanted = made[parent % len(made)]
        made.append((sequence.extended(np.array(ids, dtype=np.int32)), wanted + ids))
    assert all(sequence.ids.tolist() == wanted for sequence, wanted in made)


def test_a_developers_message_is_the_systems_where_the_template_does_not_know_developers(tmp_path):
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    knowing = "{# developer #}" + CHATML
    for name, template, role in (("old", CHATML, "system"), ("new", knowing, "developer")):
        make_tokenizer(tmp_path / name, template)
        make_model(tmp_path / name, 0)
        text = chat_template_in(tmp_path / name).render(messages)
        assert text.startswith(f"<|im_start|>{role}\nbe brief<|im_end|>"), text
