"""smolagents: its agent that calls tools, or, with the word `code`, the one that writes code."""

import os
import subprocess
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def bash(command: str) -> str:
    """Run a command.

    Args:
        command: what the shell runs.
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


model = OpenAIServerModel(model_id="smollm2", api_base=f"{os.environ['FLEET']}/v1", api_key="none")
kind = CodeAgent if "code" in sys.argv else ToolCallingAgent
print(kind(tools=[bash], model=model).run("Do it."))
