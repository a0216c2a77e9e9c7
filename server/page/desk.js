// The chats on the screen and the history behind them: opens, keeps, renames, deletes and transfers conversations.

import { Chat } from "./chat.js";
import { saveDraft } from "./composer.js";
import { newConversation, titleOf } from "./conversation.js";
import { askName, editSettings } from "./dialogs.js";
import { byId } from "./dom.js";
import { showChats } from "./layout.js";
import { menu } from "./menu.js";
import { notify } from "./notices.js";
import { Session } from "./session.js";
import { Sidebar } from "./sidebar.js";
import { store } from "./store.js";
import { exportChat, exportChats, fileName, readFile } from "./transfer.js";

const OPEN = "quire.open"; // in sessionStorage: the ids of the chats on the screen
const MAX_CHATS = 4;

export class Desk {
  chats = [];
  #sessions = new Map(); // by id: those on the screen, and those that are answering
  #rows = [];
  #models = [];

  /** `showJourney(tag)` shows the way of an answer's sequence. */
  constructor(showJourney) {
    this.showJourney = showJourney;
    this.sidebar = new Sidebar({
      open: (id) => this.open(id),
      rename: (id, title) => askName(title, (name) => this.#rename(id, name)),
      remove: (id, title) => this.#remove(id, title),
    });
    byId("new-chat").addEventListener("click", () => this.#new());
    byId("export-all").addEventListener("click", () => this.#try(async () => exportChats(await store.loadAll())));
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.#import(event.target));
    document.addEventListener("visibilitychange", () => this.#visibilityChanged());
  }

  /** Show what was on the screen before a reload, or a new chat. */
  async start() {
    const ids = JSON.parse(sessionStorage.getItem(OPEN) ?? "[]");
    const found = await Promise.all(ids.map((id) => this.#try(() => store.load(id))));
    const shown = ids.map((id, index) => found[index] ?? { ...newConversation(), id }); // which may have a draft
    (shown.length ? shown : [newConversation()]).forEach((conversation) => this.#add(this.#session(conversation)));
    await this.#list();
  }

  setModels(models) {
    this.#models = models;
    this.chats.forEach((chat) => chat.setModels(models));
  }

  /** Show a kept conversation in the first chat, unless it is on the screen. */
  async open(id) {
    const shown = this.chats.find((chat) => chat.session.conversation.id === id);
    const conversation = shown ? null : (this.#sessions.get(id)?.conversation ?? (await this.#try(() => store.load(id))));
    if (conversation) {
      this.#show(this.chats[0], this.#session(conversation));
    }
    showChats();
    (shown ?? this.chats[0]).focus();
  }

  /** Keep answers before a phone ends the hidden page; look for what another tab has written. */
  #visibilityChanged() {
    if (!document.hidden) {
      this.#list();
      return;
    }
    for (const session of this.#sessions.values()) {
      if (session.isBusy) {
        this.#save(session.conversation);
      }
    }
  }

  // -- the chats --------------------------------------------------------------------

  #session(conversation) {
    const { id } = conversation;
    if (!this.#sessions.has(id)) {
      this.#sessions.set(id, new Session(conversation, (changed) => this.#save(changed)));
    }
    return this.#sessions.get(id);
  }

  #new() {
    const [first] = this.chats;
    if (first.session.messages.length) {
      const { model, api } = first.session.conversation.settings;
      this.#show(first, this.#session(newConversation({ model, api })));
    }
    showChats();
    first.focus();
  }

  #add(session) {
    const chat = new Chat({
      ask: (from, text, files) => this.#ask(from, text, files),
      close: (closed) => this.#close(closed),
      choose: (chosen, model) => {
        chosen.session.conversation.settings.model = model;
        this.#keepSettings(chosen);
      },
      settings: ({ session: { conversation } }) => editSettings(conversation.settings, () => this.#keepSettings(chat)),
      menu: (shown) => menu("More", () => this.#menu(shown)),
      showJourney: this.showJourney,
    });
    this.chats.push(chat);
    byId("chats").append(chat.element);
    chat.open(session);
    chat.setModels(this.#models);
    this.#showNumber();
    return chat;
  }

  #show(chat, session) {
    const { session: left } = chat;
    chat.open(session);
    if (!left.isBusy) {
      this.#sessions.delete(left.conversation.id);
    }
    this.#showNumber();
  }

  #close(chat) {
    chat.session.stop();
    chat.session.view = null;
    this.#sessions.delete(chat.session.conversation.id);
    this.chats.splice(this.chats.indexOf(chat), 1);
    chat.element.remove();
    this.#showNumber();
  }

  #showNumber() {
    const isOne = this.chats.length === 1;
    byId("ask-all-label").hidden = isOne;
    this.chats.forEach((chat) => {
      chat.leave.hidden = isOne;
    });
    byId("chats").dataset.number = this.chats.length;
    sessionStorage.setItem(OPEN, JSON.stringify(this.chats.map(({ session }) => session.conversation.id)));
    this.#showList();
  }

  /** Send text that was typed in one chat to it, or to every idle chat. */
  #ask(from, text, files) {
    const isAll = this.chats.length > 1 && byId("ask-all").checked;
    for (const chat of isAll ? this.chats : [from]) {
      if (!chat.session.isBusy) {
        chat.session.send(text, files);
      }
    }
  }

  #menu(chat) {
    const { conversation } = chat.session;
    const { id } = conversation;
    const title = titleOf(conversation);
    const beside = () => this.#add(this.#session(newConversation(conversation.settings))).focus();
    const hasText = conversation.messages.length > 0;
    return [
      ...(this.chats.length < MAX_CHATS ? [["Add a chat beside it", beside]] : []),
      ...(hasText ? [["Rename", () => askName(title, (name) => this.#rename(id, name))]] : []),
      ...(hasText ? [["Export as Markdown", () => exportChat(conversation)]] : []),
      ...(hasText ? [["Export as JSON", () => exportChats([conversation], fileName(conversation, "json"))]] : []),
      ["Delete", () => this.#remove(id, title)],
    ];
  }

  // -- the history ------------------------------------------------------------------

  /** Do something with the store; tell the user if it fails. */
  async #try(work) {
    try {
      return await work();
    } catch (error) {
      notify(error.message, { isError: true });
      return null;
    }
  }

  async #list() {
    this.#rows = (await this.#try(() => store.list())) ?? [];
    this.#showList();
  }

  #showList() {
    const busy = [...this.#sessions.values()].filter((session) => session.isBusy);
    const ids = (sessions) => new Set(sessions.map(({ conversation }) => conversation.id));
    this.sidebar.show(this.#rows, ids(this.chats.map(({ session }) => session)), ids(busy));
  }

  async #save(conversation) {
    const session = this.#sessions.get(conversation.id);
    if (session && !session.view && !session.isBusy) {
      this.#sessions.delete(conversation.id);
    }
    await this.#try(() => store.save(conversation));
    await this.#list();
  }

  #keepSettings(chat) {
    chat.showSettings();
    if (chat.session.messages.length) {
      this.#save(chat.session.conversation);
    }
  }

  async #rename(id, title) {
    const conversation = this.#sessions.get(id)?.conversation ?? (await this.#try(() => store.load(id)));
    if (conversation) {
      conversation.title = title;
      this.#sessions.get(id)?.view?.sync();
      await this.#save(conversation);
    }
  }

  async #remove(id, title) {
    const session = this.#sessions.get(id);
    const conversation = session?.conversation ?? (await this.#try(() => store.load(id)));
    session?.forget();
    this.#sessions.delete(id);
    saveDraft(id, "");
    const shown = this.chats.find((chat) => chat.session === session);
    if (shown) {
      this.#show(shown, this.#session(newConversation()));
    }
    await this.#try(() => store.remove(id));
    await this.#list();
    if (conversation?.messages.length) {
      notify(`“${title}” is deleted.`, { action: "Undo", act: () => this.#save(conversation) });
    }
  }

  // -- files ------------------------------------------------------------------------

  async #import(input) {
    const [file] = input.files;
    await this.#try(async () => {
      const conversations = await readFile(file);
      for (const conversation of conversations) {
        await store.save(conversation);
      }
      notify(`${conversations.length} chat${conversations.length === 1 ? " is" : "s are"} imported.`);
    });
    input.value = ""; // so that the same file can be chosen again
    await this.#list();
  }
}
