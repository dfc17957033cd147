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
    find("key-form").onsubmit = () => sessionStorage.setItem(KEY, find("key-word").value);
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

/** Yields the data of each event of a streamed answer. When the connection is lost, another one goes on after
 * the last event, at any gateway. Throws Refused, or AbortError. */
export async function* answerEvents(path, options) {
  let response = await ask(path, options);
  const returnPath = response.headers.get("content-location");
  let numSeen = 0;
  while (response.status !== 204) {
    try {
      for await (const data of events(response)) {
        numSeen += 1;
        yield data;
        if (data === "[DONE]") return;
      }
    } catch (error) {
      if (error.name === "AbortError" || !returnPath) throw error;
    }
    if (!returnPath) return;
    response = await comeBack(returnPath, numSeen, options.signal);
  }
}

async function comeBack(returnPath, numSeen, signal) {
  const until_ms = performance.now() + RETURN_MS;
  for (;;) {
    signal.throwIfAborted();
    try {
      return await ask(returnPath, { headers: numSeen ? { "last-event-id": numSeen } : {}, signal });
    } catch (error) {
      const mayComeBack = error.status === 0 || error.status === 503;
      if (!mayComeBack || performance.now() > until_ms) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

/** Yields the data of each event. Ends with the response, however that ends. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}
