"""Agents with Anthropic's client, as users have them."""

# mypy: disable-error-code="union-attr,arg-type,list-item,call-overload,index,operator"

from anthropic import Anthropic, APIStatusError, AsyncAnthropic

ADD = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def first(task):
    return [{"role": "user", "content": task.instruction}]


def two_turns(task, config):
    client = Anthropic(base_url=config.base_url, api_key=config.api_key)
    messages = first(task)
    answer = client.messages.create(model=config.model, max_tokens=50, system="be brief", messages=messages)
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "sure?"}]
    last = client.messages.create(model=config.model, max_tokens=50, system="be brief", messages=messages)
    return {"usage": [last.usage.input_tokens, last.usage.output_tokens], "reason": last.stop_reason}


async def streams(task, config):
    client = AsyncAnthropic(base_url=config.base_url.removesuffix("/v1"), api_key=config.api_key)
    async with client, client.messages.stream(model=config.model, max_tokens=50, messages=first(task)) as stream:
        text = "".join([part async for part in stream.text_stream])
        whole = await stream.get_final_message()
    return {"text": text, "sampled": whole.usage.output_tokens}


def uses_a_tool(task, config):
    client = Anthropic(base_url=config.base_url, api_key=config.api_key)
    messages = first(task)
    with client.messages.stream(model=config.model, max_tokens=50, messages=messages, tools=[ADD]) as stream:
        answer = stream.get_final_message()
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": str(block.input["a"] + block.input["b"])}
        for block in answer.content
        if block.type == "tool_use"
    ]
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    must = {"type": "any"}
    client.messages.create(model=config.model, max_tokens=50, messages=messages, tools=[ADD], tool_choice=must)
    return {"reason": answer.stop_reason, "blocks": [block.type for block in answer.content]}


def stops_at_a_text(task, config):
    client = Anthropic(base_url=config.base_url, api_key=config.api_key)
    asked = {"model": config.model, "max_tokens": 50, "messages": first(task), "stop_sequences": ["</answer>"]}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    return {"told": [[one.content[0].text, one.stop_reason, one.stop_sequence] for one in (whole, streamed)]}


def wrong_calls(task, config):
    client = Anthropic(base_url=config.base_url, api_key=config.api_key, max_retries=0)
    told = []

    def refused(**changed):
        try:
            client.messages.create(**({"model": config.model, "max_tokens": 9, "messages": first(task)} | changed))
        except APIStatusError as error:
            told.append([type(error).__name__, error.status_code, error.body["error"]["message"]])

    refused(model="claude")
    refused(messages=[{"role": "robot", "content": "x"}])
    refused(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}])
    refused(messages=[{"role": "user", "content": "word " * 2000}])
    refused(stop_sequences=[3])
    refused(tools=[ADD], tool_choice={"type": "tool", "name": "subtract"})
    client.api_key = "another's"
    refused()
    return {"told": told}
