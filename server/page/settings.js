// The settings form: what every chat sends along with its question.

const form = document.getElementById("settings");

form.addEventListener("submit", (event) => event.preventDefault());

/** Offer the served models; the first is chosen. */
export function showModels(models) {
  form.elements.model.replaceChildren(...models.map((model) => new Option(model.id)));
  form.elements.max_tokens.max = models[0].max_model_len;
}

/** The request fields that are set. Empty ones are left out, so that the server's default holds. */
export function sampling() {
  const model = form.elements.model.value; // empty until the list of models has arrived
  const fields = model ? { model } : {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const value = form.elements[name].valueAsNumber;
    if (!Number.isNaN(value)) {
      fields[name] = value;
    }
  }
  return fields;
}

export const systemPrompt = () => form.elements.system.value.trim();

/** Return whether all fields are valid; otherwise the browser shows and focuses the first that is not. */
export function isValid() {
  form.hidden &&= form.checkValidity();
  return form.reportValidity();
}
