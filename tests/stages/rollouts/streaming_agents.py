"""Agents that read their answers while they are sampled, with the official clients, unchanged."""

# mypy: disable-error-code="union-attr,arg-type,call-overload,list-item,index"

from anthropic import Anthropic
from openai import OpenAI

from tests.stages.rollouts.openai_agents import first


def asks_once(task, config):
    """Returns what it was answered."""
    client = OpenAI(base_url=config.base_url, api_key=config.api_key, max_retries=0)
    answer = client.chat.completions.create(model=config.model, messages=first(task))
    return answer.choices[0].message.content


def hangs_up_in_the_middle(task, config):
    """Reads the beginning of an answer, hangs up, asks for a shorter one, and returns the beginning."""
    client = OpenAI(base_url=config.base_url, api_key=config.api_key, max_retries=0)
    asked = {"model": config.model, "messages": first(task)}
    with client.chat.completions.create(**asked, stream=True) as chunks:
        begun = next(text for chunk in chunks if (text := chunk.choices[0].delta.content))
    client.chat.completions.create(**asked, max_tokens=4)
    return begun


def through_each_api(task, config):
    """The pieces of one answer each, and the logprobs that the chat API tells."""
    client = OpenAI(base_url=config.base_url, api_key=config.api_key)
    asked = {"model": config.model, "messages": first(task)}
    chunks = list(client.chat.completions.create(**asked, stream=True, logprobs=True))
    choices = [chunk.choices[0] for chunk in chunks]
    logprobs = [token.logprob for one in choices if one.logprobs for token in one.logprobs.content]
    completion = client.completions.create(model=config.model, prompt=task.instruction, stream=True)
    events = list(client.responses.create(model=config.model, input=first(task), stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    theirs = Anthropic(base_url=config.base_url.removesuffix("/v1"), api_key=config.api_key)
    with theirs.messages.stream(**asked, max_tokens=99) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    return {
        "pieces": [
            [one.delta.content for one in choices if one.delta.content],
            [chunk.choices[0].text for chunk in completion if chunk.choices[0].text],
            deltas,
            texts,
        ],
        "logprobs": logprobs,
        "finals": [events[-1].response.output_text, message.content[0].text],
    }
