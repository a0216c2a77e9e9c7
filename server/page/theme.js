// Dark or light: what was chosen here, else what the system prefers. Runs before the first paint, so nothing flashes.
// Not a module (those wait); everything else that needs colours listens for the "themechange" event.
"use strict";

(() => {
  const KEY = "quire.theme";
  const system = matchMedia("(prefers-color-scheme: dark)");

  const current = () => localStorage.getItem(KEY) ?? (system.matches ? "dark" : "light");

  function apply() {
    document.documentElement.dataset.theme = current();
    const button = document.getElementById("theme-button");
    if (button) {
      button.title = current() === "dark" ? "Light theme" : "Dark theme";
      button.setAttribute("aria-label", button.title);
    }
    document.dispatchEvent(new Event("themechange"));
  }

  apply();
  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme-button").addEventListener("click", () => {
      localStorage.setItem(KEY, current() === "dark" ? "light" : "dark");
      apply();
    });
  });
})();
