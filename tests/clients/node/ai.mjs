// The AI SDK: @ai-sdk/openai by its default path (Responses) and by chat, and @ai-sdk/openai-compatible.
import assert from "node:assert/strict";
import test from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.env.FLEET}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "fleet", baseURL, supportsStructuredOutputs: true });
const schema = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(120) });
const models = { default: openai("smollm2"), chat: openai.chat("smollm2"), compatible: compatible("smollm2") };

for (const [name, model] of Object.entries(models)) {
  const own = { model, maxRetries: 0, temperature: 0 };
  const question = { ...own, prompt: "Name three colours.", maxOutputTokens: 12 };
  const bob = { ...own, schema, prompt: "Bob is 32 years old.", maxOutputTokens: 80 };

  test(`${name}: a text is the same streamed and whole`, async () => {
    const whole = await generateText(question);
    let streamed = "";
    for await (const piece of streamText(question).textStream) streamed += piece;
    assert.equal(streamed, whole.text);
    assert.notEqual(whole.text, "");
    assert.equal(whole.usage.outputTokens, 12);
  });

  test(`${name}: objects, whole and streamed`, async () => {
    schema.parse((await generateObject(bob)).object);
    let last;
    for await (const partial of streamObject(bob).partialObjectStream) last = partial;
    schema.parse(last);
    schema.parse((await generateText({ ...bob, output: Output.object({ schema }) })).output);
  });

  test(`${name}: a tool is called, and its result is answered`, async () => {
    const places = [];
    const weather = tool({
      description: "Weather of a place",
      inputSchema: z.object({ place: z.string().max(12) }),
      execute: async ({ place }) => (places.push(place), "31 degrees"),
    });
    const asked = {
      ...own,
      prompt: "How warm is it in Rome?",
      tools: { weather },
      maxOutputTokens: 80,
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
    };
    const whole = await generateText(asked);
    assert.ok(places.length > 0);
    assert.equal(whole.steps.length, 2);
    assert.notEqual(whole.text, "");
    const streamed = streamText(asked);
    assert.equal(await streamed.text, whole.text);
  });
}

test("the older route", async () => {
  const model = openai.completion("smollm2");
  assert.notEqual((await generateText({ model, prompt: "The capital of France is", maxOutputTokens: 5 })).text, "");
});
