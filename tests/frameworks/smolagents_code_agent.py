"""An agent of smolagents that writes code, in which it calls tools."""

import os
import sys

from smolagents import CodeAgent, LogLevel, OpenAIModel, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


agent = CodeAgent([add], OpenAIModel(os.environ["OPENAI_MODEL"]), verbosity_level=LogLevel.OFF)
print(agent.run(sys.stdin.read()))
