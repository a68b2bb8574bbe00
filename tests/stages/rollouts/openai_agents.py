"""Agents as users have them: they know nothing of Rollmill but ``config.base_url``, ``api_key`` and ``model``."""

# mypy: disable-error-code="union-attr,list-item,index,arg-type,call-overload,dict-item,var-annotated"

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
from openai import APIStatusError, APITimeoutError, AsyncOpenAI, OpenAI

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def first(task):
    return [{"role": "user", "content": task.instruction}]


def three_turns(task, config):
    client = OpenAI(base_url=config.base_url, api_key=config.api_key)
    messages = first(task)
    for _ in range(3):
        answer = client.chat.completions.create(model=config.model, messages=messages, temperature=0.0)
        messages += [answer.choices[0].message, {"role": "user", "content": "sure?"}]
    return {"usage": answer.usage.model_dump(exclude_none=True), "model": answer.model}


async def streams(task, config):
    async with AsyncOpenAI(base_url=config.base_url, api_key=config.api_key) as client:
        stream = await client.chat.completions.create(
            model=config.model, messages=first(task), stream=True, stream_options={"include_usage": True}
        )
        text, reasons, usage = "", [], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
    return {"text": text, "reasons": reasons, "sampled": usage.completion_tokens}


async def uses_a_tool(task, config):
    messages = first(task)
    async with AsyncOpenAI(base_url=config.base_url, api_key=config.api_key) as client:
        answer = await client.chat.completions.create(model=config.model, messages=messages, tools=[ADD])
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            arguments = json.loads(call.function.arguments)
            result = {"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])}
            messages.append(result)
        await client.chat.completions.create(model=config.model, messages=messages, tools=[ADD])
    return {"reason": answer.choices[0].finish_reason, "content": message.content}


def chooses_its_tools(task, config):
    """Tokens of the prompt, by the choice of tools that the client makes."""
    client = OpenAI(base_url=config.base_url, api_key=config.api_key)
    asked = {"model": config.model, "messages": first(task), "tools": [ADD]}
    named = {"type": "function", "function": {"name": "add"}}
    told = [
        client.chat.completions.create(**asked, tool_choice=choice).usage.prompt_tokens
        for choice in ("auto", "required", named, "none")
    ]
    asked = {"model": config.model, "input": task.instruction, "tools": [{"type": "function", **ADD["function"]}]}
    named = {"type": "function", "name": "add"}
    told += [
        client.responses.create(**asked, tool_choice=choice).usage.input_tokens
        for choice in ("auto", "required", named, "none")
    ]
    return {"told": told}


def several_at_once(task, config):
    """Concurrent calls of two roles, answered in any order, and two choices of one call."""

    def ask(role):
        own = config.for_role(role)
        client = OpenAI(base_url=own.base_url, api_key=own.api_key)
        return client.chat.completions.create(
            model=config.model, messages=[*first(task), {"role": "user", "content": role}]
        )

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, ["solver-0", "judge", "solver-1", "judge"]))
    client = OpenAI(base_url=config.base_url, api_key=config.api_key)
    answer = client.chat.completions.create(model=config.model, messages=first(task), n=2, logprobs=True)
    told = [[token.logprob for token in choice.logprobs.content] for choice in answer.choices]
    return {"texts": [choice.message.content for choice in answer.choices], "logprobs": told}


def stops_at_a_text(task, config):
    """Whole and as a stream; then the conversation goes on from the streamed answer."""
    client = OpenAI(base_url=config.base_url, api_key=config.api_key)
    asked = {"model": config.model, "messages": first(task)}
    whole = client.chat.completions.create(**asked, stop=["\nObservation:", "nothing"]).choices[0]
    stream = list(client.chat.completions.create(**asked, stop="\nObservation:", stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    messages = [*first(task), {"role": "assistant", "content": streamed}, {"role": "user", "content": "19"}]
    client.chat.completions.create(model=config.model, messages=messages)
    return {
        "told": [whole.message.content, streamed],
        "reasons": [whole.finish_reason, stream[-1].choices[0].finish_reason],
    }


def by_header(task, config):
    client = OpenAI(base_url=config.base_url, api_key=config.api_key, default_headers={"X-Rollmill-Role": "critic"})
    client.chat.completions.create(model=config.model, messages=first(task))


def by_context(task, config):
    """One client, with the role from the block around each call; blocks side by side do not mix."""
    client = OpenAI(base_url=config.base_url, api_key=config.api_key)

    def ask(text):
        return client.chat.completions.create(
            model=config.model, messages=[*first(task), {"role": "user", "content": text}], extra_headers=config.headers
        )

    def judged(name):
        with config.as_role(name) as judge:
            ask(name)
            client_of_block = OpenAI(base_url=config.base_url, api_key=config.api_key)
            client_of_block.chat.completions.create(model=config.model, messages=first(task))
            judge.for_role("inner").chat_sync(first(task))
            config.chat_sync([*first(task), {"role": "user", "content": "last"}])

    ask("before")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(judged, ["judge-0", "judge-1"]))
    ask("after")


def wrong_calls(task, config):
    """Everything that is refused, and one good call after it."""
    client = OpenAI(base_url=config.base_url, api_key=config.api_key, max_retries=0)
    told = []

    def refused(**changed):
        try:
            client.chat.completions.create(**({"model": config.model, "messages": first(task)} | changed))
        except APIStatusError as error:
            told.append([type(error).__name__, error.status_code, error.body["message"]])

    refused(model="gpt-4")
    refused(messages=[])
    refused(messages=[{"role": "robot", "content": "x"}])
    refused(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}])
    refused(messages=[{"role": "user", "content": "word " * 2000}])
    refused(n=0)
    refused(stop=["Observation:", ""])
    refused(logprobs=True, top_logprobs=3)
    refused(tool_choice="required")
    refused(tools=[ADD], tool_choice={"type": "function", "function": {"name": "subtract"}})
    refused(tools=[ADD], tool_choice="always")
    refused(tools=ADD)
    refused(seed="x")
    client.api_key = "another's"
    refused()
    client.api_key = config.api_key
    client.chat.completions.create(model=config.model, messages=first(task))
    return {"told": told}


