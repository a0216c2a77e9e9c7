// The daemon's API as this page uses it: the key, JSON, server-sent events, and the curl command that does the same.

const KEY = "quire.api_key"; // in sessionStorage: this tab's, until it is closed

export const savedKey = () => sessionStorage.getItem(KEY) ?? "";
export const saveKey = (key) => sessionStorage.setItem(KEY, key);

/** An answer that is not a success, or an event that reports an error; `message` is the server's sentence. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answered ${status}.`);
    this.status = status;
    this.code = error?.code ?? "";
  }
}

async function send(path, options) {
  const headers = { ...options.headers };
  if (savedKey()) {
    const bytes = new TextEncoder().encode(savedKey()); // headers hold bytes; a key may hold any character
    headers.authorization = `Bearer ${String.fromCharCode(...bytes)}`;
  }
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new ApiError(response.status, body.error);
  }
  return response;
}

export async function getJson(path, signal) {
  return (await send(path, { signal, cache: "no-store" })).json();
}

/** POST a body and yield each event's JSON as it arrives. Aborting `signal` ends the request at the server too. */
export async function* streamJson(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const response = await send(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") {
      return;
    }
    const event = JSON.parse(data);
    if (event.error) {
      throw new ApiError(response.status, event.error);
    }
    yield event;
  }
  throw new TypeError("the stream ended before its last event"); // as fetch reports a lost connection
}

/** The data of each server-sent event of a byte stream; comments are passed over. */
export async function* eventData(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) {
        return;
      }
      const events = (rest + value).split("\n\n");
      rest = events.pop(); // not complete yet
      for (const event of events) {
        const lines = event.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) {
          yield lines.map((line) => line.slice(5).trimStart()).join("\n");
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // an abort has closed it already
  }
}

/** The shell command that asks the same. The key itself is never in it. */
export function curlCommand(path, body) {
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const lines = [`curl -N ${quote(new URL(path, document.baseURI).href)}`, `-H 'Content-Type: application/json'`];
  if (savedKey()) {
    lines.push(`-H "Authorization: Bearer $QUIRE_API_KEY"`);
  }
  lines.push(`-d ${quote(JSON.stringify(body))}`);
  return lines.join(" \\\n  ");
}
