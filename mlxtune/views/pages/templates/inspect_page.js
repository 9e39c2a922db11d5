(() => {
  const MOST_MARKED = 3000;
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const form = byId("filter");
  const fields = form.elements;

  // Lower case of the same length, so that positions match the text.
  const fold = (text) => {
    const lower = text.toLowerCase();
    if (lower.length === text.length) return lower;
    return Array.from(text, (c) => (c.toLowerCase().length === c.length ? c.toLowerCase() : c)).join("");
  };
  const textOf = (element, selector) =>
    Array.from(element.querySelectorAll(selector), (found) => found.textContent);

  const examples = Array.from(document.querySelectorAll("#examples > article"), (element) => ({
    element,
    row: element.dataset.row,
    split: element.dataset.split,
    title: fold(element.querySelector("h3").textContent),
    kinds: textOf(element, ".kind").map(fold),
    text: fold(textOf(element, ".text").join("")),
  }));

  // `row:12` and `kind:cut` search one field; other words search all.
  const matcher = (query) => {
    const [, key, value] = /^(row|kind):\s*(.*)$/.exec(query) || [];
    if (key === "row") return (example) => !value || example.row === value;
    const inKinds = (example, words) => example.kinds.some((kind) => kind.includes(words));
    if (key === "kind") return (example) => inKinds(example, value);
    return (example) =>
      example.text.includes(query) || example.title.includes(query) || inKinds(example, query);
  };

  const rangesIn = (block, needle, room) => {
    const nodes = [], starts = [], ranges = [];
    let whole = "";
    const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      nodes.push(walker.currentNode);
      starts.push(whole.length);
      whole += walker.currentNode.data;
    }
    whole = fold(whole);
    let node = 0;
    for (let at = whole.indexOf(needle); at >= 0 && ranges.length < room;
      at = whole.indexOf(needle, at + needle.length)) {
      const range = document.createRange(), end = at + needle.length;
      while (starts[node + 1] <= at) node++;
      range.setStart(nodes[node], at - starts[node]);
      while (starts[node + 1] < end) node++;
      range.setEnd(nodes[node], end - starts[node]);
      ranges.push(range);
    }
    return ranges;
  };

  const mark = (shown, query) => {
    const needle = query.replace(/^(row|kind):\s*/, "");
    const where = query.startsWith("kind:") ? ".kind" : query.startsWith("row:") ? "h3" : ".text, h3, .kind";
    const ranges = [];
    for (const { element } of needle ? shown : []) {
      for (const block of element.querySelectorAll(where)) {
        if (ranges.length >= MOST_MARKED || !fold(block.textContent).includes(needle)) continue;
        const folded = block.closest("details");
        if (folded) folded.open = true;
        ranges.push(...rangesIn(block, needle, MOST_MARKED - ranges.length));
      }
    }
    root.dataset.marked = ranges.length;
    if (!globalThis.CSS || !CSS.highlights) return;
    CSS.highlights.set("found", new Highlight(...ranges));
  };

  const filter = () => {
    const query = fold(fields.q.value.trim()), split = fields.split.value;
    const matches = matcher(query);
    const shown = examples.filter((example) => {
      const show = (!split || example.split === split) &&
        (!fields.findings.checked || example.kinds.length > 0) && (!query || matches(example));
      example.element.hidden = !show;
      return show;
    });
    const number = (n) => n.toLocaleString("en");
    byId("count").value = number(shown.length) + " of " + number(examples.length) + " shown";
    byId("empty").hidden = shown.length > 0 || examples.length === 0;
    mark(shown, query);
  };

  const writeHash = () => {
    const parts = [];
    if (fields.q.value.trim()) parts.push("q=" + encodeURIComponent(fields.q.value.trim()));
    if (fields.split.value) parts.push("split=" + fields.split.value);
    if (fields.findings.checked) parts.push("findings=1");
    if (root.dataset.theme) parts.push("theme=" + root.dataset.theme);
    try {
      history.replaceState(null, "", parts.length ? "#" + parts.join("&") : location.pathname + location.search);
    } catch { /* a page inside another may not have an address */ }
  };

  // An address may name an element, or a search: #q=term&split=train&findings=1&theme=dark
  const readHash = () => {
    const hash = location.hash.slice(1);
    const target = hash && byId(hash);
    if (target) {
      const example = target.closest("article");
      if (example && example.hidden) {
        form.reset();
        filter();
        target.scrollIntoView();
      }
      return;
    }
    const asked = new URLSearchParams(hash.replace(/\+/g, "%2B"));
    const split = asked.get("split");
    fields.q.value = asked.get("q") || "";
    fields.split.value = split === "train" || split === "validation" ? split : "";
    fields.findings.checked = asked.get("findings") === "1";
    theme.set(asked.get("theme"));
    filter();
    if (asked.has("q")) byId("rows").scrollIntoView();
  };

  let waiting = 0;
  form.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { filter(); writeHash(); }, 120);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("clear").addEventListener("click", () => { form.reset(); filter(); writeHash(); fields.q.focus(); });
  byId("theme").addEventListener("click", writeHash);
  addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.metaKey || event.ctrlKey || event.altKey) return;
    if (/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
    event.preventDefault();
    fields.q.focus();
  });
  addEventListener("hashchange", readHash);
  addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("#examples details")) folded.open = true;
  });

  // Describe the token under the pointer: a title on each token would double the page's size.
  byId("examples").addEventListener("mouseover", (event) => {
    const token = event.target.closest(".text i, .text code");
    if (!token || token.title) return;
    const tokens = Number(token.dataset.n || 1);
    token.title = tokens + (tokens === 1 ? " token, " : " tokens, ") +
      (token.closest(".s") ? "supervised" : "context");
  });

  form.hidden = false;
  readHash();
})();
