"""A crew of one agent of CrewAI, with a tool."""

import os
import sys

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = LLM(model=os.environ["OPENAI_MODEL"], provider="openai")
agent = Agent(role="Calculator", goal="Add numbers", backstory="You are good at sums.", tools=[add], llm=model)
task = Task(description=sys.stdin.read(), expected_output="the sum", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff().raw)
