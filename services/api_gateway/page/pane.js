// The two composers, for chat and completion. A pane owns its form, its log, and at most one answer in progress.

import { Answer } from "./answer.js";
import { actionButton, element } from "./text.js";

const NEAR_END_PX = 80; // a reader this close to the end is following along

class Pane {
  answers = [];
  #abort = null;
  #following = true;

  /** `settings`: {model(), params, colours(), say(text), show(field)} of the whole page. `model()` is "" before there is one. */
  constructor(name, settings) {
    this.settings = settings;
    this.form = document.getElementById(`${name}-form`);
    this.input = document.getElementById(`${name}-input`);
    this.log = document.getElementById(`${name}-log`);
    this.intro = document.getElementById(`${name}-intro`);
    this.scroll = document.getElementById(`${name}-scroll`);
    this.halt = this.form.querySelector(".halt");
    this.go = this.form.querySelector(".go");
    this.name = name;
    this.notice = element("div", "", "notice");
    this.notice.setAttribute("role", "alert");
    this.notice.hidden = true;
    this.form.before(this.notice);
    for (const form of [this.form, settings.params.form]) form.addEventListener("input", () => (this.notice.hidden = true));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.halt.addEventListener("click", () => this.stop());
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.submit();
    });
    this.scroll.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.scroll;
      this.#following = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    });
    this.log.addEventListener("grow", () => this.follow());
  }

  get busy() {
    return this.#abort !== null;
  }

  offer(target, texts) {
    for (const text of texts) {
      target.append(actionButton(text.trimEnd(), () => {
        this.input.value = text;
        this.submit();
      }, "starter"));
    }
  }

  submit() {
    if (!this.ready()) return;
    if (this.input.value.trim() === "") return this.sendEmpty();
    this.intro.hidden = true;
    this.#following = true;
    this.send(this.input.value);
  }

  sendEmpty() {
    this.tell(this.name === "chat" ? "There is no message to send yet." : "There is no text to go on from yet.");
  }

  /** Whether a request can be sent now. If not, the notice above the composer says why. */
  ready() {
    const fault = this.settings.params.fault(this.name);
    this.notice.hidden = true;
    if (this.busy) this.tell("Not sent: an answer is on its way. Esc stops it.");
    else if (!this.settings.model()) this.tell("Not sent: the server has named no model yet.");
    else if (fault) this.tell(`Not sent. ${fault.label}: ${fault.text}.`, ["Show", () => this.settings.show(fault)]);
    return this.notice.hidden;
  }

  tell(text, action) {
    this.notice.replaceChildren(element("p", text));
    if (action) this.notice.append(actionButton(...action));
    this.notice.hidden = false;
  }

  stop() {
    this.#abort?.abort();
  }

  reset() {
    this.stop();
    this.notice.hidden = true;
    this.#abort = null; // the next question may start before this one has ended
    this.#showBusy(false);
    this.answers = [];
    this.log.replaceChildren();
    this.intro.hidden = false;
    this.input.focus();
  }

  showColours(colours) {
    for (const answer of this.answers) answer.showColours(colours);
  }

  follow() {
    if (this.#following) this.toEnd();
  }

  toEnd() {
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  /** Runs `answer`, which is in the log already. */
  async stream(answer, path, body) {
    const abort = new AbortController();
    this.#abort = abort;
    this.answers.push(answer);
    this.#showBusy(true);
    this.settings.say("Answering");
    this.toEnd();
    const outcome = await answer.run(path, body, abort.signal);
    if (this.#abort === abort) {
      this.notice.hidden = true;
      this.#abort = null;
      this.#showBusy(false);
      this.settings.say({ done: "Answer complete", stopped: "Stopped", failed: "The answer failed" }[outcome]);
    }
    return outcome;
  }

  body(more) {
    const stream = { stream: true, stream_options: { include_usage: true } };
    const { params } = this.settings;
    return { model: this.settings.model(), ...more, ...params.values(), ...params.extra, ...stream };
  }

  #showBusy(busy) {
    this.log.setAttribute("aria-busy", busy);
    this.form.classList.toggle("busy", busy);
    const hadFocus = [this.go, this.halt].includes(document.activeElement);
    this.go.hidden = busy;
    this.halt.hidden = !busy;
    if (hadFocus) (busy ? this.halt : this.input).focus();
  }
}

