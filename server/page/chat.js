// A chat on the page: the messages of one session (session.js), and the field for the next. Several may stand side by
// side.

import { Answer } from "./answer.js";
import { Composer } from "./composer.js";
import { requestFor, titleOf } from "./conversation.js";
import { button, byId, el, iconButton, keyOf, sequenceColour } from "./dom.js";
import { notify } from "./notices.js";
import { Question } from "./question.js";
import { Scroller } from "./scroller.js";

const SHOWN = 40; // messages that are drawn at first; older ones on demand
const MAX_ANNOUNCED = 1000; // characters of an answer that a screen reader is given
const PROMPTS = { // which a small model answers well
  chat: ["What is photosynthesis?", "Give me three tips for sleeping well.", "Write a Python function that adds two numbers.",
    "Write a short poem about the sea."],
  completion: ["Once upon a time", "The recipe begins with", "def fibonacci(n):"],
};

export class Chat {
  names = []; // of the models
  #sees = new Set(); // those that take pictures
  #views = []; // a Question or an Answer of each message from #first on
  #first = 0;
  #frame = 0;

  /** `host`: ask(chat, text, files), close(chat), menu(chat), settings(chat), choose(chat, model), showJourney(tag). */
  constructor(host) {
    this.host = host;
    this.title = el("h3", {});
    this.models = el("select", { className: "quiet", hidden: true, attrs: { "aria-label": "Model" } });
    this.models.onchange = () => host.choose(this, this.models.value);
    this.list = el("div", { className: "messages" });
    this.older = button("Show earlier messages", { className: "quiet older", hidden: true, onclick: () => this.#showOlder() });
    this.log = el("div", { className: "log", tabIndex: 0, attrs: { role: "log", "aria-live": "off", "aria-label": "Conversation" } },
      this.older, this.list);
    this.scroller = new Scroller(this.log);
    this.composer = new Composer({
      send: (text, files) => host.ask(this, text, files),
      stop: () => this.session.stop(),
    });
    this.element = el("article", { className: "chat" }, this.#header(), this.log, this.scroller.button, this.composer.element);
    this.composer.takeDrops(this.element);
    this.element.addEventListener("keydown", (event) => {
      if (keyOf(event) === "Escape") {
        this.session.stop();
      }
    });
  }

  /** Show a session. */
  open(session) {
    if (this.session) {
      this.session.view = null;
    }
    this.session = session;
    session.view = this;
    this.#views = [];
    this.#first = Math.max(session.messages.length - SHOWN, 0);
    this.list.replaceChildren();
    this.sync();
    this.showSettings();
    this.composer.open(session.conversation.id);
    this.scroller.toEnd();
  }

  get #isChat() {
    return this.session.conversation.settings.api === "chat";
  }

  focus() {
    this.composer.input.focus();
  }

  /** Offer models, if there is a choice: { id, input_modalities }. */
  setModels(models) {
    const names = models.map(({ id }) => id);
    this.names = names;
    this.#sees = new Set(models.filter((model) => model.input_modalities?.includes("image")).map(({ id }) => id));
    this.models.replaceChildren(...names.map((name) => new Option(name)));
    this.models.hidden = names.length < 2;
    this.showSettings();
  }

  /** Show the model and the kind of API that are set. */
  showSettings() {
    const { settings } = this.session.conversation;
    if (this.names.length && !this.names.includes(settings.model)) {
      settings.model = ""; // no longer served: the first is
    }
    this.models.value = settings.model || (this.names[0] ?? "");
    this.composer.setPictures(this.#isChat && this.#sees.has(this.models.value));
    this.composer.input.placeholder = this.#isChat ? "Ask something" : "Begin a text";
    this.element.classList.toggle("completion", !this.#isChat);
    if (!this.session.messages.length) {
      this.#showWelcome();
    }
  }

  // -- what a session calls ---------------------------------------------------------

  /** Draw the messages that changed; those that are still there keep their elements. */
  sync() {
    const messages = this.session.messages.slice(this.#first);
    let same = this.#views.findIndex((view, index) => view.message !== messages[index]);
    same = same < 0 ? this.#views.length : same;
    this.#views.splice(same).forEach((view) => view.element.remove());
    if (messages.length) {
      this.list.querySelector(".welcome")?.remove();
    }
    for (const message of messages.slice(same)) {
      const view = this.#make(message);
      this.#views.push(view);
      this.list.append(view.element);
    }
    this.#showState();
    this.scroller.toEnd();
  }

  /** The last answer has grown: draw it with the next frame. */
  grow() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      const view = this.#views.at(-1);
      if (view instanceof Answer && this.session.isBusy) {
        view.setStreaming(true);
        view.update();
        this.scroller.follow();
      }
    });
  }

  /** The last answer is complete. */
  end() {
    this.#views.at(-1).finish();
    this.#showState();
    this.scroller.follow();
    const { content, error, calls } = this.session.messages.at(-1);
    const called = calls.length ? `The model calls ${calls.map(({ name }) => name).join(", ")}. ` : "";
    byId("announcer").textContent = error ? "" : (called + content).slice(0, MAX_ANNOUNCED);
  }

  /** Wear the colour of the sequence that writes the answer; `seqIds` maps tags to sequence ids. */
  paint(seqIds) {
    const tag = this.session.run?.tag ?? "";
    const seqId = tag ? seqIds.get(tag.slice(0, 8)) : undefined;
    this.element.style.setProperty("--own", seqId === undefined ? "" : sequenceColour(seqId));
  }

  // ---------------------------------------------------------------------------------

  #make(message) {
    const index = () => this.session.messages.indexOf(message);
    if (message.role === "user") {
      return new Question(message, { onEdit: (text) => this.#replace(index(), (at) => this.session.edit(at, text)) });
    }
    const view = new Answer(message, {
      retry: () => this.#replace(index(), (at) => this.session.retry(at)),
      goOn: () => this.session.goOn(index()),
      sendResults: () => this.session.retry(index() + 1),
      request: () => requestFor(this.session.conversation, index()),
      showJourney: this.host.showJourney,
    });
    if (this.session.run?.answer === message) {
      view.setStreaming(true);
      view.update();
    } else {
      view.finish();
    }
    return view;
  }

  /** Ask again from a message on, and offer to bring back what that removes. */
  #replace(index, ask) {
    const { session } = this;
    const messages = [...session.messages];
    session.stop();
    ask(index);
    if (messages.length - index > 2) {
      const act = () => session.restore(messages);
      notify("The messages after it are removed.", { action: "Undo", act });
    }
  }

  #showOlder() {
    const height = this.log.scrollHeight;
    const from = Math.max(this.#first - SHOWN, 0);
    const added = this.session.messages.slice(from, this.#first).map((message) => this.#make(message));
    this.#first = from;
    this.#views.unshift(...added);
    this.list.prepend(...added.map((view) => view.element));
    this.#showState();
    this.log.scrollTop += this.log.scrollHeight - height;
  }

  #showState() {
    const { isBusy, conversation } = this.session;
    const title = titleOf(conversation);
    this.title.textContent = this.title.title = title;
    this.element.setAttribute("aria-label", title);
    this.older.hidden = this.#first === 0;
    this.composer.setBusy(isBusy);
    this.element.classList.toggle("busy", isBusy);
    this.log.setAttribute("aria-busy", String(isBusy));
    if (!isBusy) {
      this.element.style.removeProperty("--own");
    }
  }

  #showWelcome() {
    const name = byId("model-name").textContent || "the model";
    const [greeting, hint] = this.#isChat
      ? [`Ask ${name}`, "Chats stay in this browser. Answers stream from this server, and its memory is drawn as they do."]
      : [`Let ${name} go on`, "The model continues your text as it is, without a chat template."];
    const chips = PROMPTS[this.#isChat ? "chat" : "completion"].map((text) =>
      button(text, { className: "chip", onclick: () => this.composer.fill(text) }));
    this.list.replaceChildren(el("div", { className: "welcome" },
      el("p", { className: "greeting", textContent: greeting }), el("p", { className: "note", textContent: hint }),
      el("div", { className: "chips" }, ...chips)));
  }

  #header() {
    const settings = iconButton("Settings", "settings", () => this.host.settings(this));
    this.leave = iconButton("Close this chat", "close", () => this.host.close(this));
    const [dot, space] = [el("i", { className: "dot" }), el("span", { className: "space" })];
    return el("header", {}, dot, this.title, space, this.models, settings, this.host.menu(this), this.leave);
  }
}
