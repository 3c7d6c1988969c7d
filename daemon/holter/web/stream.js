// The run as the coordinator tells it: the whole first, then what changed. A line that is lost is found again.

const MAX_ROWS = 4096;
const SILENT_MS = 30000; // The coordinator says something every ten seconds.
const AGAIN_MS = 5000;

export const state = { about: {}, hosts: [], columns: {}, series: {}, incidents: [], checkpoints: [], timeline: [] };

let offsetMs = 0;
export const nowMs = () => (state.about.is_live === false ? state.now : Date.now() + offsetMs);
export const numRanks = () => state.columns.state?.length ?? 0;

// Calls `changed` with the names of what changed, and `said` with how the line is: "live", "lost" or "ended", and why.
export function listen(changed, said) {
  let source, watch, ended = "";
  const heard = (event) => {
    const told = JSON.parse(event.data);
    if (told.now) { state.now = told.now; offsetMs = told.now - Date.now(); }
    clearTimeout(watch);
    watch = setTimeout(() => again("the coordinator has not spoken for 30 s"), SILENT_MS);
    return told;
  };
  // That it has ended is the better word, for as long as nobody answers.
  const lose = (why) => (ended ? said("ended", ended) : said("lost", why));
  const again = (why) => {
    clearTimeout(watch);
    source.close();
    lose(why);
    setTimeout(open, AGAIN_MS);
  };
  const open = () => {
    source = new EventSource("api/v1/events");
    source.addEventListener("snapshot", (event) => {
      const names = replace(heard(event));
      ended = "";
      said("live", "");
      changed(names);
    });
    source.addEventListener("delta", (event) => changed(merge(heard(event))));
    source.addEventListener("beat", heard);
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