export class Chat extends Pane {
  #turns = []; // {said, answer}; `said` is null where the results of the calls before are what was sent

  constructor(settings) {
    super("chat", settings);
  }

  send(said) {
    this.input.value = "";
    const question = element("article", said, "message question");
    question.setAttribute("aria-label", "You");
    this.log.append(question);
    const turn = { said, answer: null };
    this.#turns.push(turn);
    this.#ask(turn);
  }

  reset() {
    super.reset();
    this.#turns = [];
  }

  sendEmpty() {
    const last = this.#turns.at(-1);
    if (last?.answer.parts.results?.waiting) this.#sendResults(last);
    else super.sendEmpty();
  }

  /** Gives the model the results of the calls of `turn`, in place of what came after it. */
  #sendResults(turn) {
    if (!this.ready()) return;
    turn.answer.parts.results.markSent();
    this.#dropAfter(turn);
    const next = { said: null, answer: null };
    this.#turns.push(next);
    this.#ask(next);
  }

  async #ask(turn) {
    const colours = this.settings.colours();
    const messages = this.#messages(turn);
    const answer = new Answer({ colours, markup: !this.settings.params.schema, masked: !!this.settings.params.schema });
    if (turn.answer) turn.answer.root.replaceWith(answer.root);
    else this.log.append(answer.root);
    turn.answer = answer;
    const outcome = await this.stream(answer, "v1/chat/completions", this.body({
      messages,
      ...this.settings.params.tools(),
      ...(colours && { logprobs: true, top_logprobs: 5 }),
    }));
    answer.addAction(outcome === "failed" ? "Try again" : "Again", () => this.#again(turn));
    answer.parts.askResults(() => this.#sendResults(turn));
    this.follow();
  }

  /** Generates another answer to the same question and removes the later messages, which would not fit it. */
  #again(turn) {
    if (!this.ready()) return;
    this.#dropAfter(turn);
    this.#ask(turn);
  }

  #dropAfter(turn) {
    this.#turns = this.#turns.slice(0, this.#turns.indexOf(turn) + 1);
    this.answers = this.#turns.map(({ answer }) => answer);
    while (this.log.lastChild !== turn.answer.root) this.log.lastChild.remove();
  }

  #messages(until) {
    const messages = [];
    if (this.settings.params.system) messages.push({ role: "system", content: this.settings.params.system });
    for (const { said, answer } of this.#turns.slice(0, this.#turns.indexOf(until))) {
      if (!answer.text && !answer.parts.calls.length) continue; // failed before the first word: left out of the history
      if (said !== null) messages.push({ role: "user", content: said });
      messages.push(...answer.parts.history(answer.text));
    }
    if (until.said !== null) messages.push({ role: "user", content: until.said });
    return messages;
  }
}

export class Completion extends Pane {
  constructor(settings) {
    super("completion", settings);
  }

  async send(prompt) {
    const colours = this.settings.colours();
    const answer = new Answer({ colours, markup: false, masked: !!this.settings.params.schema });
    answer.root.classList.add("continued");
    answer.body.before(element("span", prompt, "given"));
    this.log.append(answer.root);
    const outcome = await this.stream(answer, "v1/completions", this.body({ prompt, ...(colours && { logprobs: 5 }) }));
    if (outcome === "failed") answer.addAction("Try again", () => this.ready() && this.send(prompt));
    if (answer.text) answer.addAction("Go on from here", () => this.#goOn(prompt + answer.text));
  }

  #goOn(text) {
    this.input.value = text;
    this.input.focus();
    this.input.scrollTop = this.input.scrollHeight;
    this.submit();
  }
}
