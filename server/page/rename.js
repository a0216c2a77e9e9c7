// The dialog that asks for a chat's title.

import { byId } from "./dom.js";

let accept = () => {};

/** Ask for a title, beginning with the present one; `done(title)` gets it. */
export function askName(title, done) {
  accept = done;
  byId("rename-input").value = title;
  byId("rename-dialog").showModal();
  byId("rename-input").select();
}

byId("rename-form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("rename-dialog").close();
  accept(byId("rename-input").value.trim());
});
byId("rename-cancel").addEventListener("click", () => byId("rename-dialog").close());
