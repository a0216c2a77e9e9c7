// The history: conversations in this browser's IndexedDB, with a small index for the list. Bounded, and every failure
// is a StoreError with a sentence for the user. Where the browser gives no storage, nothing is kept.

import { titleOf } from "./conversation.js";

const MAX_CONVERSATIONS = 1000;
const MAX_CHARS = 32_000_000; // of one conversation as JSON, with its pictures

class StoreError extends Error {}

const result = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const finished = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error ?? new Error("the write was given up"));
  });

const sentence = (error) => error.name === "QuotaExceededError"
  ? "The browser's storage is full; export and delete some chats, and this one is kept again."
  : `This browser cannot keep the history (${error.message}).`;

class Store {
  #database = null; // a promise

  /** Return the rows of all conversations, latest first. */
  async list() {
    const rows = await this.#do("readonly", ([index]) => result(index.getAll()));
    return rows.sort((a, b) => b.updated - a.updated);
  }

  load(id) {
    return this.#do("readonly", ([, bodies]) => result(bodies.get(id)));
  }

  loadAll() {
    return this.#do("readonly", ([, bodies]) => result(bodies.getAll()));
  }

  /** Keep a conversation. */
  async save(conversation) {
    const kept = structuredClone(conversation);
    if (JSON.stringify(kept).length > MAX_CHARS) {
      throw new StoreError("This chat is too long for the history; export it, and go on in a new one.");
    }
    await this.#do("readwrite", async ([index, bodies]) => {
      const [number, known] = await Promise.all([result(index.count()), result(index.getKey(kept.id))]);
      if (number >= MAX_CONVERSATIONS && known === undefined) {
        throw new StoreError(`The history is full (${MAX_CONVERSATIONS} chats); export and delete some.`);
      }
      index.put({ id: kept.id, title: titleOf(kept), updated: kept.updated }); // what the list shows
      bodies.put(kept);
    });
  }

  remove(id) {
    return this.#do("readwrite", ([index, bodies]) => [index, bodies].forEach((each) => each.delete(id)));
  }

  async #do(mode, work) {
    try {
      this.#database ??= this.#open();
      const transaction = (await this.#database).transaction(["index", "conversations"], mode);
      const done = finished(transaction);
      done.catch(() => {}); // the work's error says more
      const found = await work(["index", "conversations"].map((name) => transaction.objectStore(name)));
      await done;
      return found;
    } catch (error) {
      throw error instanceof StoreError ? error : new StoreError(sentence(error));
    }
  }

  #open() {
    const request = indexedDB.open("quire", 1);
    request.onupgradeneeded = () => {
      for (const name of ["index", "conversations"]) {
        request.result.createObjectStore(name, { keyPath: "id" });
      }
    };
    return result(request);
  }
}

export const store = new Store();
