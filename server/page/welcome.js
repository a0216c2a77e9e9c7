// An empty chat: a greeting, and prompts that a small model answers well.

import { button, byId, el } from "./dom.js";

const PROMPTS = {
  chat: [
    "What is photosynthesis?",
    "Give me three tips for sleeping well.",
    "Write a Python function that adds two numbers.",
    "Write a short poem about the sea.",
  ],
  completion: ["Once upon a time", "The recipe begins with", "def fibonacci(n):"],
};

/** Return the element; `choose(text)` is called with a prompt that was clicked. */
export function welcome(isChat, choose) {
  const name = byId("model-name").textContent;
  const heading = isChat ? `Ask ${name || "the model"}` : `Let ${name || "the model"} go on`;
  const hint = isChat
    ? "Chats stay in this browser. Answers stream from this server, and its memory is drawn as they do."
    : "The model continues your text as it is, without a chat template.";
  const chips = PROMPTS[isChat ? "chat" : "completion"].map((text) =>
    button(text, { className: "chip", onclick: () => choose(text) }),
  );
  return el("div", { className: "welcome" },
    el("p", { className: "greeting", textContent: heading }),
    el("p", { className: "note", textContent: hint }),
    el("div", { className: "chips" }, ...chips));
}
