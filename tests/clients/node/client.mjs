// OpenAI's client for Node against a daemon: node client.mjs BASE_URL. Prints one JSON object; the test reads it.

import OpenAI from "openai";

const baseURL = process.argv[2];
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const ask = { model: "smol", messages: [{ role: "user", content: "What is the capital of Japan?" }], temperature: 0 };
const schema = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city", "days"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", parameters: schema, strict: true } }];
const chat = client.chat.completions;

async function refusal(fields) {
  try {
    await chat.create({ ...ask, ...fields });
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
  return null;
}

async function timeout() {
  try {
    await chat.create({ ...ask, max_tokens: 1900, ignore_eos: true }, { timeout: 300 });
  } catch (error) {
    return error.constructor.name;
  }
  return null;
}

async function leaveEarly() {
  const stream = await chat.create({ ...ask, max_tokens: 1900, ignore_eos: true, stream: true });
  for await (const chunk of stream) {
    stream.controller.abort();
    return chunk.object;
  }
}

async function untilIdle() {
  for (let tries = 0; tries < 10_000; tries++) {
    const { server_load } = await (await fetch(new URL("/load", baseURL))).json();
    if (server_load === 0) return true;
    await new Promise((resume) => setTimeout(resume, 10));
  }
  return false;
}

async function runTools() {
  const given = [];
  const run = { name: "weather", parameters: schema, parse: JSON.parse, function: (args) => given.push(args) && "sunny" };
  const runner = chat.runTools({
    ...ask,
    max_tokens: 200,
    tool_choice: { type: "function", function: { name: "weather" } },
    tools: [{ type: "function", function: run }],
  });
  await runner.finalMessage();
  return given;
}

const short = { ...ask, max_tokens: 12 };
const plain = await chat.create(short);
const { request_id } = await chat.create({ ...ask, max_tokens: 1 }).withResponse();
let streamed = "";
for await (const chunk of await chat.create({ ...short, stream: true })) streamed += chunk.choices[0].delta.content ?? "";
const helped = await chat.stream({ ...short, stream_options: { include_usage: true } }).finalChatCompletion();
const format = { type: "json_schema", json_schema: { name: "weather", schema, strict: true } };
const parsed = await chat.parse({ ...ask, max_tokens: 200, response_format: format });
const called = await chat.stream({ ...ask, max_tokens: 200, tools, tool_choice: "required", parallel_tool_calls: false }).finalChatCompletion();

console.log(
  JSON.stringify({
    plain: plain.choices[0].message.content,
    usage: plain.usage,
    request_id,
    streamed,
    helped: helped.choices[0].message.content,
    helped_usage: helped.usage,
    parsed: JSON.parse(parsed.choices[0].message.content),
    called: JSON.parse(called.choices[0].message.tool_calls[0].function.arguments),
    finish_reason: called.choices[0].finish_reason,
    run: await runTools(),
    bad: await refusal({ temperature: 9 }),
    unknown: await refusal({ model: "gpt-9" }),
    timeout: await timeout(),
    left: await leaveEarly(),
    idle: await untilIdle(),
  }),
);
