// Conversations as files: JSON that can be imported again, and Markdown to read. Imported data is untrusted: only
// fields and types that are known pass.

import { DEFAULTS, newConversation, textOf, titleOf } from "./conversation.js";
import { el } from "./dom.js";

const FORMAT = "quire-chats";
const MAX_FILE = 100_000_000; // bytes
const text = (value) => (typeof value === "string" ? value : "");

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
    parts.push(textOf(message));
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
  const conversation = newConversation();
  const settings = Object.keys(DEFAULTS).map((name) => {
    const [value, known] = [given?.settings?.[name], DEFAULTS[name]];
    const isValid = typeof known === "string" ? typeof value === "string" : value === null || Number.isFinite(value);
    return [name, isValid ? value : known];
  });
  conversation.title = text(given?.title);
  conversation.settings = Object.fromEntries(settings);
  conversation.updated = Number.isFinite(given?.updated) ? given.updated : conversation.updated;
  conversation.messages = (Array.isArray(given?.messages) ? given.messages : []).map(checkedMessage);
  return conversation;
}

function checkedMessage(given) {
  if (given?.role !== "assistant") {
    const files = (Array.isArray(given?.files) ? given.files : []).map((file) => ({ name: text(file?.name), text: text(file?.text) }));
    return { role: "user", content: text(given?.content), files };
  }
  const calls = (Array.isArray(given.calls) ? given.calls : []).map((call) => ({
    id: text(call?.id),
    name: text(call?.name),
    arguments: text(call?.arguments),
    result: typeof call?.result === "string" ? call.result : null,
  }));
  const facts = Object.entries(given.facts ?? {}).filter(([, value]) => Number.isFinite(value) || typeof value === "string");
  const { content, reasoning, error } = given;
  return {
    role: "assistant",
    content: text(content),
    reasoning: text(reasoning),
    calls,
    facts: Object.fromEntries(facts),
    error: text(error),
  };
}
