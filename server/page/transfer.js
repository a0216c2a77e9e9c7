// Conversations as files: JSON that can be imported again, and Markdown to read. Imported data is untrusted: only
// fields and types that are known pass.

import { emptyAnswer, newConversation, textOf, titleOf, userMessage } from "./conversation.js";
import { el } from "./dom.js";

const FORMAT = "quire-chats";
const MAX_FILE = 100_000_000; // bytes
const USER = userMessage("", [{ name: "", text: "", image: "" }]);
const ASSISTANT = { ...emptyAnswer(), calls: [{ id: "", name: "", arguments: "", result: "" }] };

/** Offer conversations as a file of JSON, which readFile takes. */
export function exportChats(conversations, name = "quire-chats.json") {
  download(name, JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 2), "application/json");
}

/** Offer a conversation as Markdown. */
export const exportChat = (conversation) => download(fileName(conversation, "md"), toMarkdown(conversation), "text/markdown");

function toMarkdown(conversation) {
  const parts = [`# ${titleOf(conversation)}`];
  if (conversation.settings.system) {
    parts.push("## System", conversation.settings.system);
  }
  for (const message of conversation.messages) {
    parts.push(message.role === "user" ? "## User" : "## Assistant");
    if (message.reasoning) {
      parts.push(`<details><summary>Reasoning</summary>\n\n${message.reasoning}\n\n</details>`);
    }
    parts.push(...(message.files ?? []).filter(({ image }) => image).map(({ name }) => `Picture ${name}`), textOf(message));
    for (const { name, arguments: args, result } of message.calls ?? []) {
      parts.push(`Tool call \`${name}\`:\n\n\`\`\`json\n${args}\n\`\`\``);
      parts.push(...(result === null ? [] : [`Result:\n\n\`\`\`\n${result}\n\`\`\``]));
    }
  }
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}

/** Offer a text as a file. */
function download(name, content, type) {
  const href = URL.createObjectURL(new Blob([content], { type }));
  const anchor = el("a", { href, download: name });
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

/** Return a name for a conversation's file. */
export const fileName = (conversation, ending) =>
  `${titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chat"}.${ending}`;

/** Let the user choose a file; return the conversations in it. Throws a sentence. */
export async function readFile(file) {
  if (file.size > MAX_FILE) {
    throw new Error("The file is larger than 100 MB, too large for the history.");
  }
  let data;
  try {
    data = JSON.parse(await file.text());
  } catch {
    throw new Error("The file is not JSON; choose one that was exported here.");
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) {
    throw new Error("The file has no chats of Quire; choose one that was exported here.");
  }
  return data.conversations.map(checked);
}

/** Return a conversation with the known fields of another, under a new id. */
function checked(given) {
  const { id, ...known } = newConversation();
  const messages = Array.isArray(given?.messages) ? given.messages : [];
  return { ...like(known, given), id, messages: messages.map((each) => (each?.role === "assistant" ? checkedAnswer(each) : like(USER, each))) };
}

function checkedAnswer(given) {
  const answer = like(ASSISTANT, given);
  answer.calls.forEach((call, index) => {
    call.result = typeof given.calls[index]?.result === "string" ? call.result : null;
  });
  const facts = Object.entries(given.facts ?? {}).filter(([, value]) => Number.isFinite(value) || typeof value === "string");
  return { ...answer, facts: Object.fromEntries(facts) };
}

/** Return what a value has of the fields and the types of another; null stands for a number that may be absent. */
function like(known, given) {
  if (Array.isArray(known)) {
    return (Array.isArray(given) ? given : []).map((each) => like(known[0], each));
  }
  if (known && typeof known === "object") {
    return Object.fromEntries(Object.entries(known).map(([name, value]) => [name, like(value, given?.[name])]));
  }
  const isText = typeof known === "string";
  return (isText ? typeof given === "string" : given === null || Number.isFinite(given)) ? given : known;
}
