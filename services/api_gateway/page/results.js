// Results of an answer's calls, which the user writes in the place of the tools.

import { actionButton, element } from "./text.js";

const ERROR = '{"error": "what went wrong"}';

export class ToolResults {
  #areas = []; // [id of the call, its text area]
  #sent = false;
  #button;

  /** `boxes`: [call, the element that shows it]. `send` gives the results to the model. */
  constructor(boxes, send) {
    for (const [call, box] of boxes) {
      const area = this.#field(call, box);
      area.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
      });
      this.#areas.push([call.id, area]);
    }
    this.#button = actionButton("", send);
    this.#button.title = "Ctrl Enter in a result";
    const row = element("div", "", "results");
    row.append(this.#button);
    boxes.at(-1)[1].after(row);
    this.#label();
  }

  get waiting() {
    return !this.#sent;
  }

  markSent() {
    this.#sent = true;
    this.#label();
  }

  /** Messages of the role tool. Before they are sent, a result that is empty is one that is not there yet. */
  messages() {
    const given = this.#areas.filter(([, area]) => this.#sent || area.value !== "");
    return given.map(([id, area]) => ({ role: "tool", tool_call_id: id, content: area.value }));
  }

  #label() {
    const what = this.#areas.length > 1 ? "results" : "result";
    this.#button.className = this.#sent ? "quiet" : "go";
    this.#button.textContent = this.#sent ? `Send ${what} again` : `Send ${what}`;
  }

  #field(call, box) {
    const area = element("textarea", "", "code");
    area.rows = 2;
    area.spellcheck = false;
    area.placeholder = "what the tool returns, as JSON or text";
    area.setAttribute("aria-label", `Result of ${call.name}`);
    const failed = actionButton("Error", () => {
      area.value = ERROR;
      area.focus();
      area.setSelectionRange(ERROR.indexOf("what"), ERROR.length - 2);
    });
    failed.title = "Fills in a result that says that the call failed";
    const row = element("div", "", "result");
    row.append(element("span", "Result"), failed, area);
    box.append(row);
    return area;
  }
}
