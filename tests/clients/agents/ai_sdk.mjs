// Two turns with AI SDK and its defaults: the second one refers to the answer of the first. Prints both, and what was sent.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText } from "ai";

const sent = [];
const quire = createOpenAI({
  baseURL: process.argv[2],
  apiKey: "none",
  fetch: (url, options) => {
    sent.push(JSON.parse(options.body));
    return fetch(url, options);
  },
});
const model = quire("smol");
const question = { role: "user", content: "What is the capital of Japan?" };
const first = await generateText({ model, messages: [question], temperature: 0 });
const messages = [question, ...first.response.messages, { role: "user", content: "And of France?" }];
const second = await generateText({ model, messages, temperature: 0, maxOutputTokens: 40 });
console.log(JSON.stringify({ first: first.text, second: second.text, kinds: sent[1].input.map((item) => item.type ?? item.role) }));
