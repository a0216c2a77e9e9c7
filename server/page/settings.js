// The dialog with a conversation's settings: model, system prompt, sampling, tools.

import { DEFAULTS, parseTools } from "./conversation.js";
import { byId } from "./dom.js";

const dialog = byId("settings-dialog");
const form = byId("settings");
const { elements } = form;
let edited = null; // { settings, changed } of the conversation on show

/** Offer the served models. */
export function showModels(models) {
  elements.model.replaceChildren(...models.map((model) => new Option(model.id)));
  elements.max_tokens.max = models[0].max_model_len;
}

/** Edit a conversation's settings in place; `changed()` is called when the dialog closes. */
export function editSettings(settings, changed) {
  edited = { settings, changed };
  fill(settings);
  dialog.showModal();
}

function fill(settings) {
  for (const name of Object.keys(DEFAULTS)) {
    elements[name].value = settings[name] ?? "";
  }
  elements.model.value ||= elements.model.options[0]?.value ?? "";
  elements.tools.setCustomValidity("");
}

function read() {
  for (const [name, known] of Object.entries(DEFAULTS)) {
    const { value, valueAsNumber } = elements[name];
    edited.settings[name] = typeof known === "string" ? value : Number.isFinite(valueAsNumber) ? valueAsNumber : null;
  }
}

function checkTools() {
  try {
    parseTools(elements.tools.value);
    elements.tools.setCustomValidity("");
  } catch (error) {
    elements.tools.setCustomValidity(error.message);
  }
}

elements.tools.addEventListener("input", checkTools);
byId("settings-reset").addEventListener("click", () => fill({ ...DEFAULTS, model: elements.model.value }));
form.addEventListener("submit", (event) => {
  event.preventDefault(); // reached with valid fields only
  dialog.close();
});
dialog.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    event.preventDefault(); // as Done: it shows a field that is not valid
    form.requestSubmit();
  }
});
dialog.addEventListener("close", () => {
  if (edited && form.checkValidity()) {
    read();
    edited.changed();
  }
});
