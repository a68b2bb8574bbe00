"""Agents that want their answers in a JSON form, with the official clients, unchanged."""

# mypy: disable-error-code="union-attr,arg-type,call-overload,dict-item,list-item,index"

from typing import Literal

from anthropic import Anthropic
from anthropic import BadRequestError as AnthropicBadRequestError
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

from tests.stages.rollouts.openai_agents import ADD, first


class Verdict(BaseModel):
    """Few texts fit it, so that a policy that has learned nothing comes to an end."""

    choice: Literal["left", "right"]
    is_sure: bool


SCHEMA = Verdict.model_json_schema() | {"additionalProperties": False}


def in_a_form(task, config):
    """One answer through each API."""
    client = OpenAI(base_url=config.base_url, api_key=config.api_key)
    chat = client.chat.completions.parse(model=config.model, messages=first(task), response_format=Verdict)
    response = client.responses.parse(model=config.model, input=first(task), text_format=Verdict)
    theirs = Anthropic(base_url=config.base_url.removesuffix("/v1"), api_key=config.api_key)
    message = theirs.messages.parse(model=config.model, messages=first(task), max_tokens=100, output_format=Verdict)
    told = [chat.choices[0].message.parsed, response.output_parsed, message.parsed_output]
    return {"told": [one.model_dump() for one in told]}


def any_object(task, config):
    client = OpenAI(base_url=config.base_url, api_key=config.api_key)
    form = {"type": "json_object"}
    answer = client.chat.completions.create(model=config.model, messages=first(task), response_format=form)
    return {"text": answer.choices[0].message.content, "reason": answer.choices[0].finish_reason}


def _form(schema):
    return {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}


def refused(task, config):
    """What each refusal says; and one good call after them."""
    client = OpenAI(base_url=config.base_url, api_key=config.api_key, max_retries=0)
    theirs = Anthropic(base_url=config.base_url.removesuffix("/v1"), api_key=config.api_key, max_retries=0)
    asked = {"model": config.model, "messages": first(task)}
    output = {"format": {"type": "json_schema", "schema": {"type": "text"}}}
    told = []
    for call in (
        lambda: client.chat.completions.create(**asked, response_format=_form({"type": "verdict"})),
        lambda: client.chat.completions.create(**asked, response_format=_form("verdict")),
        lambda: client.chat.completions.create(**asked, response_format={"type": "xml"}),
        lambda: client.chat.completions.create(**asked, response_format=_form(SCHEMA), tools=[ADD]),
        lambda: client.responses.create(
            model=config.model, input="x", text={"format": {"type": "json_schema", "name": "x", "schema": {"type": 1}}}
        ),
        lambda: theirs.messages.create(**asked, max_tokens=9, output_config=output),
        lambda: client.chat.completions.create(**asked, response_format=_form(SCHEMA)),
    ):
        try:
            call()
            told.append(["answered", None])
        except BadRequestError as error:
            told.append([error.code, error.param])
        except AnthropicBadRequestError as error:
            told.append([error.body["error"]["type"], error.body["error"]["message"]])
    client.chat.completions.create(**asked)
    return {"told": told}


def unsupported_by_the_server(task, config):
    """A schema as schemas go, that a server does not take; the episode goes on."""
    client = OpenAI(base_url=config.base_url, api_key=config.api_key, max_retries=0)
    asked = {"model": config.model, "messages": first(task)}
    try:
        client.chat.completions.create(**asked, response_format=_form({"type": "integer", "minimum": 5, "maximum": 1}))
    except BadRequestError as error:
        client.chat.completions.create(**asked)
        return {"code": error.code}
    return {"code": None}
