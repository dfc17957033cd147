"""pydantic-ai: an agent with a tool, streamed."""

import asyncio
import os
import subprocess

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{os.environ['FLEET']}/v1", api_key="none")
agent = Agent(OpenAIChatModel("smollm2", provider=provider))


@agent.tool_plain
def bash(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


async def main() -> None:
    async with agent.run_stream("Do it.") as answer:
        print(await answer.get_output())


asyncio.run(main())
