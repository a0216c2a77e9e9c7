// A conversation in use: it asks, stops and asks again, and keeps itself in the history. It may be shown or not; an
// answer streams on while another conversation is on the screen.

import { emptyAnswer, requestFor, userMessage } from "./conversation.js";
import { Run } from "./run.js";

const SAVE_MS = 2000; // between two writes of an answer that streams

export class Session {
  run = null;
  view = null; // { sync(), grow(), end() } of the chat that shows it
  #savedMs = 0;

  /** `save(conversation)` keeps it, and reports its own errors. */
  constructor(conversation, save) {
    this.conversation = conversation;
    this.save = save;
  }

  get messages() {
    return this.conversation.messages;
  }

  get isBusy() {
    return this.run !== null;
  }

  stop() {
    this.run?.stop();
  }

  /** Stop, and keep nothing more: the conversation was deleted. */
  forget() {
    this.save = () => {};
    this.stop();
  }

  send(text, files) {
    this.messages.push(userMessage(text, files));
    return this.retry(this.messages.length);
  }

  /** Replace the answer at an index, and forget everything after it. */
  retry(index) {
    this.messages.splice(index, Infinity, emptyAnswer());
    return this.#run(index);
  }

  /** Replace the question at an index, and forget everything after it. */
  edit(index, text) {
    const [{ files }] = this.messages.splice(index);
    return this.send(text, files);
  }

  /** Bring messages back that retry or edit removed. */
  restore(messages) {
    this.stop();
    this.conversation.messages = messages;
    this.view?.sync();
    this.#keep();
  }

  /** Go on with an answer that was cut. */
  goOn(index) {
    const { facts, ...answer } = this.messages[index];
    this.messages.splice(index, Infinity, { ...answer, facts: { ...facts } }); // another one, which is drawn afresh
    return this.#run(index, { continues: true });
  }

  async #run(index, how) {
    const answer = this.messages[index];
    const { settings } = this.conversation;
    answer.facts.model = settings.model;
    let run;
    try {
      run = new Run(requestFor(this.conversation, index, how), answer);
    } catch (error) {
      answer.error = error.message; // the tools are not valid
      this.view?.sync();
      return;
    }
    this.run = run;
    this.view?.sync();
    this.#keep();
    await run.finish(() => this.#grow(run));
    if (this.run === run) { // else another one was begun meanwhile
      this.run = null;
      this.view?.end();
      this.#keep();
    }
  }

  #grow(run) {
    if (this.run === run) {
      this.view?.grow();
      if (performance.now() - this.#savedMs > SAVE_MS) {
        this.#keep();
      }
    }
  }

  #keep() {
    this.#savedMs = performance.now();
    this.conversation.updated = Date.now();
    this.save(this.conversation);
  }
}
