"""An assistant of AutoGen, with a tool."""

import asyncio
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model=os.environ["OPENAI_MODEL"],
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": False,
            "structured_output": False,
            "family": ModelFamily.UNKNOWN,
        },
    )
    agent = AssistantAgent(
        "calculator", client, tools=[add], system_message="You are a calculator.", max_tool_iterations=5
    )
    result = await agent.run(task=sys.stdin.read())
    print(result.messages[-1].content)
    await client.close()


asyncio.run(main())
