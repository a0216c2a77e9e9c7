// The last requests, newest first: who sent them, what became of them, and where their time went.

import { getJson } from "./api.js";
import { byId, count, duration, el } from "./dom.js";

const POLL_MS = 1000;
const panel = byId("requests-panel");
let shown = ""; // the list as JSON: one that has not changed keeps its elements, and what is selected in them

const ms = (value) => duration(value / 1000);

function facts({ usage, metrics, seconds }) {
  const found = [];
  if (usage) {
    const cached = usage.prompt_tokens_details.cached_tokens;
    const ofThem = cached ? ` (${count(cached)} cached)` : "";
    found.push(`${count(usage.prompt_tokens)}${ofThem} + ${count(usage.completion_tokens)} tokens`);
  }
  if (metrics) {
    found.push(`queued ${ms(metrics.queue_time_ms)}`, `TTFT ${ms(metrics.time_to_first_token_ms)}`);
    found.push(`TPOT ${duration(metrics.mean_itl_ms === null ? NaN : metrics.mean_itl_ms / 1000)}`);
  }
  found.push(...(seconds === null ? [] : [`total ${duration(seconds)}`]));
  return found.map((fact) => fact.replaceAll(" ", "\u00a0")).join("  ·  ");
}

function card(request) {
  const { status, method, path, created, error, prefix, ignored_fields: ignored } = request;
  const { tenant, address, user_agent: agent, id } = request;
  const title = status === null ? "open" : `${status}`;
  const time = new Date(created * 1000);
  const client = [tenant, address, agent].filter(Boolean).join("  ·  ");
  return el("li", { className: status >= 400 || error ? "request is-refused" : "request" },
    el("div", { className: "row" },
      el("span", { className: "status-code", textContent: title }),
      el("code", { textContent: `${method} ${path}` }),
      el("span", { className: "space" }),
      el("time", { className: "note", textContent: time.toLocaleTimeString(), dateTime: time.toISOString(), title: `request ${id}…` })),
    ...(error ? [el("p", { className: "error", textContent: `${error.code}: ${error.message}` })] : []),
    ...(ignored.length ? [el("p", { textContent: `without effect: ${ignored.join(", ")}` })] : []),
    el("p", { textContent: facts(request) }),
    ...(prefix ? [el("p", { className: "note", textContent: `Prefix cache: ${prefix.message}` })] : []),
    el("p", { className: "note agent", textContent: client, title: client }));
}

async function update() {
  if (document.hidden || !panel.checkVisibility()) {
    return;
  }
  try {
    const { data } = await getJson("v1/requests");
    if (shown !== JSON.stringify(data)) {
      shown = JSON.stringify(data);
      byId("requests").replaceChildren(...data.map(card));
    }
    byId("requests-note").textContent = data.length ? `the last ${data.length}` : "none yet";
  } catch (error) {
    byId("requests-note").textContent = error.message;
  }
}

/** Show the requests while their panel is in sight. */
export function startRequests() {
  setInterval(update, POLL_MS);
  new ResizeObserver(update).observe(panel); // which has a size once it is shown
}
