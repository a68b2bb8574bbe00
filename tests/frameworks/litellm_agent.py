"""A loop of calls through LiteLLM, streamed."""

import json
import os
import sys

import litellm

litellm.suppress_debug_info = True


def add(a: int, b: int) -> int:
    return a + b


number = {"type": "integer"}
parameters = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
tools = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": parameters}}]
messages = [
    {"role": "system", "content": "You are a calculator."},
    {"role": "user", "content": sys.stdin.read()},
]
while True:
    chunks = litellm.completion(
        model=f"openai/{os.environ['OPENAI_MODEL']}", messages=messages, tools=tools, tool_choice="auto", stream=True
    )
    message = litellm.stream_chunk_builder(list(chunks), messages=messages).choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = add(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
print(message.content)
