// One answer on the page: text or coloured tokens as they arrive, reasoning, calls of tools, its figures, its error.

import { ApiError, streamEvents } from "./api.js";
import { AnswerParts } from "./parts.js";
import { actionButton, copyText, element, renderText } from "./text.js";
import { TokenText, readTokens } from "./tokens.js";

const FINISH = { stop: "complete", length: "cut at max tokens", tool_calls: "calls tools" };
const MOST_HELD = 8;

export class Answer {
  #content;
  #tokens = []; // those whose text has not come yet: a server keeps text back until it knows what it is
  #held = []; // pieces whose tokens have not come yet
  #timing = { started: 0, first: null, last: null, pieces: 0 };
  #usage = null;
  #finish = null;
  #colours;
  #asked; // for colours
  #frame = 0;

  /** `markup`: the text may hold code fences; else it is shown as it is. `masked`: it follows a JSON schema. */
  constructor({ colours, markup, masked }) {
    this.#colours = this.#asked = colours;
    this.root = element("article", "", "message answer streaming");
    this.root.setAttribute("aria-label", "Answer");
    this.body = element("div", "", markup ? "body" : "body code");
    this.figures = element("div", "", "figures");
    this.actions = element("div", "", "actions");
    const foot = element("footer");
    foot.append(this.figures, this.actions);
    this.root.append(this.body, foot);
    this.body.append(waitingBlocks());
    this.parts = new AnswerParts(this.body, this.#tokens);
    this.#content = new TokenText(this.body, { masked, plain: markup ? renderText : showText });
  }

  get text() {
    return this.#content.text;
  }

  /** Streams the answer to `body`. Returns "done", "stopped" or "failed"; never throws. */
  async run(path, body, signal) {
    this.#timing.started = performance.now();
    let outcome = "done";
    try {
      for await (const event of streamEvents(path, body, signal)) this.#take(event);
    } catch (error) {
      outcome = signal.aborted ? "stopped" : "failed";
      if (outcome === "failed") this.#fail(error);
    }
    cancelAnimationFrame(this.#frame);
    this.#finish ??= outcome === "stopped" ? "stopped by you" : null;
    this.root.classList.remove("streaming");
    this.#readHeld();
    if (!this.parts.any) this.#content.add(this.#tokens.splice(0)); // the end of the answer has a token, but no text
    this.#draw();
    if (this.text) this.addAction("Copy", (button) => this.#copy(button));
    return outcome;
  }

  addAction(label, act) {
    this.actions.append(actionButton(label, act));
  }

  showColours(colours) {
    this.#colours = colours;
    this.#draw();
  }

  #take(event) {
    this.#usage = event.usage ?? this.#usage;
    const choice = event.choices?.find(({ index }) => !index);
    if (!choice) return;
    this.#finish = choice.finish_reason ?? this.#finish;
    const tokens = readTokens(choice.logprobs);
    this.#tokens.push(...tokens);
    this.#held.push(choice);
    // Where tokens make several pieces of text, they come with the last one.
    if (this.#asked && tokens.length === 0 && this.#held.length < MOST_HELD && !choice.finish_reason) return;
    const grown = this.#readHeld();
    if (!grown && tokens.length === 0) return;
    const now = performance.now();
    this.#timing.first ??= now;
    this.#timing.last = now;
    this.#timing.pieces += tokens.length || 1;
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  /** Sorts the held pieces into content and parts. True if there was text. */
  #readHeld() {
    let grown = false;
    for (const { delta, text } of this.#held.splice(0)) {
      const piece = delta?.content ?? text ?? "";
      grown = this.parts.take(delta) || piece !== "" || grown;
      this.#content.push(piece, this.#tokens);
    }
    return grown;
  }

  #draw() {
    this.#frame = 0;
    this.parts.draw(this.#colours);
    const waits = this.text === "" && !this.parts.calls.length && this.root.classList.contains("streaming");
    if (waits) return;
    this.#content.draw(this.#colours);
    this.#drawFigures();
    this.root.dispatchEvent(new CustomEvent("grow", { bubbles: true }));
  }

  #drawFigures() {
    const { started, first, last, pieces } = this.#timing;
    const tokens = this.#usage?.completion_tokens ?? pieces;
    const about = this.#usage ? "" : "≈ ";
    const shown = [];
    if (first !== null) shown.push([duration(first - started), "to first token"]);
    if (tokens > 1 && last > first) shown.push([rate(((tokens - 1) * 1000) / (last - first)), "tokens/s"]);
    if (this.#usage) shown.push([String(this.#usage.prompt_tokens), "in"]);
    if (tokens) shown.push([about + tokens, "out"]);
    const reasoning = this.#usage?.completion_tokens_details?.reasoning_tokens;
    if (reasoning) shown.push([String(reasoning), "reasoning"]);
    const cached = this.#usage?.prompt_tokens_details?.cached_tokens;
    if (cached) shown.push([String(cached), "cached"]);
    if (this.#finish) shown.push(["", FINISH[this.#finish] ?? this.#finish]);
    if (this.#colours && !this.#asked) shown.push(["", "no token colours: they were off when this was asked"]);
    this.figures.replaceChildren(...shown.map(([value, unit]) => {
      const figure = element("span", "", "figure");
      figure.append(...(value ? [element("b", value), ` ${unit}`] : [unit]));
      return figure;
    }));
  }

  #fail(error) {
    const known = error instanceof ApiError;
    if (!known) console.error(error);
    const box = element("div", "", "error");
    box.setAttribute("role", "alert");
    box.append(element("strong", known ? heading(error) : "Something in this page broke"));
    box.append(element("p", error.message));
    if (known && error.field) box.append(element("p", `Parameter: ${error.field}`, "field-name"));
    this.body.after(box);
  }

  async #copy(button) {
    await copyText(this.text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }
}

function heading({ status }) {
  if (status === 401 || status === 403) return "The server wants an API key";
  if (status === 404) return "Not found";
  if (status === 429) return "The yard is full";
  if (status >= 400 && status < 500) return "The request was refused";
  if (status >= 500) return "The server failed";
  return "The answer broke off";
}

function showText(target, text) {
  target.textContent = text;
}

function waitingBlocks() {
  const blocks = element("span", "", "stacking");
  blocks.setAttribute("aria-hidden", "true");
  blocks.append(element("i"), element("i"), element("i"));
  return blocks;
}

const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
const rate = (value) => value.toFixed(value < 100 ? 1 : 0);
