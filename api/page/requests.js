// Requests to the gateway: they carry the API key if there is one, and throw errors with a readable text.

import { find, say } from "./node.js";

const KEY = "tokenfleet.api_key";

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
