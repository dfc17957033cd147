// The question whether somebody is sure.

import { find, say } from "../dom.js";

/** Whether the answer is yes. */
export function confirmed(title, words) {
  const dialog = find("sure");
  say(find("sure-title"), title);
  say(find("sure-words"), words);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => (dialog.onclose = () => resolve(dialog.returnValue === "yes")));
}
