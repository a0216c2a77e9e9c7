// A conversation as data: its messages, its settings, and the request that they make. Plain objects, so that the
// history can keep them; no DOM.

export const DEFAULTS = {
  model: "", // the server's first
  api: "chat",
  system: "",
  temperature: 0.3, // small models ramble at 1
  top_p: null,
  top_k: null,
  min_p: null,
  max_tokens: null, // what fits
  presence_penalty: null,
  frequency_penalty: null,
  repetition_penalty: null,
  seed: null,
  stop: "", // one a line
  reasoning_effort: "",
  tools: "", // JSON
};
const NUMBERS = Object.keys(DEFAULTS).filter((name) => typeof DEFAULTS[name] !== "string"); // null: the server's own
const COMPLETION_TOKENS = 256;
const MAX_TITLE = 60;

export function newConversation(settings = {}) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, settings: { ...DEFAULTS, ...settings }, messages: [] };
}

/** crypto.randomUUID is missing on plain HTTP. */
const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/** Return a message of the user; its `files` are { name, text }, pictures have an `image`, an address that holds them. */
export const userMessage = (content, files = []) => ({ role: "user", content, files });

/** Return a message's text with its files before it, each as a fenced block under its name. */
export function textOf({ content, files = [] }) {
  const blocks = files.filter(({ image }) => !image).map(({ name, text }) => {
    const longest = Math.max(2, ...Array.from(text.matchAll(/`{3,}/g), ([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...blocks, content].filter(Boolean).join("\n\n");
}

/** Return a message's pictures as parts of a request. */
const picturesOf = ({ files = [] }) =>
  files.filter(({ image }) => image).map(({ image }) => ({ type: "image_url", image_url: { url: image } }));

const partsOf = (content) => (typeof content === "string" ? [{ type: "text", text: content }] : content);

/** Return an answer before its first token. Its tool calls are { id, name, arguments, result }. */
export const emptyAnswer = () => ({ role: "assistant", content: "", reasoning: "", calls: [], facts: {}, error: "" });

/** Return the title that was given, or the beginning of the first message. */
export function titleOf({ title, messages }) {
  const text = title || (messages[0]?.content ?? "").trim().split("\n")[0] || (messages[0]?.files?.[0]?.name ?? "");
  return text.length > MAX_TITLE ? `${text.slice(0, MAX_TITLE - 1).trimEnd()}…` : text || "New chat";
}

/** Return the tools of the settings, [] for none. Throws a sentence if they are not valid. */
export function parseTools(text) {
  if (!text.trim()) {
    return [];
  }
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools are not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools) || !tools.every((tool) => tool?.type === "function" && tool.function?.name)) {
    throw new Error('Tools are a JSON list of {"type": "function", "function": {"name": ..., "parameters": ...}}.');
  }
  return tools;
}

/** Return the path and body that ask for the message at `index`; `continues` an answer that was cut. */
export function requestFor({ settings, messages }, index, { continues = false } = {}) {
  const body = settings.model ? { model: settings.model } : {};
  for (const name of NUMBERS.filter((each) => settings[each] !== null)) {
    body[name] = settings[name];
  }
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  Object.assign(body, stop.length ? { stop } : {});
  if (settings.api === "completion") {
    if (picturesOf(messages[index - 1]).length) {
      throw new Error("A completion takes no pictures; choose the chat API in the settings.");
    }
    const answered = continues ? messages[index].content : "";
    const bounded = { max_tokens: COMPLETION_TOKENS, ...body }; // the API's default is 16
    return { path: "v1/completions", body: { ...bounded, prompt: textOf(messages[index - 1]) + answered } };
  }
  const tools = parseTools(settings.tools);
  Object.assign(body, tools.length ? { tools } : {});
  Object.assign(body, settings.reasoning_effort ? { reasoning_effort: settings.reasoning_effort } : {});
  Object.assign(body, continues ? { continue_final_message: true, add_generation_prompt: false } : {});
  const system = settings.system.trim() ? [{ role: "system", content: settings.system.trim() }] : [];
  const turns = messages.slice(0, continues ? index + 1 : index).flatMap(forRequest).reduce(joinQuestions, []);
  return { path: "v1/chat/completions", body: { ...body, messages: [...system, ...turns] } };
}

/** Join questions between which an answer failed: many chat templates want roles to alternate. */
function joinQuestions(turns, turn) {
  const last = turns.at(-1);
  if (turn.role === "user" && last?.role === "user") {
    const isText = typeof last.content === "string" && typeof turn.content === "string";
    const content = isText ? `${last.content}\n\n${turn.content}` : [...partsOf(last.content), ...partsOf(turn.content)];
    return [...turns.slice(0, -1), { role: "user", content }];
  }
  turns.push(turn);
  return turns;
}

/** Return a message as the API has it, with the results of its tool calls. */
function forRequest(message) {
  const { role, calls = [], reasoning } = message;
  const content = textOf(message);
  const pictures = picturesOf(message);
  if (pictures.length) {
    return [{ role, content: [...pictures, ...(content ? partsOf(content) : [])] }];
  }
  if (role === "user" || !calls.length) {
    return content ? [{ role, content }] : []; // an answer that failed says nothing
  }
  const tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  const results = calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? "" }));
  const thoughts = reasoning ? { reasoning_content: reasoning } : {}; // some templates show the thoughts before a call
  return [{ role, content, ...thoughts, tool_calls }, ...results];
}
