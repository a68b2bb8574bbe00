"""An agent of Strands, with a tool; it streams."""

import os
import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = OpenAIModel(model_id=os.environ["OPENAI_MODEL"])
agent = Agent(model, tools=[add], system_prompt="You are a calculator.", callback_handler=None)
print(agent(sys.stdin.read()))
