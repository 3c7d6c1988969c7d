// The page: listens, and draws what changed, once a frame.

import * as charts from "./charts.js";
import { $ } from "./dom.js";
import * as grid from "./grid.js";
import * as halt from "./halt.js";
import * as incident from "./incident.js";
import * as lists from "./lists.js";
import * as rank from "./rank.js";
import { forgetMedians } from "./ranks.js";
import { line, listen, state } from "./stream.js";
import * as table from "./table.js";
import { halting, verdict } from "./verdict.js";

const LINES = { opening: "connecting…", live: "live", lost: "not connected", ended: "the coordinator has ended" };
const TICK_MS = 2000; // A job that hangs says nothing new, and yet stands longer and longer.
const PARTS = {
  line: [connection, lists.facts, lists.notes, verdict, ranks],
  beat: [ranks, verdict],
  about: [connection, lists.facts, verdict, halting, lists.notes],
  goodput: [lists.goodput],
  columns: [ranks, verdict],
  hosts: [ranks],
  incidents: [lists.incidents, verdict, charts.draw, ranks, () => incident.draw()],
  series: [charts.draw, lists.facts],
  timeline: [lists.timeline],
  checkpoints: [lists.checkpoints, verdict],
};

let isTable = false, known = null, due = new Set();

function ranks() {
  if ($("overview").hidden) return;
  forgetMedians();
  lists.phases();
  if (isTable) table.draw(); else grid.draw();
  lists.first(rank.open);
}

function changed(names) {
  if (!due.size) requestAnimationFrame(redraw);
  for (const name of names) due.add(name);
}

function redraw() {
  const names = due;
  due = new Set();
  for (const part of new Set([...names].flatMap((name) => PARTS[name] ?? []))) part();
  announce();
  document.documentElement.dataset.drawn = String(Number(document.documentElement.dataset.drawn ?? 0) + 1);
}

// What is new is said aloud, and stands in the tab's title.
function announce() {
  const open = state.incidents.filter(lists.isOpen), fresh = known === null ? [] : open.filter((one) => !known.has(one.id));
  if (fresh.length) $("announced").textContent = `New incident: ${fresh.map((one) => one.line).join("; ")}`;
  if (state.about.run_id) known = new Set(state.incidents.map((one) => one.id));
  document.title = `${line.how === "lost" ? "not live: " : ""}${open.length ? `(${open.length}) ` : ""}holter ${state.about.run_id ?? ""}`;
}

function connection() {
  const isRecord = line.how === "live" && state.about.is_live === false;
  const text = isRecord ? "record of a run that has ended" : line.why ? `${LINES[line.how]}: ${line.why}` : LINES[line.how];
  document.documentElement.dataset.line = line.how;
  $("line").className = isRecord ? "" : line.how;
  if ($("line").textContent !== text) $("line").textContent = text;
}

function view(asTable) {
  isTable = asTable;
  $("as-grid").setAttribute("aria-pressed", String(!asTable));
  $("as-table").setAttribute("aria-pressed", String(asTable));
  $("grid-view").hidden = asTable;
  $("table-view").hidden = !asTable;
  ranks();
}

function routed() {
  incident.draw({ isOpened: true }).then(() => { if (!incident.idInAddress()) { ranks(); charts.draw(); } });
}

$("app").hidden = false;
grid.begin(rank.open);
table.begin(rank.open);
charts.begin();
halt.begin();
$("as-grid").addEventListener("click", () => view(false));
$("as-table").addEventListener("click", () => view(true));
addEventListener("hashchange", routed);
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });
connection();
listen(changed);
setInterval(() => { if (line.how === "live" && state.about.is_live) changed(["beat"]); }, TICK_MS);
if (incident.idInAddress()) routed();
