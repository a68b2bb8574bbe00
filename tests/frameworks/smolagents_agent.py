"""An agent of smolagents that calls tools; its answer is the call of one, too."""

import os
import sys

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


agent = ToolCallingAgent([add], OpenAIModel(os.environ["OPENAI_MODEL"]), verbosity_level=LogLevel.OFF)
print(agent.run(sys.stdin.read()))
