// Requests to the gateway, with the API key if there is one. Errors have a readable text.

import { find, say } from "./dom.js";

const KEY = "tokenfleet.api_key";
/** How long, and how often, a lost stream is asked for again. */
const RETURN_MS = 30_000;
const RETRY_MS = 250;

/** A failed request; `status` is 0 if there was no response. */
export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

/** A successful response, within `patience_ms` if given; after a 401 the user is asked for the key. Throws
 * Refused. */
export async function ask(path, { patience_ms, ...options } = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    const signal = patience_ms ? AbortSignal.timeout(patience_ms) : options.signal;
    response = await fetch(path, { ...options, headers, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "No gateway answers.");
  }
  if (response.status === 401) {
    await keyEntered();
    return ask(path, { patience_ms, ...options });
  }
  if (!response.ok) throw new Refused(response.status, await cause(response));
  return response;
}

/** What this key may see: `status` is what the fleet's routes answer, `text` why. It is asked for until a
 * gateway knows; `missed` is told why none did. */
export async function readAccess(missed) {
  for (;;) {
    try {
      const access = await (await ask("/page/access")).json();
      if (access.status === 401) await keyEntered();
      else if (access.status < 500) return access;
      else missed(access.text);
    } catch (error) {
      missed(error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

async function cause(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return error?.message ?? error ?? text;
  } catch {
    return text || `${response.status} ${response.statusText}`;
  }
}

let entering = null;

/** Shows one dialog, however many requests wait for the key. */
function keyEntered() {
  entering ??= new Promise((resolve) => {
    const dialog = find("key");
    const isWrong = sessionStorage.getItem(KEY);
    say(find("key-hint"), isWrong ? "This key is wrong." : "It is kept in this tab until you close it.");
    sessionStorage.removeItem(KEY);
    find("key-form").onsubmit = () => {
      const word = find("key-word").value.replace(/[^ -~]/g, ""); // what was pasted beside it fits no header
      sessionStorage.setItem(KEY, word);
    };
    dialog.onclose = () => {
      if (!sessionStorage.getItem(KEY)) return dialog.showModal();
      entering = null;
      resolve();
    };
    dialog.showModal();
  });
  return entering;
}

// --- streams

/** The token of a chunk: of the answer, or of reasoning. The first chunk has the role, and no token. */
export function tokenOf({ role, content, reasoning_content: thought } = {}) {
  return role === undefined ? (content ?? thought) : undefined;
}

/** Yields the data of each event of a streamed answer, after calling `begun` with the answer's id. When the
 * connection is lost, another one goes on after the last event, at any gateway. Throws Refused, or
 * AbortError. */
export async function* answerEvents(path, begun, options) {
  let response = await ask(path, options);
  const returnPath = response.headers.get("content-location");
  begun(returnPath?.split("/")[2]);
  let numSeen = 0;
  while (response.status !== 204) {
    try {
      for await (const { data } of events(response)) {
        numSeen += 1;
        yield data;
        if (data === "[DONE]") return;
      }
    } catch (error) {
      if (error.name === "AbortError" || !returnPath) throw error;
    }
    if (!returnPath) return;
    const headers = numSeen ? { "last-event-id": numSeen } : {};
    response = await comeBack(returnPath, { headers, signal: options.signal });
  }
}

/** Yields the events of several answers as they come, on one connection. Each goes on after its last event
 * when that is lost. Throws Refused, or AbortError. */
export async function* mergedEvents(answers, signal) {
  const seen = new Map(answers.map((answer) => [answer, 0]));
  while (seen.size) {
    const streams = [...seen].map(([answer, number]) => (number ? `${answer}/${number}` : answer));
    const headers = { "content-type": "application/json" };
    const options = { method: "POST", headers, body: JSON.stringify({ streams }), signal };
    const response = await comeBack("/requests/streams", options);
    if (response.status === 204) return;
    try {
      for await (const { id, data } of events(response)) {
        const [answer, number] = id.split("/");
        if (Number(number) !== seen.get(answer) + 1) throw new Refused(0, "An event is missing.");
        seen.set(answer, Number(number));
        if (data === "[DONE]") seen.delete(answer);
        yield { answer, data };
      }
    } catch (error) {
      if (error.name === "AbortError" || error instanceof Refused) throw error;
    }
  }
}

export const mayComeBack = (error) => error.status === 0 || error.status === 503;

/** A response, asked for again while no gateway answers. */
export async function comeBack(path, options) {
  const until_ms = performance.now() + RETURN_MS;
  for (;;) {
    options.signal.throwIfAborted();
    try {
      return await ask(path, options);
    } catch (error) {
      if (!mayComeBack(error) || performance.now() > until_ms) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

/** Yields the id and the data of each event. Ends with the response, however that ends. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let id = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("id:")) id = line.slice(3).trim();
      if (line.startsWith("data:")) yield { id, data: line.slice(5).trim() };
    }
  }
}
