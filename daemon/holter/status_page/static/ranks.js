// What is known of a rank, in words and in classes that can be coloured. A class has a name, a colour and, if it is bad, a shape.

import { nowMs, numRanks, state } from "./stream.js";
import { count, duration } from "./words.js";

export const STATES = ["absent", "running", "ended", "died", "gone", "silent"];
export const PHASES = ["attach", "data", "forward", "backward", "optimizer", "checkpoint", "evaluation", "other"];

const cls = (name, color, letter = "", shape = "") => ({ name, color, letter, shape });
const UNKNOWN = cls("not known", "none", "?");

const CRITICAL = cls("named by a critical incident", "critical", "!", "ring");
const WARNING = cls("named by a warning", "warning", "w", "ring");
const STATE_CLASSES = [
  CRITICAL, cls("died", "died", "×", "cross"), WARNING, cls("sidecar gone", "gone", "g", "slash"), cls("sidecar silent", "silent", "s", "slash"),
  cls("not there yet", "absent", "–", "hollow"), cls("ended", "ended", "e"), cls("standing still", "still", "z"), cls("running", "running"),
];
const BY_STATE = { absent: 5, running: 8, ended: 6, died: 1, gone: 3, silent: 4 };
const STANDING = 7;
export const STILL_S = 30; // So long nothing moves before that is worth a word; whether it is a fault, detectors say.

const levels = (names) => names.map((name, place) => cls(name, `q${place}`, place > 2 ? String(place) : ""));
const above = (value, bounds) => bounds.reduce((place, bound, number) => (value >= bound ? number + 1 : place), 0);

export const MEASURES = {
  state: { label: "state", classes: STATE_CLASSES, of: stateClass },
  phase: {
    label: "phase",
    classes: [...PHASES.map((name, place) => cls(name === "other" ? "script's own code" : name, `p${place}`, "adfboces"[place])), UNKNOWN],
    of: (rank) => (at("phase", rank) < 0 ? PHASES.length : at("phase", rank)),
  },
  behind: scaled("steps behind", ["foremost", "1 step behind", "2 to 4", "5 to 19", "20 or more"], [1, 2, 5, 20], "behind"),
  lag: scaled("lag at collectives", ["below 10 ms", "10 to 50 ms", "50 to 200 ms", "0.2 to 1 s", "1 s or more"], [10, 50, 200, 1000], "lag"),
  pace: {
    label: "step time",
    classes: [...levels(["as the median", "10 % longer", "25 % longer", "50 % longer", "twice or more"]), UNKNOWN],
    of: (rank) => (at("pace", rank) < 0 ? 5 : above(at("pace", rank) / Math.max(1, median("pace")), [1.1, 1.25, 1.5, 2])),
  },
  still: {
    label: "time since it moved",
    classes: levels(["a moment ago", "5 s or more", "30 s or more", "2 min or more", "10 min or more"]),
    of: (rank) => above(stillSeconds(rank), [5, 30, 120, 600]),
  },
};

function scaled(label, names, bounds, column) {
  return { label, classes: [...levels(names), UNKNOWN], of: (rank) => (at(column, rank) < 0 ? 5 : above(at(column, rank), bounds)) };
}

export const at = (column, rank) => state.columns[column]?.[rank] ?? -1;
export const hostOf = (rank) => state.hosts[at("host", rank)] ?? "";
export const stateOf = (rank) => STATES[at("state", rank)] ?? "absent";
export const stepOf = (rank) => (at("behind", rank) < 0 ? null : state.about.step - at("behind", rank));

export function stillSeconds(rank) {
  const since = at("since", rank);
  return since > 0 ? Math.max(0, nowMs() / 1000 - since) : 0;
}

function stateClass(rank) {
  const blame = at("blame", rank);
  if (blame === 2) return 0;
  const found = BY_STATE[stateOf(rank)];
  if (blame === 1 && found > 2) return 2;
  return stateOf(rank) === "running" && stillSeconds(rank) >= STILL_S ? STANDING : found;
}

// Whatever is coloured, this is seen: the shape over a rank that somebody must look at.
export const shapeOf = (rank) => STATE_CLASSES[stateClass(rank)].shape;

let medians = new Map();
export const forgetMedians = () => { medians = new Map(); };
function median(column) {
  if (!medians.has(column)) {
    const known = (state.columns[column] ?? []).filter((value) => value >= 0).sort((a, b) => a - b);
    medians.set(column, known.length ? known[known.length >> 1] : 0);
  }
  return medians.get(column);
}

export const nameOf = (rank) => `rank ${rank}${hostOf(rank) ? ` on ${hostOf(rank)}` : ""}`;
export const words = (rank) => `${nameOf(rank)}: ${conditionOf(rank)}`;

export function conditionOf(rank) {
  const step = stepOf(rank), lag = at("lag", rank), pace = at("pace", rank), still = stillSeconds(rank);
  const said = [STATE_CLASSES[stateClass(rank)].name];
  if (at("phase", rank) >= 0 && stateOf(rank) === "running") said.push(`in ${PHASES[at("phase", rank)]}`);
  if (step !== null) said.push(`step ${count(step)}${at("behind", rank) > 0 ? `, ${count(at("behind", rank))} behind` : ""}`);
  if (pace >= 0) said.push(`last step ${duration(pace / 1000)}`);
  if (lag > 0) said.push(`${duration(lag / 1000)} late at collectives`);
  if (still && stateOf(rank) !== "ended") said.push(`has not moved for ${duration(still)}`);
  return said.join(", ");
}

// The ranks to look at first, each with the reason. Judged by nobody here: what incidents name, then what is far from the others.
export function worst(limit = 8) {
  const found = [], usualPace = median("pace");
  for (let rank = 0; rank < numRanks(); rank++) {
    const score = scoreOf(rank, usualPace);
    if (score) found.push([score, rank]);
  }
  found.sort((a, b) => b[0] - a[0] || a[1] - b[1]);
  return { ranks: found.slice(0, limit).map(([, rank]) => rank), more: Math.max(0, found.length - limit) };
}

function scoreOf(rank, usualPace) {
  const place = stateClass(rank), how = stateOf(rank);
  if (place < 5) return 1e6 * (5 - place);
  // One that is not there is missed only when the others have begun.
  if (how === "absent") return state.about.step > 0 ? 1e5 : 0;
  if (how !== "running") return 0;
  const lag = at("lag", rank), pace = at("pace", rank), still = stillSeconds(rank), behind = at("behind", rank);
  return (behind > 1 ? 1e4 * Math.min(behind, 50) : 0) + (still >= STILL_S ? still : 0) + (lag >= 10 ? lag : 0)
    + (usualPace > 0 && pace > 1.25 * usualPace ? 100 * (pace / usualPace) : 0);
}
