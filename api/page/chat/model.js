// What the chat asks: the fleet's model or one of its adapters; and whether it sees pictures.

import { find, make } from "../dom.js";
import { on } from "../fleet.js";
import { ask } from "../requests.js";

/** The name that is the fleet's own model, whatever that is called. */
const OWN = "tgi";

/** Null while nothing has said so. */
let seesPictures = null;
let wasServing = false;

export const sees = () => seesPictures;
export const chosen = () => find("chosen").value || OWN;

export function startModel() {
  on("access", ({ status }) => status === 200 || learn());
  on("seen", ({ health }) => {
    const isServing = health.state !== "bad";
    if (isServing && !wasServing) learn();
    wasServing = isServing;
  });
  find("settings").ontoggle = learn;
}

/** Reads it again: without a worker nothing is known, and adapters come and go. */
export async function learn() {
  let info, models;
  try {
    [info, models] = await Promise.all(["/info", "/v1/models"].map(async (path) => (await ask(path)).json()));
  } catch {
    return;
  }
  seesPictures = info.model_pipeline_tag === "image-text-to-text";
  find("attach").hidden = !seesPictures;
  offer(models.data.map(({ id }) => id));
}

function offer(names) {
  const [select, before] = [find("chosen"), find("chosen").value];
  const all = new Set(before ? [...names, before] : names); // one that is gone is refused by its name
  select.replaceChildren(...[...all].map((name) => make("option", { value: name }, name)));
  if (before) select.value = before;
  select.parentElement.hidden = select.options.length < 2;
}
