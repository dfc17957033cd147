// Tabs of the panel at the left: one view at a time, also by the address (`#wall`).

import { find } from "./dom.js";

const KEYS = { ArrowLeft: -1, ArrowRight: 1 };
const tabs = () => [...find("tabs").children].filter((tab) => !tab.hidden);

export function startTabs() {
  find("tabs").onclick = ({ target }) => target.role === "tab" && choose(target);
  find("tabs").onkeydown = (event) => {
    const step = KEYS[event.key];
    if (!step) return;
    const all = tabs();
    const next = all[(all.indexOf(document.activeElement) + step + all.length) % all.length];
    next.focus();
    choose(next);
  };
  showNamed();
}

/** Shows the view that the address names; the chat in place of one that is shown and may be seen no more. */
export function showNamed() {
  const named = [...find("tabs").children].find((tab) => location.hash === `#${viewOf(tab)}`);
  if (named?.hidden === false) choose(named);
  else if (named?.ariaSelected === "true") choose(find("tab-chat"));
}

const viewOf = (tab) => tab.id.replace("tab-", "");

function choose(chosen) {
  for (const tab of find("tabs").children) {
    const isChosen = tab === chosen;
    tab.setAttribute("aria-selected", isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
    find(tab.getAttribute("aria-controls")).hidden = !isChosen;
  }
  document.querySelector("main").dataset.view = viewOf(chosen);
  history.replaceState(null, "", viewOf(chosen) === "chat" ? location.pathname : `#${viewOf(chosen)}`);
}
