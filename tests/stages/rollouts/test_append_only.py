"""Conversations of which only what is new is rendered: the text is that of the whole, or the whole is rendered."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.rollouts.append_only import is_append_only
from stages.rollouts.calls import ModelCall
from stages.rollouts.chat_template import chat_template_in
from stages.rollouts.engines.base import SamplingParams
from stages.rollouts.engines.scripted import ScriptedEngine, drawn_ids
from stages.rollouts.session import Session
from tests.stages.rollouts.conversations import WITH_TOOLS
from tests.stages.rollouts.policies import CHATML, make_policy, make_tokenizer

WITH_DEFAULT = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\nbe kind"
    "<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] + '\n' + message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LOOKING_BACK = {
    "the last message": CHATML.replace("<|im_end|>", "{% if not loop.last %}<|im_end|>{% endif %}"),
    "the place": CHATML.replace("<|im_end|>", "{{ loop.index0 }}<|im_end|>"),
    "the number": CHATML.replace("{% if add", "{{ messages | length }}{% if add"),
    "the end": CHATML.replace("{% if add", "{% if messages[-1].role == 'user' and add"),
    "another message": CHATML.replace("<|im_end|>", "{{ messages[1].role }}<|im_end|>"),
    "a part of all": "{% set messages = messages[1:] %}" + CHATML,
    "what was before": "{% set seen = namespace(n=0) %}"
    + CHATML.replace("<|im_end|>", "{% set seen.n = seen.n + 1 %}{{ seen.n }}<|im_end|>"),
    "a call": CHATML.replace("<|im_end|>", "{{ message.content.split('#')[-1] }}<|im_end|>"),
    "no loop": "{{ messages[0].content }}",
    "no template": "{% for message in messages %}",
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
texts = st.text(alphabet="ab 1\n#", max_size=6)
roles = st.sampled_from(["system", "user", "assistant", "tool"])
conversations = st.lists(st.builds(lambda role, content: {"role": role, "content": content}, roles, texts), min_size=1)


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    def make(name, source):
        folder = tmp_path_factory.mktemp(name)
        make_tokenizer(folder, source)
        (folder / "config.json").write_text("{}")
        return chat_template_in(folder)

    return [make(f"t{n}", source) for n, source in enumerate((CHATML, WITH_TOOLS, WITH_DEFAULT))]


@given(asked=conversations, new=conversations, tools=st.sampled_from([None, TOOLS]))
@settings(max_examples=100, deadline=None)
def test_what_is_added_is_what_the_whole_has_more(templates, asked, new, tools):
    for template in templates:
        before, whole = template.render(asked, tools), template.render([*asked, *new], tools)
        added = template.added(asked[0], new, tools)
        assert (before + added == whole) if added is not None else not whole.startswith(before)


@pytest.mark.parametrize("source", [CHATML, WITH_TOOLS, WITH_DEFAULT])
def test_templates_that_go_over_the_messages_one_by_one_are_known(source):
    assert is_append_only(source)


@pytest.mark.parametrize("what", LOOKING_BACK)
def test_templates_that_look_elsewhere_are_rendered_whole(what):
    assert not is_append_only(LOOKING_BACK[what])


@pytest.mark.parametrize("changed", ["nothing", "tools", "a message", "the order of its fields"])
def test_a_call_goes_on_from_sampled_ids_only_where_all_before_it_is_the_same(tmp_path, changed):
    policy = make_policy(tmp_path / "policy", max_position_embeddings=4096)
    source = WITH_TOOLS.replace(
        "{{ message['content'] }}", "{{ message | tojson if message.role == 'user' else message['content'] }}"
    )
    (policy.folder / "chat_template.jinja").write_text(source)
    engine, template = ScriptedEngine(drawn_ids(8)), chat_template_in(policy.folder)
    session = Session(
        "agent", template=template, engine=engine, policy_id=policy.policy_id, sampling=SamplingParams(max_tokens=8),
        max_turns=None, seed=3, uid="episode",
    )  # fmt: skip

    async def talk():
        messages = [{"role": "user", "content": "first"}]
        for n in range(4):
            if n == 3 and changed == "a message":
                messages[0]["content"] = "other"
            if n == 3 and changed == "the order of its fields":
                messages[0] = {"content": "first", "role": "user"}
            answer = await session.call(
                ModelCall(list(messages), tools=None if n == 3 and changed == "tools" else TOOLS)
            )
            messages += [answer.message, {"role": "user", "content": f"and {n}?"}]

    with engine.serving(policy):
        asyncio.run(talk())
    *goes_on, last = [step.prefix_length == before.prompt_tokens + 8 for before, step in pairwise(session.steps())]
    assert all(goes_on)
    assert last == (changed == "nothing")
