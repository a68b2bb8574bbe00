"""An agent of the OpenAI Agents SDK, which speaks the responses API."""

import os
import sys

from agents import Agent, Runner, function_tool


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = Agent(name="calculator", instructions="You are a calculator.", model=os.environ["OPENAI_MODEL"], tools=[add])
print(Runner.run_sync(agent, sys.stdin.read()).final_output)
