// One incident in full. The report is the coordinator's own, made for people once, for the terminal, the file and here alike.

import { $, el } from "./dom.js";
import { state } from "./stream.js";

let shown = { id: null, size: null };

export const idInAddress = () => new URLSearchParams(location.hash.slice(1)).get("incident");

export async function draw({ isOpened = false } = {}) {
  const id = idInAddress(), place = $("incident");
  for (const part of ["overview", "verdict"]) $(part).hidden = Boolean(id);
  place.hidden = !id;
  if (!id) { shown = { id: null, size: null }; return; }
  const size = state.incidents.find((one) => one.id === id)?.size ?? null;
  if (shown.id === id && shown.size === size) return;
  shown = { id, size };
  const answer = await fetch(`api/v1/incidents/${encodeURIComponent(id)}/report`).catch(() => null);
  if (idInAddress() !== id) return;
  const body = answer?.ok ? parsed(await answer.text()) : [el("p", {}, answer ? `There is no incident ${id} in this run.` : "The coordinator cannot be reached.")];
  place.replaceChildren(el("p", { class: "row" },
    el("a", { href: "#", id: "back" }, "← All of the run"),
    answer?.ok ? el("a", { href: `api/v1/incidents/${encodeURIComponent(id)}` }, "As JSON") : ""), ...body);
  if (isOpened) {
    place.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
}

// Everything in it is escaped where it is made; and no script could run: the page forbids all but its own files.
function parsed(html) {
  return [...new DOMParser().parseFromString(html, "text/html").body.childNodes];
}
