// The parameter form. An empty field is not sent: the server's own default holds.

import { JsonField } from "./json_fields.js";

const STORE = "blockyard.params";

const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, rest: 1, hint: "0 always takes the likeliest token" },
  { name: "top_p", label: "Top p", min: 0.05, max: 1, step: 0.05, rest: 1, hint: "Keep the likeliest tokens up to this total probability" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, rest: 0, hint: "Drop tokens below this share of the likeliest one" },
  { name: "repetition_penalty", label: "Repetition", min: 0.5, max: 2, step: 0.05, rest: 1, hint: "Above 1 discourages tokens that were there before" },
  { name: "top_k", label: "Top k", min: 0, step: 1, hint: "Keep this many of the likeliest tokens, 0 is all" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, initial: "256", hint: "Length of the answer at most" },
  { name: "seed", label: "Seed", step: 1, hint: "The same seed gives the same draw" },
];

export class Params {
  #inputs = new Map();
  #json = {}; // by the field's id

  constructor(form, rows) {
    this.form = form;
    for (const field of FIELDS) rows.append(this.#row(field));
    this.#restore();
    for (const area of form.querySelectorAll("[data-json]")) this.#json[area.id] = new JsonField(area);
    form.addEventListener("input", () => this.#keep());
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  /** The parameters of a request's body. */
  values() {
    const values = {};
    for (const [name, input] of this.#inputs) {
      if (input.value !== "") values[name] = Number(input.value);
    }
    const stop = this.#text("p-stop").split("\n").filter((line) => line !== "").map(unescape);
    if (stop.length) values.stop = stop;
    if (this.schema) values.structured_outputs = { json: this.schema };
    return values;
  }

  /** Text of the JSON schema that answers follow; "": none. */
  get schema() {
    return this.#text("p-schema").trim();
  }

  /** The fields of a chat request with tools. */
  tools() {
    const tools = this.#json["p-tools"].value;
    const choice = this.#text("p-tool-choice");
    return tools && { tools, ...(choice && { tool_choice: choice }) };
  }

  /** Fields of the user's own for a request's body. */
  get extra() {
    return this.#json["p-extra"].value;
  }

  /** The first field that cannot be sent from the pane `tab`, as {label, text, field, at}, or null. */
  fault(tab) {
    for (const { name, label } of FIELDS) {
      const field = this.#inputs.get(name);
      if (field.validity.badInput) return { label, text: "is not a number", field };
    }
    for (const { area, fault } of Object.values(this.#json)) {
      const used = tab === "chat" || !area.closest(".chat-only");
      if (used && fault) return { label: area.labels[0].textContent, ...fault, field: area };
    }
    return null;
  }

  get system() {
    return this.#text("p-system").trim();
  }

  reset() {
    for (const field of FIELDS) this.#inputs.get(field.name).value = field.initial ?? "";
    for (const area of this.form.querySelectorAll("[data-store]")) area.value = "";
    for (const field of Object.values(this.#json)) field.check();
    this.#keep();
    this.#showSliders();
  }

  #text(id) {
    return this.form.querySelector(`#${id}`).value;
  }

  #row(field) {
    const row = document.createElement("div");
    row.className = field.max === undefined ? "param" : "param slides";
    row.title = field.hint;
    const label = document.createElement("label");
    label.htmlFor = `p-${field.name}`;
    label.textContent = field.label;
    const input = document.createElement("input");
    Object.assign(input, { type: "number", id: `p-${field.name}`, step: field.step, placeholder: "auto", value: field.initial ?? "" });
    if (field.min !== undefined) input.min = field.min;
    input.inputMode = field.step === 1 ? "numeric" : "decimal";
    this.#inputs.set(field.name, input);
    row.append(label, input);
    if (field.max !== undefined) row.append(this.#slider(field, input));
    return row;
  }

  #slider(field, input) {
    const slider = document.createElement("input");
    Object.assign(slider, { type: "range", min: field.min, max: field.max, step: field.step, value: field.rest });
    slider.setAttribute("aria-label", `${field.label}, slider`);
    slider.dataset.name = field.name;
    slider.addEventListener("input", () => {
      input.value = slider.value;
      this.#showSliders();
    });
    input.addEventListener("input", () => this.#showSliders());
    return slider;
  }

  #showSliders() {
    for (const slider of this.form.querySelectorAll("input[type=range]")) {
      const field = FIELDS.find((candidate) => candidate.name === slider.dataset.name);
      const set = this.#inputs.get(field.name).value;
      slider.value = set === "" ? field.rest : set;
      slider.classList.toggle("resting", set === "");
      const share = (slider.value - field.min) / (field.max - field.min);
      slider.style.setProperty("--share", `${share * 100}%`);
    }
  }

  #keep() {
    const kept = {};
    for (const [name, input] of this.#inputs) kept[name] = input.value;
    for (const area of this.form.querySelectorAll("[data-store]")) kept[area.id] = area.value;
    sessionStorage.setItem(STORE, JSON.stringify(kept));
  }

  #restore() {
    const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
    for (const [name, input] of this.#inputs) input.value = kept[name] ?? input.value;
    for (const area of this.form.querySelectorAll("[data-store]")) area.value = kept[area.id] ?? "";
    this.#showSliders();
  }
}

function unescape(text) {
  return text.replace(/\\([nrt\\])/g, (_, letter) => ({ n: "\n", r: "\r", t: "\t", "\\": "\\" })[letter]);
}
