// The halt: a reason, the token, a word that is typed. The token is nowhere but in the field, unless it is to be kept in this tab.

import { $ } from "./dom.js";

const KEPT = "holter-token";

export function begin() {
  const form = $("halt-form"), dialog = $("halt");
  $("halt-open").addEventListener("click", () => {
    say("", "");
    $("halt-word").value = "";
    $("halt-token").value = sessionStorage.getItem(KEPT) ?? "";
    $("halt-keep").checked = Boolean(sessionStorage.getItem(KEPT));
    ready();
    dialog.showModal();
    $("halt-reason").focus();
  });
  $("halt-cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => { $("halt-token").value = ""; });
  form.addEventListener("input", ready);
  form.addEventListener("submit", (event) => { event.preventDefault(); if (isReady()) ask(); });
}

const isReady = () => $("halt-word").value.trim().toLowerCase() === "halt" && $("halt-reason").value.trim() !== "" && $("halt-token").value.trim() !== "";
const ready = () => { $("halt-go").disabled = !isReady(); };

async function ask() {
  const token = $("halt-token").value.trim();
  if ($("halt-keep").checked) sessionStorage.setItem(KEPT, token); else sessionStorage.removeItem(KEPT);
  $("halt-go").disabled = true;
  say("Asking…", "");
  const request = { reason: $("halt-reason").value.trim(), by: $("halt-by").value.trim() };
  try {
    const answer = await fetch("api/v1/halt", {
      method: "POST", headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" }, body: JSON.stringify(request),
    });
    const told = await answer.json().catch(() => ({}));
    if (answer.status === 202) say("Accepted. The ranks are being stopped; the page shows how far it is.", "good");
    else say(`Not accepted: ${told.error ?? `the coordinator answered ${answer.status}`}.`, "bad");
  } catch {
    say("Not accepted: the coordinator cannot be reached.", "bad");
  }
  $("halt-word").value = "";
}

function say(text, how) {
  $("halt-answer").textContent = text;
  $("halt-answer").className = how;
}
