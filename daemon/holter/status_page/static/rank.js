// One rank, looked at closely; asked for again while it is open.

import { $, el, fill } from "./dom.js";
import { read } from "./stream.js";
import { count, duration, figure, time } from "./words.js";

const EVERY_MS = 2000;
let chosen = null, timer, opener = null;

export function open(rank) {
  if (!$("rank").contains(document.activeElement)) opener = document.activeElement;
  chosen = rank;
  show().then(() => $("rank").focus());
}

function close() {
  chosen = null;
  clearTimeout(timer);
  $("rank").hidden = true;
  opener?.focus?.();
}

async function show() {
  const rank = chosen;
  clearTimeout(timer);
  if (rank === null) return;
  const answer = await fetch(`api/v1/ranks/${rank}`).catch(() => null);
  if (rank !== chosen) return;
  const told = answer?.ok ? read(await answer.text()) : null;
  $("rank").hidden = false;
  fill($("rank"), el("div", { class: "title-row" }, el("h3", { id: "rank-title" }, `Rank ${rank}`), el("button", { type: "button", "data-key": "close" }, "Close")),
    told ? el("dl", {}, pairs(told).flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])) : el("p", {}, answer ? "It has not come yet." : "The coordinator cannot be reached."));
  $("rank").onclick = (event) => { if (event.target.dataset.key === "close") close(); };
  $("rank").onkeydown = (event) => { if (event.key === "Escape") close(); };
  timer = setTimeout(show, EVERY_MS);
}

function pairs(told) {
  const bad = Object.entries(told.nonfinite).map(([where, number]) => `${where} ${count(number)}`).join(", ");
  const lost = Object.entries(told.sight_lost).map(([what, number]) => `${what} (${count(number)})`).join(", ");
  const number = (name) => (told[name] === null && !told.not_finite.includes(name) ? null : figure(told[name]));
  const exit = told.exit && (told.exit.signal ? `by signal ${told.exit.signal}` : `with code ${told.exit.code}`);
  return [
    ["Host", told.host], ["Process", told.pid], ["Sidecar", `${told.sidecar}, process ${told.sidecar_pid}`],
    ["Ended", exit && `${exit}, at step ${told.exit.step}`],
    ["Step", told.step === null ? null : count(told.step)], ["Phase", told.phase],
    ["Last moved", told.last_progress_at && `${time(told.last_progress_at)}, ${duration(told.last_progress_age_s)} ago`],
    ["Loss", number("loss")], ["Gradient norm", number("gradient_norm")],
    ["Step time", told.step_s === null ? null : duration(told.step_s)], ["Late at collectives", told.collective_lag_s === null ? null : duration(told.collective_lag_s)],
    ["NaN or Inf met", bad], ["Cannot be seen", lost], ["Device", told.gpu_uuid],
    ["Overhead", told.overhead_ratio === null ? null : `${(100 * told.overhead_ratio).toFixed(2)} %`], ["Dropped", told.dropped ? count(told.dropped) : null],
  ].filter(([, text]) => text !== null && text !== undefined && text !== "").map(([name, text]) => [name, String(text)]);
}
