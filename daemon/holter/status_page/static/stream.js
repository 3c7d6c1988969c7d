// The run as the coordinator tells it: the whole first, then what changed. A line that is lost is found again.

const MAX_ROWS = 4096;
const SILENT_MS = 30000; // The coordinator says something every ten seconds.
const AGAIN_MS = 5000;

export const state = { about: {}, goodput: {}, hosts: [], columns: {}, series: {}, incidents: [], checkpoints: [], timeline: [] };

// "opening", "live", "lost" or "ended"; why; and up to when the run was seen, by the coordinator's clock.
export const line = { how: "opening", why: "", sinceMs: 0 };

// Marks that turn the direction of writing would let a name rewrite the line that it stands in.
const TURNS = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
export const read = (text) => JSON.parse(text.replace(TURNS, "\ufffd"));

let offsetMs = 0;
// What is not seen does not go on: without a line the time is that of the last word.
export const nowMs = () => (line.how === "live" && state.about.is_live !== false ? Date.now() + offsetMs : state.now);
export const numRanks = () => state.columns.state?.length ?? 0;

// Calls `changed` with the names of what changed: "line" for the line itself, "beat" where only time has passed.
export function listen(changed) {
  let source, watch, ended = "";
  const say = (how, why) => {
    if (line.how === how && line.why === why) return;
    Object.assign(line, { how, why, sinceMs: state.now ?? 0 });
    changed(["line"]);
  };
  const heard = (event) => {
    const told = read(event.data);
    if (told.now) { state.now = told.now; offsetMs = told.now - Date.now(); }
    clearTimeout(watch);
    watch = setTimeout(() => again("the coordinator has not spoken for 30 s"), SILENT_MS);
    return told;
  };
  // That it has ended is the better word, for as long as nobody answers.
  const lose = (why) => (ended ? say("ended", ended) : say("lost", why));
  const again = (why) => {
    clearTimeout(watch);
    source.close();
    lose(why);
    setTimeout(open, AGAIN_MS);
  };
  const open = () => {
    source = new EventSource("api/v1/events");
    source.addEventListener("snapshot", (event) => {
      const { ended: reason = "", ...told } = heard(event), names = replace(told);
      ended = reason;
      if (ended) say("ended", ended); else say("live", "");
      changed(names);
    });
    source.addEventListener("delta", (event) => changed(merge(heard(event))));
    source.addEventListener("beat", (event) => { heard(event); changed(["beat"]); });
    source.addEventListener("end", (event) => { ended = heard(event).reason; again(ended); });
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED) again("the coordinator cannot be reached");
      else lose("the coordinator cannot be reached");
    };
  };
  open();
}

function replace(told) {
  Object.assign(state, told);
  return new Set(["snapshot", ...Object.keys(told)]);
}

function merge({ now, columns, more, happened, ...whole }) {
  const names = new Set(Object.keys(whole));
  Object.assign(state, whole);
  for (const [name, change] of Object.entries(columns ?? {})) {
    if (Array.isArray(change)) state.columns[name] = change;
    else change.at.forEach((rank, place) => { state.columns[name][rank] = change.to[place]; });
    names.add("columns");
  }
  for (const [name, rows] of Object.entries(more ?? {})) {
    state.series[name] = [...(state.series[name] ?? []), ...rows].slice(-MAX_ROWS);
    names.add("series");
  }
  if (happened) {
    state.timeline = [...state.timeline, ...happened].slice(-512);
    names.add("timeline");
  }
  return names;
}
