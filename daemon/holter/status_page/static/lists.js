// Everything that is a list: facts, incidents, ranks to look at, timeline, checkpoints, what cannot be seen.

import { $, el, fill, worded } from "./dom.js";
import { PHASES, conditionOf, nameOf, worst } from "./ranks.js";
import { line, numRanks, state } from "./stream.js";
import { count, duration, ranks, time } from "./words.js";

const SHOWN = 12;
const SEVERITIES = ["critical", "warning", "info"];
let isAll = false;

export const addressOf = (id) => `#incident=${encodeURIComponent(id)}`;
export const isOpen = (incident) => !incident.closed_at;
export const bySeverity = (one, other) => SEVERITIES.indexOf(one.severity) - SEVERITIES.indexOf(other.severity) || (one.opened_at < other.opened_at ? 1 : -1);
const badge = (name, text = name) => el("span", { class: `badge ${name}` }, text);
const when = (at) => el("time", { datetime: at, title: at }, time(at));

export function facts() {
  const { about } = state, live = about.is_live !== false;
  $("run-id").textContent = about.run_id ?? "";
  const pace = state.series.seconds?.at(-1)?.[1];
  const said = [`${count(about.num_ranks ?? 0)} of ${ranks(about.world_size ?? 0)}`];
  if (about.step !== null && about.step !== undefined) said.push(`${count(about.step)} ${about.step === 1 ? "step" : "steps"}`);
  if (pace) said.push(`${duration(pace)} a step`);
  if (about.started_at) said.push(`since ${time(about.started_at)}`);
  if (!live && about.ended_at) said.push(`ended ${time(about.ended_at)}`);
  $("facts").textContent = said.join(" · ");
  $("command").hidden = !about.command;
  $("command").textContent = about.command ?? "";
  $("about").textContent = `Run directory ${about.run_dir ?? ""}${about.action ? ` · at most: ${about.action}` : ""} · times are ${Intl.DateTimeFormat().resolvedOptions().timeZone}`;
  $("halt-open").hidden = !live || line.how === "ended" || line.how === "opening";
}

// How much of the time made progress, and the parts of it as a bar.
export function goodput() {
  const { words = "", parts = {}, num_lives: lives = 1 } = state.goodput ?? {};
  $("goodput").hidden = !words;
  const bar = el("span", { class: "time-spent", "aria-hidden": "true" }, Object.entries(parts).map(([name, share]) => {
    const part = el("span", { class: `t-${name}`, title: `${name} ${Math.round(share / 10)} %` });
    part.style.flexGrow = share;
    return part;
  }));
  $("goodput").replaceChildren(`${words}${lives > 1 ? `, over ${count(lives)} lives` : ""}`, bar);
}

export function incidents() {
  // One alone that is open is the verdict, and stands above.
  $("incidents").hidden = !state.incidents.length || (state.incidents.length === 1 && isOpen(state.incidents[0]));
  const sorted = [...state.incidents].sort((one, other) => isOpen(other) - isOpen(one) || bySeverity(one, other));
  fill($("incident-list"), sorted.map((one) => el("div", { class: `card ${isOpen(one) ? one.severity : "closed"}` },
    el("h3", {}, badge(isOpen(one) ? one.severity : "closed"), " ", el("a", { href: addressOf(one.id), "data-key": one.id }, one.line.replace(`${one.severity}: `, ""))),
    el("p", {}, worded(one.symptom)),
    el("p", { class: "muted" }, "opened ", when(one.opened_at), one.closed_at ? ", closed " : "", one.closed_at ? when(one.closed_at) : "", one.directive === "halt" ? " · a halt was decided" : ""))));
}

export function first(open) {
  const { ranks: found, more } = worst();
  fill($("worst"), found.length
    ? el("ol", { class: "plain-list" }, found.map((rank) => el("li", {},
      el("button", { type: "button", class: "link", "data-key": `worst-${rank}`, "data-rank": rank }, nameOf(rank)), `: ${conditionOf(rank)}`)))
    : el("p", { class: "muted" }, numRanks() ? "No rank stands out." : state.about.run_id ? "No rank has come yet." : "Nothing is known yet."),
  more ? el("p", { class: "muted" }, `and ${count(more)} more`) : "");
  $("worst").onclick = (event) => { const { rank } = event.target.dataset; if (rank !== undefined) open(Number(rank)); };
}

export function phases() {
  const numbers = PHASES.map(() => 0);
  (state.columns.phase ?? []).forEach((phase, rank) => { if (phase >= 0 && state.columns.state[rank] === 1) numbers[phase] += 1; });
  const present = PHASES.map((name, place) => [name, place, numbers[place]]).filter(([, , number]) => number);
  $("phases").hidden = !present.length;
  $("phases").setAttribute("aria-label", `Ranks by phase: ${present.map(([name, , number]) => `${name} ${count(number)}`).join(", ")}`);
  $("phases").replaceChildren(...present.map(([name, place, number]) => {
    const part = el("span", { title: `${name}: ${count(number)}` }, `${name} ${count(number)}`);
    part.style.flexGrow = number;
    part.style.background = `var(--g-p${place})`;
    return part;
  }));
}

export function timeline() {
  const newest = [...state.timeline].sort((one, other) => (one.at < other.at ? 1 : one.at > other.at ? -1 : other.number - one.number));
  const shown = isAll ? newest : newest.slice(0, SHOWN);
  fill($("timeline"), shown.length ? el("ol", { class: "plain-list" }, shown.map((one) => el("li", {},
    when(one.at), el("span", {}, badge(one.severity, one.kind)), one.incident ? el("a", { href: addressOf(one.incident), "data-key": `timeline-${one.number}` }, one.text) : el("span", {}, one.text))))
    : el("p", { class: "muted" }, "Nothing has happened that is worth a line."),
  newest.length > SHOWN ? el("p", {}, el("button", { type: "button", class: "link", "data-key": "all" }, isAll ? "Only the newest" : `All ${count(newest.length)}`)) : "");
  $("timeline").onclick = (event) => { if (event.target.dataset.key === "all") { isAll = !isAll; timeline(); } };
}

export function checkpoints() {
  const rows = state.checkpoints.map((one) => el("tr", {},
    el("th", { scope: "row" }, count(one.step)),
    el("td", {}, badge(one.verdict), one.is_gone ? " (deleted since)" : "", el("br"), el("small", {}, when(one.at))),
    el("td", {}, one.why, one.incident ? el("span", {}, " ", el("a", { href: addressOf(one.incident) }, "incident")) : "", el("br"), el("span", { class: "path" }, one.path), el("small", {}, ` by ${one.by}`))));
  fill($("checkpoints"), rows.length ? el("table", {}, el("thead", {}, el("tr", {}, ["Step", "Verdict", "Why, and where"].map((title) => el("th", { scope: "col" }, title)))), el("tbody", {}, rows))
    : el("p", { class: "muted" }, "None was seen yet."));
}

export function notes() {
  const { blind = [], warnings = [], findings = [], blind_left_out: more = 0, findings_left_out: rest = 0 } = state.about;
  const list = (title, lines, others = 0) => (lines.length ? [el("h3", {}, title), el("ul", {}, lines.map((text) => el("li", {}, text)), others ? el("li", {}, `and ${count(others)} more`) : "")] : []);
  fill($("notes"),
    ...list("What holter cannot see", blind, more), ...list("About holter itself", warnings),
    ...list(state.about.is_live === false || line.how === "ended" ? "What detectors said last" : "What detectors say now", findings.map((one) => worded(`${one.severity}: ${one.detector}${one.waits ? " (waits for evidence)" : ""}: ${one.summary}`)), rest));
}
