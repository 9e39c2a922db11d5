"use strict";
// The shared start of all pages' scripts.
const theme = (() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const prefers = matchMedia("(prefers-color-scheme: dark)");
  const set = (name) => {
    if (name === "dark" || name === "light") root.dataset.theme = name;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : prefers.matches;
    button.textContent = dark ? "Light" : "Dark";
    button.setAttribute("aria-label", "Switch to the " + (dark ? "light" : "dark") + " theme");
  };
  button.addEventListener("click", () => set(button.textContent.toLowerCase()));
  prefers.addEventListener("change", () => set());
  set(new URLSearchParams(location.hash.slice(1)).get("theme"));
  button.hidden = false;
  return { set };
})();
