// Server-sent events of an answer, one after another, over as many connections as it takes.

import { ask } from "./requests.js";

const RETURN_MS = 30_000;
const PAUSE_MS = 250;

/** Yields the data of each event of a streamed answer. When the connection is lost it comes back behind the
 * last event, at whichever gateway is there. Throws Refused, or AbortError. */
export async function* answerEvents(path, options) {
  let response = await ask(path, options);
  const place = response.headers.get("content-location");
  let numSeen = 0;
  while (response.status !== 204) {
    try {
      for await (const data of events(response)) {
        numSeen += 1;
        yield data;
        if (data === "[DONE]") return;
      }
    } catch (error) {
      if (error.name === "AbortError" || !place) throw error;
    }
    if (!place) return;
    response = await comeBack(place, numSeen, options.signal);
  }
}

async function comeBack(place, numSeen, signal) {
  const until_ms = performance.now() + RETURN_MS;
  for (;;) {
    signal.throwIfAborted();
    try {
      return await ask(place, { headers: numSeen ? { "last-event-id": numSeen } : {}, signal });
    } catch (error) {
      const mayComeBack = error.status === 0 || error.status === 503;
      if (!mayComeBack || performance.now() > until_ms) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
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
