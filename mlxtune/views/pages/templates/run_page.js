(() => {
  const hidden = new Set();
  showValues(JSON.parse(document.getElementById("charts").textContent), hidden);

  const runs = document.getElementById("runs");
  if (runs) {
    runs.addEventListener("change", (event) => {
      const run = Number(event.target.value);
      if (event.target.checked) hidden.delete(run); else hidden.add(run);
      for (const element of document.querySelectorAll(`[data-run="${run}"]`)) {
        element.toggleAttribute("hidden", !event.target.checked);
      }
    });
  }
  document.getElementById("sampled")?.addEventListener("change", (event) => {
    for (const element of document.querySelectorAll("[data-sampled]")) {
      element.hidden = element.dataset.sampled !== event.target.value;
    }
  });
  addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("details")) folded.open = true;
  });
})();
