"""crewAI: a crew of one agent with a tool."""

import os
import subprocess

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("bash")
def bash(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


model = LLM(model="openai/smollm2", base_url=f"{os.environ['FLEET']}/v1", api_key="none", stream=True)
agent = Agent(role="worker", goal="Do it.", backstory="You do it.", llm=model, tools=[bash])
task = Task(description="Do it.", expected_output="What was done.", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff())
