"""An agent of the OpenAI Agents SDK that speaks the chat API and streams."""

import asyncio
import os
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api

set_default_openai_api("chat_completions")


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    model = os.environ["OPENAI_MODEL"]
    agent = Agent(name="calculator", instructions="You are a calculator.", model=model, tools=[add])
    result = Runner.run_streamed(agent, sys.stdin.read())
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            print(event.data.delta, end="", flush=True)


asyncio.run(main())
