// Fields that hold JSON: what is wrong with a text, with line and column, beside the field while it is typed.
// Browsers' own messages name a place in some cases only, and each browser words them its own way.

import { element } from "./text.js";

const SPACE = /[ \t\n\r]*/y;
const WORD = /(?:-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)(?![\w.+-])/y;
const STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*/y;
const SHOWN = /[\w.+-]+|[^]/uy; // what a message quotes: a word or a character
const CLOSING = { "[": "]", "{": "}" };
const KINDS = {
  list: ["a list: [ … ]", (value) => Array.isArray(value)],
  object: ["an object: { … }", (value) => value !== null && typeof value === "object" && !Array.isArray(value)],
};

/** The first place where `text` is not JSON as {at, text}, or null. */
export function findFault(text) {
  let at = 0;
  const open = []; // opening brackets and where they stand
  const match = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(text)?.[0];
    at += found?.length ?? 0;
    return found;
  };
  const fault = (wanted) => {
    if (at < text.length) return { at, text: `expected ${wanted}, found ${quoted(text, at)}` };
    const last = open.at(-1);
    return { at, text: last ? `ends before the “${last.bracket}” of ${place(text, last.at)} is closed` : `expected ${wanted}, found the end` };
  };
  for (let wanted = "value"; ; ) {
    match(SPACE);
    const next = text[at];
    const inside = open.at(-1)?.bracket;
    if (next !== undefined && next === CLOSING[inside] && ["first", "comma"].includes(wanted)) {
      open.pop();
      at += 1;
      wanted = "comma";
    } else if (wanted === "comma") {
      if (!inside) return at < text.length ? fault("the end") : null;
      if (next !== ",") return fault(`“,” or “${CLOSING[inside]}”`);
      at += 1;
      wanted = "value";
    } else if (inside === "{" && wanted !== "member") {
      if (next !== '"') return fault(wanted === "first" ? 'a name in double quotes or “}”' : "a name in double quotes");
      const broken = takeString();
      if (broken) return broken;
      match(SPACE);
      if (text[at] !== ":") return fault("“:”");
      at += 1;
      wanted = "member";
    } else if (next in CLOSING) {
      open.push({ bracket: next, at });
      at += 1;
      wanted = "first";
    } else {
      const broken = next === '"' ? takeString() : match(WORD) ? null : fault(wanted === "first" ? "a value or “]”" : "a value");
      if (broken) return broken;
      wanted = "comma";
    }
  }

  function takeString() {
    const begin = at;
    match(STRING);
    if (text[at] === '"') {
      at += 1;
      return null;
    }
    if (text[at] === "\\" && at + 1 < text.length) return { at, text: `${quoted(text, at, 2)} is no escape of JSON` };
    if (text[at] !== undefined && text[at] !== "\n" && text[at] !== "\\") return { at, text: `a string holds ${quoted(text, at)} only as an escape` };
    return { at: begin, text: "a string without its closing quote" };
  }
}

function quoted(text, at, length) {
  SHOWN.lastIndex = at;
  const found = length ? text.slice(at, at + length) : SHOWN.exec(text)[0].slice(0, 24);
  return found === '"' ? "a quote" : /[\u0000-\u001f]/.test(found) ? "a line break, tab or control character" : `“${found}”`;
}

/** Where index `at` is, as a person counts. */
export function place(text, at) {
  const lines = text.slice(0, at).split("\n");
  return `line ${lines.length}, column ${[...lines.at(-1)].length + 1}`;
}

/** A text area that holds JSON or nothing. Its `data-json` names the kind of value. */
export class JsonField {
  fault = null; // {at, text}
  value = null; // null: the field is empty or at fault
  #message = element("p", "", "fault");

  constructor(area) {
    this.area = area;
    this.#message.id = `${area.id}-fault`;
    area.setAttribute("aria-describedby", this.#message.id);
    area.after(this.#message);
    area.addEventListener("input", () => this.check());
    this.check();
  }

  check() {
    const text = this.area.value;
    const [kind, fits] = KINDS[this.area.dataset.json];
    this.value = null;
    this.fault = text.trim() === "" ? null : findFault(text);
    if (this.fault) this.fault.text = `${place(text, this.fault.at)}: ${this.fault.text}`;
    else if (text.trim() !== "") {
      this.value = JSON.parse(text);
      if (!fits(this.value)) this.fault = { at: 0, text: `must be ${kind}` };
    }
    this.area.setAttribute("aria-invalid", this.fault !== null);
    this.#message.hidden = this.fault === null;
    this.#message.textContent = this.fault?.text ?? "";
  }
}
