// The dialogs of a chat: its settings and its title.

import { DEFAULTS, parseTools } from "./conversation.js";
import { byId, keyOf, onSubmit } from "./dom.js";

/** Ask for a chat's title, beginning with the present one; `done(title)` gets it. */
export function askName(title, done) {
  const [box, input] = [byId("rename-dialog"), byId("rename-input")];
  input.value = title;
  box.returnValue = "";
  byId("rename-cancel").onclick = () => box.close();
  box.onclose = () => box.returnValue && done(input.value.trim());
  box.showModal();
  input.select();
}

// -- the settings of a chat -----------------------------------------------------------

const dialog = byId("settings-dialog");
const form = byId("settings");
const { elements } = form;
let edited = null; // { settings, changed } of the conversation on show

/** Offer the served models. */
export function showModels(models) {
  elements.model.replaceChildren(...models.map((model) => new Option(model.id)));
  elements.max_tokens.max = models[0].max_model_len ?? "";
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

elements.tools.addEventListener("input", () => {
  try {
    parseTools(elements.tools.value);
    elements.tools.setCustomValidity("");
  } catch (error) {
    elements.tools.setCustomValidity(error.message);
  }
});
byId("settings-reset").addEventListener("click", () => fill({ ...DEFAULTS, model: elements.model.value }));
onSubmit(form, () => dialog.close()); // reached with valid fields only
dialog.addEventListener("keydown", (event) => {
  if (keyOf(event) === "Escape") {
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
