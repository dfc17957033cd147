"""OpenHands: its SDK's agent with a terminal."""

import os

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool

model = LLM(model="openai/smollm2", base_url=f"{os.environ['FLEET']}/v1", api_key="none")
agent = Agent(llm=model, tools=[Tool(name=TerminalTool.name)])
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message("Do it.")
conversation.run()