def hostile_requests(task, config):
    """What no client library would send."""
    url, good = f"{config.base_url}/chat/completions", {"Authorization": f"Bearer {config.api_key}"}

    def body(text):
        return json.dumps({"model": config.model, "messages": [{"role": "user", "content": text}]}).encode()

    sent = [
        (good, b"{nonsense"),
        (good, b"[" * 100_000),
        (good, b"[]"),
        (good, body("\ud83d")),
        (good, b"\xff\xfe{}"),
        ({"Authorization": b"Bearer \xff\xfe"}, body("x")),
        (good, body("\U0001f600")),
    ]
    answers = [httpx.post(url, content=content, headers=headers, timeout=30) for headers, content in sent]
    return {"told": [[one.status_code, (one.json().get("error") or {}).get("code")] for one in answers]}


def calls_too_often(task, config):
    client = OpenAI(base_url=config.base_url, api_key=config.api_key)
    for _ in range(5):
        client.chat.completions.create(model=config.model, messages=first(task))


async def hangs_after_a_call(task, config):
    async with AsyncOpenAI(base_url=config.base_url, api_key=config.api_key) as client:
        await client.chat.completions.create(model=config.model, messages=first(task))
        await asyncio.sleep(60)


def hangs_up(task, config):
    """Gives up a call before it is answered, and makes it again."""
    impatient = OpenAI(base_url=config.base_url, api_key=config.api_key, timeout=0.001, max_retries=0)
    with suppress(APITimeoutError):
        impatient.chat.completions.create(model=config.model, messages=first(task))
    patient = OpenAI(base_url=config.base_url, api_key=config.api_key)
    patient.chat.completions.create(model=config.model, messages=first(task))


def wishes(task, config):
    client = OpenAI(base_url=config.base_url, api_key=config.api_key)
    client.chat.completions.create(model=config.model, messages=first(task), temperature=0.25, max_tokens=3)


def spies(task, config):
    """Tries to use the session of another episode."""
    base = config.base_url.replace(config.session_uid, "0" * 32)
    try:
        OpenAI(base_url=base, api_key=config.api_key, max_retries=0).chat.completions.create(
            model=config.model, messages=first(task)
        )
    except APIStatusError as error:
        return type(error).__name__
    return "it worked"


def two_responses(task, config):
    client = OpenAI(base_url=config.base_url, api_key=config.api_key)
    items = [{"role": "user", "content": task.instruction}]
    answer = client.responses.create(model=config.model, instructions="be brief", input=items)
    items += [item.model_dump() for item in answer.output]
    items.append({"role": "user", "content": [{"type": "input_text", "text": "sure?"}]})
    last = client.responses.create(model=config.model, instructions="be brief", input=items)
    usage = [last.usage.input_tokens, last.usage.output_tokens]
    return {"usage": usage, "text": last.output_text, "status": last.status}


async def streams_a_response_with_a_tool(task, config):
    tool = {"type": "function", "strict": False, **ADD["function"]}
    items = [{"role": "user", "content": task.instruction}]
    async with AsyncOpenAI(base_url=config.base_url, api_key=config.api_key) as client:
        async with client.responses.stream(model=config.model, input=items, tools=[tool]) as stream:
            kinds = [event.type async for event in stream]
            answer = await stream.get_final_response()
        items += [item.model_dump(exclude={"parsed_arguments"}) for item in answer.output]
        for item in answer.output:
            if item.type == "function_call":
                given = json.loads(item.arguments)
                output = str(given["a"] + given["b"])
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
        await client.responses.create(model=config.model, input=items, tools=[tool])
    return {"kinds": kinds, "items": [item.type for item in answer.output]}


def wrong_responses(task, config):
    client = OpenAI(base_url=config.base_url, api_key=config.api_key, max_retries=0)
    told = []
    for wrong in ({"input": []}, {"input": "x", "previous_response_id": "resp_1"}, {"input": [{"type": "image"}]}):
        try:
            client.responses.create(model=config.model, **wrong)
        except APIStatusError as error:
            told.append([error.status_code, error.body["message"]])
    return {"told": told}
