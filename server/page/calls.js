// A tool call on the page: its name, its arguments, and a field for the result that the model is to get.

import { el, onSubmit } from "./dom.js";

/** Return the arguments with indentation, where they are JSON already. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export class CallCard {
  #isComplete = false;

  /** `onResult` is called when the call has a result. */
  constructor(call, onResult) {
    this.call = call;
    this.code = el("code");
    this.result = el("textarea", { rows: 2, placeholder: "The result, as the tool would return it" });
    const label = el("label", { textContent: "Result " }, this.result);
    const send = el("button", { type: "submit", textContent: "Use this result" });
    this.form = el("form", { className: "result", hidden: true }, label, send);
    onSubmit(this.form, () => {
      call.result = this.result.value;
      this.update();
      onResult();
    });
    this.given = el("pre", { className: "given", hidden: true, tabIndex: 0, attrs: { "aria-label": "Result" } });
    const title = el("p", { className: "call-name" }, "Tool call ", el("code", { textContent: call.name }));
    const args = el("pre", { tabIndex: 0, attrs: { "aria-label": `Arguments of ${call.name}` } }, this.code);
    this.element = el("section", { className: "call" }, title, args, this.form, this.given);
  }

  update() {
    const { arguments: text, result } = this.call;
    this.code.textContent = this.#isComplete ? pretty(text) : text;
    this.given.hidden = result === null;
    this.given.textContent = result ?? "";
    this.form.hidden ||= result !== null;
  }

  /** The arguments are complete: indent them, and ask for the result. */
  finish() {
    this.#isComplete = true;
    this.form.hidden = false;
    this.update();
  }
}
