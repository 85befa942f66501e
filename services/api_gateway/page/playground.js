// The page's wiring: tabs, models, keyboard, the parameter drawer. Answers live in pane.js, the ring in ring.js.

import { ApiError, apiKey, getJson, keepApiKey } from "./api.js";
import { Chat, Completion } from "./pane.js";
import { Params } from "./params.js";
import { watchRing } from "./ring.js";
import { drawLegend, watchTokens } from "./tokens.js";

const COLOURS = "blockyard.colours";
const MODELS_RETRY_MS = 2000;
const byId = (id) => document.getElementById(id);

const model = byId("model");
const colours = byId("colours");
const params = new Params(byId("params-form"), byId("params-rows"));
const settings = {
  params,
  model: () => (model.disabled ? "" : model.value),
  colours: () => colours.checked,
  say: (text) => (byId("status").textContent = text),
  show: showFault,
};
const panes = { chat: new Chat(settings), completion: new Completion(settings) };
let tab = "chat";

panes.chat.offer(byId("starters"), [
  "What does heapq.heapify do?",
  "Write a function that reverses a string.",
  "How do I read a file line by line?",
]);
panes.completion.offer(byId("completion-starters"), [
  "def fibonacci(n):\n",
  "import json\n\nclass Encoder:\n",
  '"""Read lines from a file',
]);

// --- tabs: on a wide screen the ring is always in view and its tab is hidden ---

const tabs = [...document.querySelectorAll("[role=tab]")];

function openTab(name) {
  document.body.dataset.tab = name;
  for (const button of tabs) {
    const open = button.dataset.tab === name;
    button.setAttribute("aria-selected", open);
    button.tabIndex = open ? 0 : -1;
  }
  if (!(name in panes)) return;
  tab = name;
  for (const other of Object.keys(panes)) byId(`pane-${other}`).hidden = other !== name;
  byId("reset").textContent = name === "chat" ? "New conversation" : "Clear";
}

for (const button of tabs) {
  button.addEventListener("click", () => openTab(button.dataset.tab));
  button.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const open = tabs.filter((candidate) => candidate.offsetParent !== null);
    const next = open[(open.indexOf(button) + step + open.length) % open.length];
    openTab(next.dataset.tab);
    next.focus();
  });
}

// --- models ---

async function loadModels() {
  try {
    const { data } = await getJson("v1/models", 5000);
    const chosen = model.value;
    model.replaceChildren(...data.map(({ id, max_model_len: length }) => {
      const option = new Option(id, id);
      if (length) option.title = `up to ${length.toLocaleString("en")} tokens`;
      return option;
    }));
    if (data.some(({ id }) => id === chosen)) model.value = chosen;
    model.disabled = data.length === 0;
    model.title = model.selectedOptions[0]?.title ?? "";
    warn("");
    if (data.length === 0) setTimeout(loadModels, MODELS_RETRY_MS);
  } catch (error) {
    const wantsKey = error instanceof ApiError && (error.status === 401 || error.status === 403);
    warn(wantsKey ? "This server asks for an API key. Enter it under Parameters." : "The gateway cannot be reached. Trying again…");
    if (!wantsKey) setTimeout(loadModels, MODELS_RETRY_MS);
  }
}

function warn(text) {
  byId("banner").textContent = text;
  byId("banner").hidden = text === "";
}

byId("api-key").value = apiKey();
byId("api-key").addEventListener("change", (event) => {
  keepApiKey(event.target.value.trim());
  loadModels();
});

// --- parameters: a column on a wide screen, a drawer elsewhere ---

function showDrawer(open) {
  byId("params").classList.toggle("open", open);
  byId("params-open").setAttribute("aria-expanded", open);
  byId(open ? "p-temperature" : "params-open").focus();
}

function showFault({ field, at }) {
  if (byId("params-open").offsetParent) showDrawer(true);
  field.focus();
  if (at !== undefined) field.setSelectionRange(at, at + 1);
}

function widen(wide) {
  document.body.classList.toggle("wide-params", wide);
  byId("params-wide").setAttribute("aria-pressed", wide);
}

byId("params-wide").addEventListener("click", () => widen(!document.body.classList.contains("wide-params")));
byId("params-open").addEventListener("click", () => showDrawer(true));
byId("params-close").addEventListener("click", () => showDrawer(false));
byId("params-reset").addEventListener("click", () => params.reset());

// --- token colours ---

function showColours() {
  byId("legend").hidden = !colours.checked;
  for (const pane of Object.values(panes)) pane.showColours(colours.checked);
}

colours.checked = sessionStorage.getItem(COLOURS) === "on";
colours.addEventListener("change", () => {
  sessionStorage.setItem(COLOURS, colours.checked ? "on" : "off");
  showColours();
});
drawLegend(byId("legend"));
watchTokens(byId("stage"), byId("token-tip"));
showColours();

// --- the yard in the empty pages: one digit a stack, and the few blocks that are painted ---

const STACKS = "12133122345231123321244312";
const PAINTED = { "3.2": "teal", "4.0": "yellow", "8.2": "yellow", "9.1": "rust", "10.4": "yellow", "11.0": "ink", "17.2": "yellow", "21.3": "rust", "22.1": "teal", "23.0": "yellow" };

for (const skyline of document.querySelectorAll(".skyline")) {
  for (const [x, height] of [...STACKS].entries()) {
    const stack = document.createElement("div");
    for (let y = Number(height) - 1; y >= 0; y--) {
      const block = document.createElement("i");
      block.className = PAINTED[`${x}.${y}`] ?? "";
      stack.append(block);
    }
    skyline.append(stack);
  }
}

// --- the rest ---

byId("reset").addEventListener("click", () => panes[tab].reset());
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (byId("params").classList.contains("open")) showDrawer(false);
  else panes[tab].stop();
});

loadModels();
watchRing();
