// @huggingface/inference: an endpoint's URL in place of a model; chats and texts, whole and streamed.
import assert from "node:assert/strict";
import test from "node:test";
import { InferenceClient } from "@huggingface/inference";

const client = new InferenceClient("none", { endpointUrl: process.env.FLEET });
const messages = [{ role: "user", content: "Name three colours." }];

test("a chat is the same streamed and whole", async () => {
  const body = { messages, temperature: 0, max_tokens: 12 };
  const whole = (await client.chatCompletion(body)).choices[0].message.content;
  let text = "";
  for await (const chunk of client.chatCompletionStream(body)) text += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(text, whole);
});

test("text generation, whole and streamed", async () => {
  const body = { inputs: "The capital of France is", parameters: { max_new_tokens: 5, temperature: 0 } };
  assert.match((await client.textGeneration(body)).generated_text, /Paris/);
  let chunks = 0;
  for await (const chunk of client.textGenerationStream(body)) chunks += 1;
  assert.ok(chunks >= 5);
});

test("a chat with a JSON schema", async () => {
  const schema = { type: "object", properties: { age: { type: "integer", maximum: 120 } }, required: ["age"], additionalProperties: false };
  const response_format = { type: "json_schema", json_schema: { name: "age", schema } };
  const asked = [{ role: "user", content: "Bob is 32. Answer as JSON." }];
  const answer = await client.chatCompletion({ messages: asked, temperature: 0, max_tokens: 40, response_format });
  assert.equal(typeof JSON.parse(answer.choices[0].message.content).age, "number");
});

test("a tool is called and its result is answered", async () => {
  const parameters = { type: "object", properties: { place: { type: "string", maxLength: 12 } }, required: ["place"] };
  const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
  const asked = [{ role: "user", content: "How warm is it in Rome?" }];
  const body = { tools, temperature: 0, max_tokens: 80 };
  const { message } = (await client.chatCompletion({ ...body, messages: asked, tool_choice: "required" })).choices[0];
  assert.equal(message.tool_calls[0].function.name, "get_weather");
  assert.ok(JSON.parse(message.tool_calls[0].function.arguments).place !== undefined);
  const results = message.tool_calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: "31 degrees" }));
  const after = [...asked, message, ...results];
  const answer = await client.chatCompletion({ ...body, messages: after, tool_choice: "none" });
  assert.notEqual(answer.choices[0].message.content, "");
});
