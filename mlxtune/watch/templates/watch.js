(() => {
  const byId = (id) => document.getElementById(id);
  const question = byId("question"), confirm = byId("confirm");
  let source, shown = "", retry;

  // Show a part: markup from the server, which escapes all data, or a flag that shows or hides the part.
  const show = (name, value) => {
    if (name === "title") { document.title = value + " · mlxtune watch"; return; }
    if (name === "chart_data") return;
    const part = document.querySelector(`[data-part="${name}"]`);
    if (typeof value === "string" && name !== "back") {
      if (name === "problem" || name === "why_not") part.textContent = value;
      else part.innerHTML = value;
    }
    part.hidden = !value;
    for (const section of document.querySelectorAll(`[data-with~="${name}"]`)) {
      section.hidden = ![...section.querySelectorAll("[data-part]")].some((each) => !each.hidden);
    }
  };

  const follow = (view) => {
    clearTimeout(retry);
    if (source) source.close();
    shown = view;
    source = new EventSource("events?view=" + encodeURIComponent(view));
    source.onopen = () => { byId("gone").hidden = true; };
    source.onmessage = (event) => {
      const parts = JSON.parse(event.data);
      for (const [name, value] of Object.entries(parts)) show(name, value);
      if (parts.chart_data) showValues(parts.chart_data, new Set());
    };
    source.onerror = () => {
      byId("gone").hidden = false;
      // After an invalid answer, the browser does not reconnect automatically.
      if (source.readyState === EventSource.CLOSED) retry = setTimeout(() => follow(shown), 2000);
    };
  };

  const post = async (action, values) => {
    const failed = byId("failed");
    try {
      const answer = await fetch(action, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ run: current(), ...values }),
      });
      failed.textContent = answer.ok ? "" : "! " + (await answer.text());
    } catch (error) {
      failed.textContent = "! mlxtune watch does not answer.";
    }
    failed.hidden = !failed.textContent;
  };
  const current = () => shown || document.querySelector("[data-run-key]")?.dataset.runKey;

  document.addEventListener("click", (event) => {
    const { view, stop, cancel } = event.target.closest("button")?.dataset || {};
    if (view !== undefined) { follow(view); scrollTo(0, 0); }
    if (cancel !== undefined) post("cancel", {});
    if (stop !== undefined) { confirm.dataset.run = stop; confirm.showModal(); }
  });
  byId("cancel").addEventListener("click", () => confirm.close());
  byId("stop").addEventListener("click", () => {
    confirm.close();
    post("stop", { run: confirm.dataset.run });
  });
  const ask = () => { if (question.value.trim()) post("ask", { question: question.value }); };
  byId("ask").addEventListener("click", ask);
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.metaKey || event.ctrlKey)) ask();
  });
  follow("");
})();
