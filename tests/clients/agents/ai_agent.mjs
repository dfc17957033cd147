// The AI SDK: streamText with a tool, up to five steps.
import { execSync } from "node:child_process";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const fleet = createOpenAICompatible({ name: "fleet", baseURL: `${process.env.FLEET}/v1`, includeUsage: true });
const bash = tool({
  description: "Run a command.",
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => execSync(command).toString(),
});
const answer = streamText({ model: fleet("smollm2"), prompt: "Do it.", tools: { bash }, stopWhen: stepCountIs(5) });
for await (const text of answer.textStream) process.stdout.write(text);
