"""An agent of pydantic-ai, with a tool."""

import os
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"]), instructions="You are a calculator.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


print(agent.run_sync(sys.stdin.read()).output)
