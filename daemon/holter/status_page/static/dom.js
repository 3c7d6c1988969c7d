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

// What stands between backticks is code.
export const worded = (text) => String(text ?? "").split(/`([^`\n]+)`/).map((part, place) => (place % 2 ? el("code", {}, part) : part));

// Gives a node other content and keeps what is the same of it: a reader's place, a click that is half done and a screen reader's attention stay.
export function fill(node, ...children) {
  const made = el("div", {}, ...children);
  if (made.innerHTML !== node.innerHTML) keepingFocus(node, () => become(node, made));
}

function become(node, made) {
  const news = [...made.childNodes], olds = [...node.childNodes];
  if (news.length !== olds.length || news.some((one, place) => one.nodeName !== olds[place].nodeName)) {
    node.replaceChildren(...news);
    return;
  }
  olds.forEach((old, place) => {
    if (old.nodeType !== Node.ELEMENT_NODE) { if (old.data !== news[place].data) old.data = news[place].data; return; }
    for (const { name } of [...old.attributes]) if (!news[place].hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of news[place].attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    become(old, news[place]);
  });
}

function keepingFocus(node, change) {
  const key = node.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  change();
  if (key !== undefined && document.activeElement.dataset?.key !== key) [...node.querySelectorAll("[data-key]")].find((one) => one.dataset.key === key)?.focus();
}
