// Wires the page: the key, the chats (desk.js), the live view (live.js), the header.

import { ApiError, getJson, saveKey, savedKey } from "./api.js";
import { Desk } from "./desk.js";
import { showModels } from "./dialogs.js";
import { byId, count, onSubmit } from "./dom.js";
import { showEngine } from "./layout.js";
import { Live } from "./live.js";
import { notify } from "./notices.js";
import { startRequests } from "./requests.js";

const RETRY_MS = 2000;
const desk = new Desk((tag) => { // which shows the journey of an answer
  showEngine();
  if (!live.journeys.showOf(tag)) {
    notify("The journey of this answer is not known: journeys are recorded while the page is open.");
  }
});

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

onSubmit(byId("key-form"), () => {
  saveKey(byId("key-input").value.trim());
  connect();
});
byId("key-button").addEventListener("click", () => askForKey(false));

// -- the engine -------------------------------------------------------------------

const live = new Live({
  onSnapshot({ sequences, requests, totals }) {
    const seqIds = new Map(sequences.map((sequence) => [sequence.tag, sequence.seq_id]));
    for (const chat of desk.chats) {
      chat.paint(seqIds);
    }
    const isBusy = requests.running + requests.waiting + requests.preempted > 0;
    setStatus(isBusy ? "busy" : "idle", isBusy ? "computing" : "idle");
    byId("engine-note").textContent = `answers so far: ${count(totals.finished)}, tokens: ${count(totals.generation_tokens)}`;
  },
  onError(error) {
    if (error.status === 401) {
      askForKey(savedKey() !== "");
    } else if (error.code === "model_not_loaded" || error.code === "model_loading") {
      setStatus("waiting", error.code === "model_loading" ? "loading" : "not loaded");
    } else {
      setStatus("error", error instanceof ApiError ? error.message : "The server cannot be reached");
    }
  },
});

const watched = byId("engine-model");
watched.addEventListener("change", () => live.watch(watched.value));
watched.addEventListener("focus", async () => showStates((await getJson("v1/models")).data));

/** Offer models, with their states, for the view of the engine. */
function showStates(models) {
  while (watched.options.length < models.length) {
    watched.add(new Option());
  }
  models.forEach(({ id, status }, index) => Object.assign(watched.options[index], { value: id, text: `${id}: ${status.value}` }));
  watched.hidden = models.length < 2;
}

async function connect() {
  try {
    const { data: models } = await getJson("v1/models");
    showModels(models);
    showStates(models);
    byId("model-name").textContent = models[0].id;
    desk.setModels(models);
    byId("key-dialog").close();
    live.start();
  } catch (error) {
    live.onError(error);
    if (error.status !== 401) {
      setTimeout(connect, RETRY_MS);
    }
  }
}

// A file that is dropped beside a chat must not replace the page.
for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
}

startRequests();
await desk.start();
connect();
