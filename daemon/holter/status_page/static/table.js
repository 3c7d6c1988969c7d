// The same ranks as a table, a page of it at a time: for who reads it with a screen reader, and for who wants the figures.

import { $, el, fill } from "./dom.js";
import { PHASES, at, hostOf, stateOf, stepOf, stillSeconds, words } from "./ranks.js";
import { numRanks } from "./stream.js";
import { count, duration } from "./words.js";

const ROWS = 50;
const BLAME = ["", "warning", "critical"];
const milliseconds = (value) => (value < 0 ? "" : duration(value / 1000));
const COLUMNS = {
  rank: { title: "Rank", of: (rank) => rank, text: (rank) => rank },
  host: { title: "Host", of: hostOf, text: hostOf },
  state: { title: "State", of: stateOf, text: stateOf },
  blame: { title: "Incident", of: (rank) => at("blame", rank), text: (rank) => BLAME[at("blame", rank)] ?? "" },
  phase: { title: "Phase", of: (rank) => at("phase", rank), text: (rank) => PHASES[at("phase", rank)] ?? "" },
  step: { title: "Step", of: (rank) => stepOf(rank) ?? -1, text: (rank) => (stepOf(rank) === null ? "" : count(stepOf(rank))) },
  lag: { title: "Late by", of: (rank) => at("lag", rank), text: (rank) => milliseconds(at("lag", rank)) },
  pace: { title: "Step time", of: (rank) => at("pace", rank), text: (rank) => milliseconds(at("pace", rank)) },
  still: { title: "Not moved for", of: stillSeconds, text: (rank) => (stillSeconds(rank) ? duration(stillSeconds(rank)) : "") },
};

let order = "rank", isDown = false, page = 0, wanted = "", open = () => {};

export function begin(onOpen) {
  open = onOpen;
  const search = el("input", { id: "table-filter", type: "search", oninput: (event) => { wanted = event.target.value.trim().toLowerCase(); page = 0; draw(); } });
  const turn = (by) => () => { page += by; draw(); };
  fill($("table-view"));
  $("table-view").append(
    el("div", { class: "pager" },
      el("label", { for: "table-filter" }, "Only "), search,
      el("button", { type: "button", id: "table-back", onclick: turn(-1) }, "Back"),
      el("span", { id: "table-place", role: "status" }),
      el("button", { type: "button", id: "table-on", onclick: turn(1) }, "On")),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of ranks" }, el("table", { id: "table" })));
  search.setAttribute("placeholder", "rank, host or state");
}

export function draw() {
  const found = sorted(matching());
  page = Math.max(0, Math.min(page, Math.ceil(found.length / ROWS) - 1));
  const shown = found.slice(page * ROWS, (page + 1) * ROWS);
  fill($("table"),
    el("thead", {}, el("tr", {}, Object.entries(COLUMNS).map(([name, { title }]) => el("th", { scope: "col", "aria-sort": direction(name) },
      el("button", { type: "button", "data-key": `sort-${name}`, "data-sort": name }, title))))),
    el("tbody", {}, shown.map((rank) => el("tr", {}, Object.entries(COLUMNS).map(([name, { text }]) => (name === "rank"
      ? el("th", { scope: "row" }, el("button", { type: "button", class: "link", "data-key": `rank-${rank}`, "data-rank": rank, "aria-label": words(rank) }, String(rank)))
      : el("td", {}, String(text(rank)))))))));
  $("table").onclick = pressed;
  $("table-place").textContent = found.length ? `${count(page * ROWS + 1)} to ${count(page * ROWS + shown.length)} of ${count(found.length)}` : "none";
  $("table-back").disabled = page === 0;
  $("table-on").disabled = (page + 1) * ROWS >= found.length;
}

function pressed(event) {
  const { sort, rank } = event.target.dataset;
  if (rank !== undefined) open(Number(rank));
  if (sort === undefined) return;
  isDown = sort === order ? !isDown : false;
  order = sort;
  draw();
}

function matching() {
  const found = [];
  for (let rank = 0; rank < numRanks(); rank++) {
    if (!wanted || String(rank) === wanted || hostOf(rank).toLowerCase().includes(wanted) || stateOf(rank).includes(wanted) || (BLAME[at("blame", rank)] ?? "").includes(wanted)) found.push(rank);
  }
  return found;
}

function sorted(ranks) {
  const { of } = COLUMNS[order], sign = isDown ? -1 : 1;
  if (order === "rank") return isDown ? ranks.reverse() : ranks;
  return ranks.map((rank) => [of(rank), rank]).sort(([a, one], [b, other]) => (a < b ? -sign : a > b ? sign : one - other)).map(([, rank]) => rank);
}

const direction = (name) => (name !== order ? "none" : isDown ? "descending" : "ascending");
