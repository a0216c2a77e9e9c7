// Wires the page: the key, the chats, the live view (live.js), the header.

import { ApiError, getJson, saveKey, savedKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, count } from "./dom.js";
import { Live } from "./live.js";
import { showModels } from "./settings.js";

const chats = [];
let numMade = 0;

function setStatus(state, text) {
  const status = byId("status");
  status.dataset.state = state;
  if (status.textContent !== text) {
    status.textContent = text; // a screen reader hears changes only
  }
}

// -- the key ----------------------------------------------------------------------

function askForKey(wasWrong) {
  const dialog = byId("key-dialog");
  const error = byId("key-error");
  error.hidden = !wasWrong;
  error.textContent = "The server does not know this key; check it and try again.";
  byId("key-button").hidden = false;
  setStatus("error", wasWrong ? "wrong key" : "no key");
  if (!dialog.open) {
    dialog.showModal();
  }
  byId("key-input").select();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey(byId("key-input").value.trim());
  connect();
});
byId("key-button").addEventListener("click", () => askForKey(false));

// -- the chats --------------------------------------------------------------------

function addChat() {
  numMade += 1;
  const chat = new Chat(numMade, { ask, close: removeChat });
  chats.push(chat);
  byId("chats").append(chat.element);
  showAskAll();
  return chat;
}

function removeChat(chat) {
  chats.splice(chats.indexOf(chat), 1);
  chat.element.remove();
  showAskAll();
  if (!chats.length) {
    addChat();
  }
}

/** With a single chat there is nothing to choose. */
function showAskAll() {
  byId("ask-all-label").hidden = chats.length < 2;
}

/** Send text that was typed in one chat to it, or to every idle chat. */
function ask(chat, text) {
  const asked = byId("ask-all").checked ? chats : [chat];
  for (const each of asked) {
    each.send(text);
  }
}

byId("new-chat").addEventListener("click", () => addChat().focus());
byId("settings-button").addEventListener("click", () => {
  byId("settings").hidden = !byId("settings").hidden;
});
// Kept true to the form, which also opens by itself to show a wrong value.
new MutationObserver(() => {
  byId("settings-button").setAttribute("aria-expanded", String(!byId("settings").hidden));
}).observe(byId("settings"), { attributeFilter: ["hidden"] });

// -- the engine -------------------------------------------------------------------

const live = new Live({
  onSnapshot({ sequences, requests, totals }) {
    const seqIds = new Map(sequences.map((sequence) => [sequence.tag, sequence.seq_id]));
    for (const chat of chats) {
      chat.paint(seqIds);
    }
    const isBusy = requests.running + requests.waiting + requests.preempted > 0;
    setStatus(isBusy ? "busy" : "idle", isBusy ? "computing" : "idle");
    const [answers, tokens] = [count(totals.finished), count(totals.generation_tokens)];
    byId("engine-note").textContent = `${answers} answers, ${tokens} tokens so far`;
  },
  onError(error) {
    if (error.status === 401) {
      askForKey(savedKey() !== "");
    } else {
      setStatus("error", error instanceof ApiError ? error.message : "The server cannot be reached");
    }
  },
});

async function connect() {
  try {
    const { data: models } = await getJson("v1/models");
    showModels(models);
    byId("model-name").textContent = models[0].id;
    byId("key-dialog").close();
    live.start();
  } catch (error) {
    live.onError(error);
    if (error.status !== 401) {
      setTimeout(connect, 2000);
    }
  }
}

addChat();
connect();
