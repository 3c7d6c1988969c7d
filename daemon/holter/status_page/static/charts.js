// Series over the steps: the mean of the ranks as a line, their spread as a band, a cross where a number was not finite,
// a dashed line where an incident began. The classes are those of the report's plots. All charts have one cursor, a step, and show
// the same steps: a stretch that is drawn over with the pointer, or + and - at the cursor; a double click or Escape shows all again.

import { $, el, svg } from "./dom.js";
import { bySeverity } from "./lists.js";
import { state } from "./stream.js";
import { count, duration, figure } from "./words.js";

const HEIGHT = 170, LEFT = 58, RIGHT = 12, TOP = 20, BOTTOM = 28, COLUMNS = 240, LOG_FROM = 100, LETTER = 7;
const CHARTS = [
  { name: "loss", title: "Loss", text: figure },
  { name: "gradient_norm", title: "Gradient norm", text: figure },
  { name: "seconds", title: "Step time", text: (value) => (value === null ? "not known" : duration(value)) },
  { name: "lag", title: "Lag at collectives", text: (value) => (value === null ? "not known" : duration(value)), mean: "usual", high: "latest",
    summary: (row) => (row[5] < 0 ? duration(row[1]) : `rank ${row[5]} by ${duration(row[3])}`) },
];
const made = new Map(), FEWEST = 4, BY_KEY = { "+": 0.5, "=": 0.5, "-": 2 };
let cursorStep = null, shown = null, drawnFrom = null; // A step; [first, last] or everything; where a stretch begins that is being drawn.
let width = 420; // Of a plot, in pixels: letters keep their size.

export function begin() {
  new ResizeObserver(() => draw()).observe($("charts"));
  $("all-steps").addEventListener("click", unzoom);
}

export function draw() {
  if ($("overview").hidden) return;
  for (const chart of CHARTS) {
    const rows = joined(inView(state.series[chart.name] ?? []));
    if (!made.has(chart.name)) made.set(chart.name, build(chart));
    const parts = made.get(chart.name);
    parts.figure.hidden = rows.length < 2;
    if (rows.length >= 2) redraw(chart, parts, rows, joined(inView(state.other?.series?.[chart.name] ?? [])));
  }
  const isEmpty = [...made.values()].every((parts) => parts.figure.hidden);
  $("numbers").hidden = isEmpty && !shown;
  $("all-steps").hidden = !shown;
}

function inView(rows) {
  return shown ? rows.filter((row) => row[0] >= shown[0] && row[0] <= shown[1]) : rows;
}

function zoom(first, last) {
  const steps = Object.values(state.series).flatMap((rows) => (rows.length ? [rows[0][0], rows.at(-1)[0]] : []));
  const whole = [Math.min(...steps), Math.max(...steps)], from = Math.max(whole[0], Math.floor(first)), to = Math.min(whole[1], Math.ceil(last));
  if (to - from < FEWEST) return;
  shown = from <= whole[0] && to >= whole[1] ? null : [from, to];
  draw();
}

function unzoom() {
  shown = null;
  draw();
}

// The same step in every chart; each says what it had there.
function pointAll(step) {
  cursorStep = step;
  for (const chart of CHARTS) { const parts = made.get(chart.name); if (parts && !parts.figure.hidden) point(chart, parts, closest(parts, step)); }
}

function closest(parts, step) {
  if (step === null) return -1;
  return parts.rows.reduce((best, row, place) => (best < 0 || Math.abs(row[0] - step) < Math.abs(parts.rows[best][0] - step) ? place : best), -1);
}

function build(chart) {
  const latest = el("span", { class: "muted" }), other = el("span", { class: "muted of-other" }), said = el("output");
  const title = svg("title"), drawing = svg("g"), chosen = svg("rect", { class: "band", y: TOP, height: HEIGHT - BOTTOM - TOP, visibility: "hidden" }), cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const plot = svg("svg", { role: "img", tabindex: "0" }, title, drawing, chosen, cursor);
  const parts = { figure: el("figure", {}, el("figcaption", {}, `${chart.title} `, latest, " ", other), plot, said), plot, latest, other, said, title, drawing, chosen, cursor, rows: [], others: [], at: -1 };
  const stepAt = (event) => parts.across.from(event.clientX - plot.getBoundingClientRect().left);
  plot.addEventListener("pointerdown", (event) => { if (event.button === 0) { drawnFrom = stepAt(event); plot.setPointerCapture?.(event.pointerId); } });
  plot.addEventListener("pointermove", (event) => {
    const step = stepAt(event);
    pointAll(parts.rows[closest(parts, step)]?.[0] ?? null);
    select(parts, drawnFrom, step);
  });
  plot.addEventListener("pointerup", (event) => {
    const ends = [drawnFrom, stepAt(event)].sort((one, other) => one - other);
    const isStretch = drawnFrom !== null && Math.abs(parts.across.at(ends[1]) - parts.across.at(ends[0])) > 8;
    drawnFrom = null;
    select(parts, null, null);
    if (isStretch) zoom(...ends);
  });
  plot.addEventListener("pointercancel", () => { drawnFrom = null; select(parts, null, null); });
  plot.addEventListener("pointerleave", () => { if (drawnFrom === null) pointAll(null); });
  plot.addEventListener("dblclick", unzoom);
  plot.addEventListener("keydown", (event) => {
    const middle = cursorStep ?? parts.rows.at(-1)[0], half = (parts.rows.at(-1)[0] - parts.rows[0][0]) / 2;
    if (event.key === "Escape" && shown) unzoom();
    if (BY_KEY[event.key]) zoom(middle - half * BY_KEY[event.key], middle + half * BY_KEY[event.key]);
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -1e9, End: 1e9 }[event.key];
    if (!by) return;
    event.preventDefault();
    const from = parts.at < 0 ? parts.rows.length - 1 : parts.at;
    pointAll(parts.rows[Math.max(0, Math.min(parts.rows.length - 1, from + by))][0]);
  });
  $("charts").append(parts.figure);
  return parts;
}

