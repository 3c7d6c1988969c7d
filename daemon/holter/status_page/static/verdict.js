// What stands at the top: how the run is, how surely that is known, and how far a halt has come.

import { $, el, fill, worded } from "./dom.js";
import { addressOf, bySeverity, isOpen } from "./lists.js";
import { PHASES, STILL_S, at, stateOf, stillSeconds } from "./ranks.js";
import { line, numRanks, state } from "./stream.js";
import { count, duration, ranks, time } from "./words.js";

const ICONS = { critical: "✖", warning: "▲", info: "•", fine: "✓" };

export function verdict() {
  const [first, ...others] = state.incidents.filter(isOpen).sort(bySeverity);
  if (!first) { const { how, what, said } = calm(); show(how, what, said.map((text) => el("p", {}, text))); return; }
  const more = others.length ? ` and ${count(others.length)} more` : "";
  show(first.severity, `${first.line}${more}`, [
    line.how === "lost" ? el("p", { class: "unsure" }, `${ICONS.warning} ${notLive()}: this is the last that was heard.`) : "",
    line.how === "ended" ? el("p", { class: "unsure" }, `The coordinator has ended: ${line.why}. This is how it was then.`) : "",
    el("p", {}, worded(first.symptom)),
    el("p", {}, el("b", {}, "Do: "), worded(first.do)),
    lastHealthy(),
    el("p", {}, el("a", { href: addressOf(first.id), "data-key": "verdict" }, "The diagnosis in full")),
  ]);
}

function lastHealthy() {
  if (!state.checkpoints.length) return "";
  const found = state.checkpoints.find((one) => one.verdict === "healthy" && !one.is_gone);
  return el("p", {}, el("b", {}, "Last healthy checkpoint: "), ...(found ? [`step ${count(found.step)}, `, el("span", { class: "path" }, found.path)] : ["none is known."]));
}

function show(how, what, content) {
  fill($("verdict"), el("div", { class: `is-${how}` }, el("p", { class: "what" }, `${ICONS[how]} ${what}`), ...content));
}

// No incident is open. That is good news only where everything is seen.
function calm() {
  const past = state.incidents.length ? [`${count(state.incidents.length)} closed.`] : [];
  if (!state.about.run_id) return { how: line.how === "lost" ? "warning" : "info", what: line.how === "lost" ? `Not live: ${line.why}` : "Connecting", said: ["Nothing is known of the run yet."] };
  if (state.about.is_live === false) return { how: "fine", what: "No open incident", said: ["None was open when the run ended.", ...past] };
  if (line.how === "lost") return { how: "warning", what: notLive(), said: ["No incident was open then. How the run is now is not known here; below is the last that was heard.", ...past] };
  if (line.how === "ended") return atTheEnd(past);
  const blind = blindness();
  if (blind.length) return { how: "warning", what: "No open incident, but not everything is seen", said: [...blind, ...past] };
  const still = standstill();
  if (still) return { how: "info", what: `No open incident, but no rank has moved for ${duration(still)}`, said: [`No detector calls that a fault yet${phaseOfAll()}.`, ...past] };
  const { findings = [], findings_left_out: left = 0 } = state.about, num = findings.length + left;
  const found = num ? `${count(num)} ${num === 1 ? "finding stands, and is no incident" : "findings stand, none of them an incident"}.` : "All detectors judge, and find nothing.";
  return { how: "fine", what: "No open incident", said: [found, ...past] };
}

const notLive = () => `Not live since ${line.sinceMs ? time(line.sinceMs) : "the beginning"}: ${line.why}`;

function atTheEnd(past) {
  const num = counted((rank) => !["ended", "died"].includes(stateOf(rank)));
  const unseen = num ? [`${ranks(num)} ${num === 1 ? "was" : "were"} not seen to end: nobody watches ${num === 1 ? "it" : "them"} now.`] : [];
  return { how: num ? "warning" : "info", what: `The coordinator has ended: ${line.why}`, said: ["No incident was open then.", ...unseen, ...past] };
}

function blindness() {
  const { blind = [], blind_left_out: left = 0, step } = state.about, num = blind.length + left;
  const absent = step > 0 ? counted((rank) => stateOf(rank) === "absent") : 0;
  const said = num ? [num === 1 ? `Holter cannot see: ${blind[0]}` : `${count(num)} blind spots, listed below; the first: ${blind[0]}`] : [];
  return absent ? [...said, `${ranks(absent)} ${absent === 1 ? "has" : "have"} never come.`] : said;
}

// How long the rank that moved last has stood; 0 if that is nothing to speak of.
function standstill() {
  let least = Infinity;
  for (let rank = 0; rank < numRanks(); rank++) if (stateOf(rank) === "running") least = Math.min(least, stillSeconds(rank));
  return least >= STILL_S && least < Infinity ? least : 0;
}

function phaseOfAll() {
  const found = new Set();
  for (let rank = 0; rank < numRanks(); rank++) if (stateOf(rank) === "running") found.add(PHASES[at("phase", rank)]);
  const [phase] = found;
  return found.size === 1 && phase ? `; all are in ${phase}` : "";
}

function counted(is) {
  let num = 0;
  for (let rank = 0; rank < numRanks(); rank++) num += is(rank);
  return num;
}

const HALTED = {
  completed: ["info", "The run is halted"], called_off: ["warning", "The halt was called off; the run goes on"],
  incomplete: ["critical", "The halt is incomplete: not everything could be kept"], failed: ["critical", "The halt failed"],
};

export function halting() {
  const { halt } = state.about;
  $("halting").hidden = !halt;
  if (!halt) return;
  const [how, what] = outcomeOf(halt), after = halt.step === null || halt.step === undefined ? "" : `, step ${count(halt.step)}`;
  const kept = halt.checkpoint ? `Checkpoint ${halt.checkpoint}${halt.verdict ? ` (${halt.verdict})` : ""}.` : halt.course === "done" ? "No checkpoint was kept." : "";
  const why = [halt.title || halt.cause, halt.reason].filter(Boolean).join(": ");
  $("halting").className = `is-${how}`;
  $("halting").setAttribute("role", how === "critical" ? "alert" : "status");
  fill($("halting"), el("p", { class: "what" }, `${ICONS[how]} ${what}${after}`),
    [halt.text, why, kept].filter(Boolean).map((text) => el("p", {}, text)),
    halt.since ? el("p", { class: "muted" }, "since ", el("time", { datetime: halt.since, title: halt.since }, time(halt.since))) : "");
}

function outcomeOf(halt) {
  if (HALTED[halt.outcome]) return HALTED[halt.outcome];
  if (halt.course !== "done") return ["warning", halt.course === "asked for" ? "A halt is asked for" : `A halt is under way: ${halt.course}`];
  return halt.checkpoint && halt.verdict !== "poisoned" ? HALTED.completed : HALTED.incomplete;
}
