"""LangGraph: a graph of a model and its tools, streamed by messages."""

import os
import subprocess

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def bash(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


model = ChatOpenAI(model="smollm2", base_url=f"{os.environ['FLEET']}/v1", api_key="none").bind_tools([bash])


def answer(state: MessagesState) -> MessagesState:
    return {"messages": [model.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("model", answer)
graph.add_node("tools", ToolNode([bash]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
for message, _ in graph.compile().stream({"messages": [("user", "Do it.")]}, stream_mode="messages"):
    print(message.content, end="")
