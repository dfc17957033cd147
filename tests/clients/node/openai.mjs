// openai: chat, stream, its helpers for streams and for zod, and the older route.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = "smollm2";
const client = new OpenAI({ baseURL: `${process.env.FLEET}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Name three colours." }];
const body = { model, messages, temperature: 0, max_tokens: 12 };
const Person = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(120) });
const bob = [{ role: "user", content: "Bob is 32 years old. Answer as JSON." }];

test("a chat is the same streamed and whole", async () => {
  const whole = (await client.chat.completions.create(body)).choices[0].message.content;
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...body, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  assert.equal(text, whole);
  const helped = await client.chat.completions.stream(body).finalChatCompletion();
  assert.equal(helped.choices[0].message.content, whole);
});

test("parse gives an object", async () => {
  const response_format = zodResponseFormat(Person, "person");
  const parsed = await client.chat.completions.parse({ ...body, messages: bob, max_tokens: 80, response_format });
  Person.parse(parsed.choices[0].message.parsed);
});

test("prompts of the older route, models, and a refusal", async () => {
  const prompt = ["a", "b", "c", "d", "e", "f"];
  assert.equal((await client.completions.create({ model, prompt, max_tokens: 3 })).choices.length, 6);
  assert.equal((await client.models.list()).data[0].id, model);
  await assert.rejects(client.chat.completions.create({ ...body, temperature: -1 }), OpenAI.BadRequestError);
});

test("a response, whole and as events", async () => {
  const request = { model, input: "Name three colours.", temperature: 0, max_output_tokens: 12 };
  const whole = await client.responses.create(request);
  let text = "";
  for await (const event of await client.responses.create({ ...request, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(text, whole.output_text);
  assert.notEqual(text, "");
});


const tool = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: {
      type: "object",
      properties: { place: { type: "string", maxLength: 12 } },
      required: ["place"],
      additionalProperties: false,
    },
  },
};
const warm = [{ role: "user", content: "How warm is it in Rome?" }];

test("a tool is called and its result is answered", async () => {
  const asked = { ...body, messages: warm, tools: [tool], tool_choice: "required", max_tokens: 80 };
  const { message } = (await client.chat.completions.create({ ...asked, parallel_tool_calls: false })).choices[0];
  assert.ok(JSON.parse(message.tool_calls[0].function.arguments).place !== undefined);
  const streamed = await client.chat.completions.stream({ ...asked, parallel_tool_calls: false }).finalMessage();
  assert.equal(streamed.tool_calls[0].function.arguments, message.tool_calls[0].function.arguments);
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "31 degrees" };
  const messages = [...warm, message, result];
  const after = await client.chat.completions.create({ ...asked, messages, tool_choice: "none" });
  assert.notEqual(after.choices[0].message.content, "");
});

test("a tool of a response, and its output behind previous_response_id", async () => {
  const tools = [{ type: "function", ...tool.function, strict: true }];
  const asked = { model, tools, temperature: 0, max_output_tokens: 80 };
  const first = await client.responses.create({ ...asked, input: warm, tool_choice: "required" });
  const call = first.output.find((item) => item.type === "function_call");
  assert.ok(JSON.parse(call.arguments).place !== undefined);
  const input = first.output
    .filter((item) => item.type === "function_call")
    .map((item) => ({ type: "function_call_output", call_id: item.call_id, output: "31 degrees" }));
  const second = await client.responses.create({ ...asked, input, previous_response_id: first.id, tool_choice: "none" });
  assert.notEqual(second.output_text, "");
});