function redraw(chart, parts, rows, others) {
  width = parts.plot.clientWidth || width;
  parts.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  // A hang begins at the step after the last.
  const begun = serious().filter((one) => one.first_step <= rows.at(-1)[0] + 2).map((one) => one.first_step);
  const steps = [...rows, ...others].map((row) => row[0]);
  const across = scale(Math.min(...steps), Math.max(...steps, ...begun), LEFT, width - RIGHT);
  const upwards = upward([...rows, ...others.map(([step, mean]) => [step, mean, mean, mean])]);
  const last = rows.at(-1);
  parts.latest.textContent = `${chart.summary ? chart.summary(last) : chart.text(last[1])} at step ${count(last[0])}`;
  parts.other.textContent = others.length ? `┄ ${state.other.name}: ${chart.text(others.at(-1)[1])} at step ${count(others.at(-1)[0])}` : "";
  parts.title.textContent = `${chart.title}: ${told(chart, last)}. Arrow keys read other steps, plus and minus show fewer or more of them.`;
  parts.rows = rows;
  parts.others = others;
  parts.across = across;
  parts.drawing.replaceChildren(...axes(chart, across, upwards), ...marks(across), ...lines(rows, across, upwards), ...runs(others).map((run) => line(run, across, upwards, "c1 other")));
  point(chart, parts, closest(parts, cursorStep));
}

function upward(rows) {
  const values = rows.flatMap((row) => [row[1], row[2], row[3]]).filter((value) => value !== null);
  let low = Math.min(...values), high = Math.max(...values);
  if (!values.length) [low, high] = [0, 1];
  const positive = values.filter((value) => value > 0);
  const smallest = positive.length ? Math.min(...positive) : 1, isLog = low >= 0 && high > LOG_FROM * smallest && positive.length === values.length;
  if (!isLog) { const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1; [low, high] = [low >= 0 ? Math.max(0, low - room) : low - room, high + room]; }
  return scale(low, high, HEIGHT - BOTTOM, TOP, isLog);
}

function scale(low, high, begin, end, isLog = false) {
  const place = (value) => (isLog ? Math.log10(Math.max(value, low)) : value), from = place(low), to = place(high);
  const at = (value) => begin + (to > from ? (place(value) - from) / (to - from) : 0.5) * (end - begin);
  return { low, high, isLog, at: (value) => Math.round(at(value) * 10) / 10, from: (place) => low + ((place - begin) / (end - begin)) * (high - low) };
}

function axes(chart, across, upwards) {
  const parts = [];
  for (const value of ticks(upwards, 4)) {
    const y = upwards.at(value);
    parts.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }), svg("text", { x: LEFT - 7, y: y + 4, "text-anchor": "end" }, chart.text(value)));
  }
  for (const value of ticks(across, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger)) {
    parts.push(svg("text", { x: across.at(value), y: HEIGHT - BOTTOM + 17, "text-anchor": "middle" }, count(value)));
  }
  parts.push(svg("text", { x: LEFT - 7, y: HEIGHT - BOTTOM + 17, "text-anchor": "end" }, "step"));
  return parts;
}

function ticks({ low, high, isLog }, num) {
  if (isLog) {
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9), every = Math.max(1, Math.ceil((last - first + 1) / num));
    const found = [];
    for (let power = first; power <= last; power += every) found.push(10 ** power);
    if (found.length > 1) return found;
  }
  if (!(high > low)) return [low];
  const rough = (high - low) / num, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const found = [];
  for (let number = Math.ceil(low / step - 1e-9); number <= Math.floor(high / step + 1e-9); number++) found.push(Number((number * step).toPrecision(12)));
  return found;
}

const serious = () => state.incidents.filter((one) => !one.closed_at && one.severity !== "info" && (!shown || (one.first_step >= shown[0] && one.first_step <= shown[1])));

