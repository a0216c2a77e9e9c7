// The dialog that says how programs use this server: its address, a first request, its endpoints.

import { getJson, savedKey } from "./api.js";
import { codeBlock } from "./code.js";
import { byId, el } from "./dom.js";

function python(base, model) {
  const key = savedKey() ? 'os.environ["QUIRE_API_KEY"]' : '"none"';
  return [
    ...(savedKey() ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${base}", api_key=${key})`,
    "answer = client.chat.completions.create(",
    `    model="${model}",`,
    '    messages=[{"role": "user", "content": "What is photosynthesis?"}],',
    ")",
    "print(answer.choices[0].message.content)",
  ].join("\n");
}

/** Show the dialog. */
export async function showApi(model) {
  const base = new URL("v1", document.baseURI).href;
  byId("api-address").textContent = base;
  byId("api-example").replaceChildren(codeBlock("python", python(base, model || "MODEL")));
  byId("api-dialog").showModal();
  try {
    const { paths } = await getJson("openapi.json");
    const rows = Object.entries(paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, { summary = "", description = summary }]) =>
        el("li", {}, el("code", { textContent: `${method.toUpperCase()} ${path}` }), " ", el("span", { textContent: description.split("\n")[0] }))));
    byId("api-endpoints").replaceChildren(...rows);
  } catch (error) {
    byId("api-endpoints").replaceChildren(el("li", { textContent: error.message }));
  }
}

byId("api-close").addEventListener("click", () => byId("api-dialog").close());
