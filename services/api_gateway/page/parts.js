// What an answer has besides its text: reasoning, folded and dimmed, and calls of tools with their arguments.

import { ToolResults } from "./results.js";
import { appendText, element } from "./text.js";
import { TokenText } from "./tokens.js";

export class AnswerParts {
  calls = []; // {id, type, name, input, box}; `input` is a TokenText
  results = null; // there once the answer is complete and has calls
  #body;
  #reasoning = null; // a TokenText
  #tokens;

  /** Reasoning goes before `body`, calls behind it. `tokens`: the answer's tokens that no text has claimed yet. */
  constructor(body, tokens) {
    this.#body = body;
    this.#tokens = tokens;
  }

  get any() {
    return this.#reasoning !== null || this.calls.length > 0;
  }

  /** Reads a chat answer's delta. True if it holds a piece of a part. */
  take(delta) {
    const reasoning = delta?.reasoning ?? delta?.reasoning_content ?? "";
    if (reasoning) {
      this.#reasoning ??= this.#details();
      this.#reasoning.push(reasoning, this.#tokens);
    }
    for (const piece of delta?.tool_calls ?? []) {
      const call = (this.calls[piece.index] ??= this.#call(piece));
      call.name += piece.function?.name ?? piece.custom?.name ?? "";
      call.input.push(piece.function?.arguments ?? piece.custom?.input ?? "", this.#tokens);
    }
    return reasoning !== "" || !!delta?.tool_calls?.length;
  }

  /** The messages with these calls and their results, as a later request sends them back. */
  history(content) {
    if (!this.calls.length) return [{ role: "assistant", content }];
    const calls = this.calls.map(({ id, type, name, input: { text } }) => (
      type === "custom" ? { id, type, custom: { name, input: text } } : { id, type, function: { name, arguments: text } }
    ));
    // Models that reason between calls need what they thought before the results.
    const reasoning = this.#reasoning && { reasoning_content: this.#reasoning.text };
    return [{ role: "assistant", content: content || null, ...reasoning, tool_calls: calls }, ...(this.results?.messages() ?? [])];
  }

  askResults(send) {
    if (this.calls.length) this.results = new ToolResults(this.calls.map((call) => [call, call.box]), send);
  }

  draw(colours) {
    this.#reasoning?.draw(colours);
    for (const { name, input, box } of this.calls) {
      appendText(box.firstChild, name);
      input.draw(colours);
    }
  }

  #details() {
    const details = element("details", "", "reasoning");
    const text = element("div");
    details.append(element("summary", "Reasoning"), text);
    this.#body.before(details);
    return new TokenText(text);
  }

  #call({ id, type }) {
    const box = element("div", "", "call");
    const input = element("pre");
    box.setAttribute("aria-label", "Call of a tool");
    box.setAttribute("role", "group");
    box.append(element("b"), input);
    (this.calls.at(-1)?.box ?? this.#body).after(box);
    return { id, type: type ?? "function", name: "", input: new TokenText(input), box };
  }
}
