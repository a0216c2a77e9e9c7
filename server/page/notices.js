// One line under the header for what went wrong or can be undone.

import { button, byId, iconButton } from "./dom.js";

const SHOWN_MS = 8000;
let timer = 0;

/** Show a sentence; `action` is a label and `act` what it does. An error stays until it is closed. */
export function notify(sentence, { action = "", act = () => {}, isError = false } = {}) {
  const notice = byId("notice");
  clearTimeout(timer);
  const hide = () => {
    notice.hidden = true;
  };
  const doIt = () => {
    hide();
    act();
  };
  const close = iconButton("Dismiss", "close", hide);
  const buttons = action ? [button(action, { className: "link", onclick: doIt }), close] : [close];
  notice.replaceChildren(sentence, ...buttons);
  notice.classList.toggle("is-error", isError);
  notice.hidden = false;
  if (!isError) {
    timer = setTimeout(hide, SHOWN_MS);
  }
}
