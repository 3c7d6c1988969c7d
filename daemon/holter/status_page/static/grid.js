// The ranks as a grid on a canvas: large labelled cells for a few, five pixels each for 16,000. Rows hold whole hosts where they can.

import { $, el, fill } from "./dom.js";
import { MEASURES, PHASES, at, shapeOf, stepOf, words } from "./ranks.js";
import { numRanks } from "./stream.js";
import { count } from "./words.js";

const GUTTER = 46; // For the number of a row's first rank.
const HOST = 8;
const MAX_RINGS = 64; // More than these would hide what they point at.
const LABELLED = 30, TOLD = 74; // Cells of this size have the rank's number in them; and what it does.

let measure = "state", chosen = 0, layout = { columns: 1, size: 1 }, palette = {}, open = () => {};
let shown = 0, pointed = null;

export function begin(onOpen) {
  open = onOpen;
  for (const [name, { label }] of Object.entries(MEASURES)) $("measure").append(el("option", { value: name }, label));
  $("measure").addEventListener("change", (event) => { measure = event.target.value; draw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { palette = {}; draw(); });
  new ResizeObserver(() => draw()).observe($("grid"));
  $("grid").addEventListener("keydown", move);
  $("grid").addEventListener("focus", () => tell(chosen));
  $("grid").addEventListener("blur", () => draw());
  $("canvas").addEventListener("pointermove", (event) => point(under(event)));
  $("canvas").addEventListener("pointerleave", () => point(null));
  $("canvas").addEventListener("click", (event) => { const rank = under(event); if (rank !== null) { tell(rank); open(rank); } });
}

export function draw() {
  const num = numRanks(), canvas = $("canvas"), width = $("grid").clientWidth;
  if (!num || !width) return;
  chosen = Math.min(chosen, num - 1);
  layout = laidOut(num, width - GUTTER);
  const height = Math.ceil(num / layout.columns) * layout.size, scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const { classes, of } = MEASURES[measure], counts = classes.map(() => 0), rings = [];
  for (let rank = 0; rank < num; rank++) {
    const place = of(rank);
    counts[place] += 1;
    cell(pen, rank, classes[place], rings);
  }
  labels(pen, num);
  if (rings.length <= MAX_RINGS) rings.forEach(([rank, color]) => ring(pen, rank, color));
  if (document.activeElement === $("grid")) focusRing(pen, chosen);
  $("grid").setAttribute("aria-colcount", layout.columns);
  $("grid").setAttribute("aria-rowcount", Math.ceil(num / layout.columns));
  legend(classes, counts);
  point(pointed);
}

function point(rank) {
  pointed = rank;
  $("pointed").textContent = rank === null || rank >= numRanks() ? "" : words(rank);
}

function laidOut(num, width) {
  const largest = num <= 16 ? 110 : num <= 64 ? 64 : 32, highest = Math.max(260, Math.min(480, innerHeight * 0.5));
  let size = Math.min(largest, width);
  const fits = () => Math.ceil(num / columnsOf(size)) * size <= highest;
  const columnsOf = (one) => {
    const room = Math.max(1, Math.floor(width / one));
    return Math.min(num, room > HOST ? room - (room % HOST) : room);
  };
  while (size > 4 && !fits()) size -= size > 16 ? 1 : 0.5;
  return { columns: columnsOf(size), size };
}

const corner = (rank) => [GUTTER + (rank % layout.columns) * layout.size, Math.floor(rank / layout.columns) * layout.size];

function cell(pen, rank, kind, rings) {
  const [x, y] = corner(rank), size = layout.size, gap = size >= 6 ? Math.max(1, Math.round(size / 24)) : 0.5, side = size - gap;
  pen.fillStyle = color(kind.color);
  pen.fillRect(x, y, side, side);
  const shape = shapeOf(rank);
  if (shape) mark(pen, shape, x, y, side);
  if (shape === "ring" || shape === "cross") rings.push([rank, at("blame", rank) === 1 ? "warning" : "critical"]);
  if (size >= LABELLED) write(pen, rank, kind, x, y, side);
  else if (size >= 13 && kind.letter) letter(pen, kind.letter, x, y, side);
}

// A shape besides the colour: a cross, a stroke, an empty square.
function mark(pen, shape, x, y, side) {
  const inset = Math.max(0.5, side * 0.18);
  pen.lineWidth = Math.max(1, side / 10);
  if (shape === "hollow") {
    pen.strokeStyle = color("edge", "");
    pen.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
  } else if (shape !== "ring" && side < LABELLED) {
    pen.strokeStyle = color("card", "");
    pen.beginPath();
    pen.moveTo(x + inset, y + inset);
    pen.lineTo(x + side - inset, y + side - inset);
    if (shape === "cross") { pen.moveTo(x + side - inset, y + inset); pen.lineTo(x + inset, y + side - inset); }
    pen.stroke();
  }
}

function write(pen, rank, kind, x, y, side) {
  pen.fillStyle = inkOn(kind.color);
  pen.textAlign = "left";
  pen.textBaseline = "top";
  pen.font = `600 ${side >= TOLD ? 15 : 12}px system-ui, sans-serif`;
  pen.fillText(String(rank), x + 5, y + 5, side - 10);
  if (kind.letter) { pen.textAlign = "right"; pen.fillText(kind.letter, x + side - 6, y + 5); pen.textAlign = "left"; }
  if (side < TOLD) return;
  pen.font = "12px system-ui, sans-serif";
  const step = stepOf(rank);
  pen.fillText(step === null ? "" : `step ${count(step)}`, x + 6, y + side - 36, side - 12);
  pen.fillText(PHASES[at("phase", rank)] ?? "", x + 6, y + side - 19, side - 12);
}

function letter(pen, text, x, y, side) {
  pen.fillStyle = inkOn(pen.fillStyle);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.font = `700 ${Math.round(side * 0.75)}px system-ui, sans-serif`;
  pen.fillText(text, x + side / 2, y + side / 2 + 0.5);
}

// One bad rank among thousands is five pixels wide: a ring makes it findable.
function ring(pen, rank, name) {
  const [x, y] = corner(rank), half = layout.size / 2, radius = Math.max(half * 1.3, 9);
  if (layout.size >= LABELLED) {
    pen.strokeStyle = color(name, "");
    pen.lineWidth = 4;
    pen.strokeRect(x + 2, y + 2, layout.size - 6, layout.size - 6);
    return;
  }
  for (const [stroke, width] of [[color("card", ""), 5], [color(name, ""), 2.5]]) {
    pen.strokeStyle = stroke;
    pen.lineWidth = width;
    pen.beginPath();
    pen.arc(x + half, y + half, radius, 0, 2 * Math.PI);
    pen.stroke();
  }
}

function focusRing(pen, rank) {
  const [x, y] = corner(rank), size = Math.max(layout.size, 12), shift = (layout.size - size) / 2;
  for (const [name, width] of [["card", 5], ["focus", 3]]) {
    pen.strokeStyle = color(name, "");
    pen.lineWidth = width;
    pen.strokeRect(x + shift, y + shift, size, size);
  }
}

function labels(pen, num) {
  const every = Math.max(1, Math.ceil(14 / layout.size));
  pen.fillStyle = color("faint", "");
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "right";
  pen.textBaseline = "top";
  for (let row = 0; row * layout.columns < num; row += every) {
    pen.fillText(count(row * layout.columns), GUTTER - 6, row * layout.size + Math.min(2, layout.size / 4));
  }
}

function legend(classes, counts) {
  const present = classes.map((kind, place) => [kind, counts[place]]).filter(([, number]) => number);
  const key = JSON.stringify([measure, present.map(([kind]) => kind.name)]);
  if ($("legend").dataset.shown !== key) {
    fill($("legend"), present.map(([kind]) => el("li", {}, el("canvas", { width: 16, height: 16, "aria-hidden": "true" }), el("span"))));
    [...$("legend").querySelectorAll("canvas")].forEach((swatch, place) => paintSwatch(swatch, present[place][0]));
    $("legend").dataset.shown = key;
  }
  [...$("legend").querySelectorAll("span")].forEach((text, place) => { text.textContent = `${present[place][0].name} ${count(present[place][1])}`; });
}

function paintSwatch(swatch, kind) {
  const pen = swatch.getContext("2d");
  pen.fillStyle = color(kind.color);
  pen.fillRect(0, 0, 16, 16);
  if (kind.shape === "hollow") mark(pen, kind.shape, 0, 0, 16);
  if (kind.letter) letter(pen, kind.letter, 0, 0, 16);
}

function color(name, prefix = "g-") {
  const key = prefix + name;
  palette[key] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${key}`).trim() || "#888888";
  return palette[key];
}

// Black or white, whichever is read better on the colour.
function inkOn(name) {
  const hex = name.startsWith("#") ? name : color(name);
  const [red, green, blue] = [1, 3, 5].map((place) => (parseInt(hex.slice(place, place + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "#10171d" : "#ffffff";
}

function under(event) {
  const box = $("canvas").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left - GUTTER) / layout.size), row = Math.floor((event.clientY - box.top) / layout.size);
  const rank = row * layout.columns + column;
  return column >= 0 && column < layout.columns && row >= 0 && rank < numRanks() ? rank : null;
}

function move(event) {
  const page = layout.columns * 10;
  const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: layout.columns, ArrowUp: -layout.columns, PageDown: page, PageUp: -page }[event.key];
  if (by) tell(Math.max(0, Math.min(numRanks() - 1, chosen + by)));
  else if (event.key === "Home") tell(0);
  else if (event.key === "End") tell(numRanks() - 1);
  else if (event.key === "Enter" || event.key === " ") open(chosen);
  else return;
  event.preventDefault();
}

// Two cells take turns, so that a screen reader hears that another one is active.
function tell(rank) {
  chosen = rank;
  shown = 1 - shown;
  const now = $(shown ? "cell-a" : "cell-b"), other = $(shown ? "cell-b" : "cell-a");
  $("grid-row").setAttribute("aria-rowindex", Math.floor(rank / layout.columns) + 1);
  now.setAttribute("aria-colindex", (rank % layout.columns) + 1);
  now.textContent = words(rank);
  other.textContent = "";
  $("grid").setAttribute("aria-activedescendant", now.id);
  point(rank);
  draw();
}
