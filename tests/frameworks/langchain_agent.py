"""LangChain's agent, with a tool."""

import os
import sys

from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = create_agent(ChatOpenAI(model=os.environ["OPENAI_MODEL"]), [add], system_prompt="You are a calculator.")
result = agent.invoke({"messages": [{"role": "user", "content": sys.stdin.read()}]})
print(result["messages"][-1].content)
