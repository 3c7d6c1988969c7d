// Elements from data. Text is only ever set as text: whatever a rank said, none of it becomes markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  return dressed(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return dressed(document.createElementNS(SVG, tag), attributes, children);
}

function dressed(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

// Replaces what a node holds, unless it would be the same: a reader's place and a screen reader's attention stay.
export function fill(node, ...children) {
  const made = el("div", {}, ...children);
  if (made.innerHTML !== node.innerHTML) keepingFocus(node, () => node.replaceChildren(...made.childNodes));
}

function keepingFocus(node, change) {
  const key = node.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  change();
  if (key !== undefined) [...node.querySelectorAll("[data-key]")].find((one) => one.dataset.key === key)?.focus();
}