// A line for each; a word where there is room for it, for the gravest first.
function marks(across) {
  const isShown = (one) => one.first_step >= across.low && one.first_step <= across.high;
  const steps = new Set(serious().filter(isShown).sort(bySeverity).map((one) => one.first_step)), taken = [];
  return [...steps].flatMap((step) => {
    const x = across.at(step), text = `incident, step ${count(step)}`, isRight = x > width / 2, far = 5 + text.length * LETTER;
    const [from, to] = isRight ? [x - far, x] : [x, x + far];
    const isFree = taken.every(([begin, end]) => to <= begin || from >= end);
    if (isFree) taken.push([from, to]);
    return [svg("line", { class: "mark", x1: x, x2: x, y1: TOP - 10, y2: HEIGHT - BOTTOM }),
      isFree ? svg("text", { class: "marked", x: x + (isRight ? -5 : 5), y: TOP - 6, "text-anchor": isRight ? "end" : "start" }, text) : null].filter(Boolean);
  });
}

function lines(rows, across, upwards) {
  const place = (step, value) => `${across.at(step)},${upwards.at(value)}`, parts = [];
  const spread = rows.filter((row) => row[2] !== null && row[3] !== null);
  if (spread.some((row) => row[3] > row[2])) {
    const edge = [...spread.map((row) => place(row[0], row[3])), ...[...spread].reverse().map((row) => place(row[0], row[2]))];
    parts.push(svg("polygon", { class: "band", points: edge.join(" ") }));
  }
  for (const run of runs(rows)) parts.push(line(run, across, upwards, "c0"));
  for (const row of rows.filter((one) => one[6] || one[1] === null)) {
    parts.push(svg("path", { class: "cross", d: `M${across.at(row[0]) - 4},${TOP - 2}l8,8m0,-8l-8,8` }));
  }
  return parts;
}

function line(run, across, upwards, kind) {
  return run.length > 1
    ? svg("polyline", { class: `line ${kind}`, points: run.map((row) => `${across.at(row[0])},${upwards.at(row[1])}`).join(" ") })
    : svg("circle", { class: `dot ${kind}`, cx: across.at(run[0][0]), cy: upwards.at(run[0][1]), r: 3 });
}

function runs(rows) {
  const found = [[]];
  for (const row of rows) if (row[1] === null) found.push([]); else found.at(-1).push(row);
  return found.filter((run) => run.length);
}

function point(chart, parts, at) {
  parts.at = at;
  const row = parts.rows[at];
  parts.cursor.setAttribute("visibility", row ? "visible" : "hidden");
  parts.said.textContent = row ? told(chart, row) + beside(chart, parts, row[0]) : "";
  if (row) for (const end of ["x1", "x2"]) parts.cursor.setAttribute(end, parts.across.at(row[0]));
}

function beside(chart, { others }, step) {
  const there = others[closest({ rows: others }, step)];
  return there ? `; ${state.other.name} at step ${count(there[0])}: ${chart.text(there[1])}` : "";
}

function select(parts, from, to) {
  parts.chosen.setAttribute("visibility", from === null || to === null ? "hidden" : "visible");
  if (from === null || to === null) return;
  const [left, right] = [parts.across.at(from), parts.across.at(to)].sort((one, other) => one - other);
  parts.chosen.setAttribute("x", left);
  parts.chosen.setAttribute("width", right - left);
}

function told(chart, [step, mean, low, high, lowRank, highRank, bad]) {
  const said = [`step ${count(step)}: ${chart.mean ?? "mean"} ${chart.text(mean)}`];
  if (lowRank >= 0 && low !== high) said.push(`lowest ${chart.text(low)} on rank ${lowRank}`);
  if (highRank >= 0 && low !== high) said.push(`${chart.high ?? "highest"} ${chart.text(high)} on rank ${highRank}`);
  if (bad) said.push(`not finite on ${count(bad)} ${bad === 1 ? "rank" : "ranks"}`);
  return said.join(", ");
}

// As many points as can be told apart; extremes stay, with the ranks that had them.
function joined(rows) {
  const width = Math.ceil(rows.length / COLUMNS);
  if (width <= 1) return rows;
  const found = [];
  for (let begin = 0; begin < rows.length; begin += width) {
    const part = rows.slice(begin, begin + width), finite = part.filter((row) => row[1] !== null);
    if (!finite.length) { found.push(part.at(-1)); continue; }
    const low = finite.reduce((best, row) => (row[2] < best[2] ? row : best)), high = finite.reduce((best, row) => (row[3] > best[3] ? row : best));
    const mean = finite.reduce((sum, row) => sum + row[1], 0) / finite.length;
    found.push([part.at(-1)[0], mean, low[2], high[3], low[4], high[5], part.reduce((sum, row) => sum + row[6], 0)]);
  }
  return found;
}
