"""A graph of LangGraph: the model and its tools in turn, streamed token by token."""

import os
import sys

from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = ChatOpenAI(model=os.environ["OPENAI_MODEL"], streaming=True, temperature=0).bind_tools([add])


def ask(state: MessagesState) -> dict[str, list]:
    return {"messages": [model.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("ask", ask)
graph.add_node("tools", ToolNode([add]))
graph.add_edge(START, "ask")
graph.add_conditional_edges("ask", tools_condition)
graph.add_edge("tools", "ask")

for chunk, _ in graph.compile().stream({"messages": [("user", sys.stdin.read())]}, stream_mode="messages"):
    if isinstance(chunk, AIMessageChunk):
        print(chunk.content, end="")
