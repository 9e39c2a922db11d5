// Show the values of charts on request; `charts` is their data, `hidden` the hidden runs.
const showValues = (charts, hidden) => {
  const SVG = "http://www.w3.org/2000/svg";

  const format = (value) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e7 || size < 1e-4) return value.toExponential(3);
    return value.toLocaleString("en", { maximumSignificantDigits: 5 });
  };

  // Return the index of the number nearest to x in an ascending list.
  const nearest = (numbers, x) => {
    let low = 0, high = numbers.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (numbers[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - numbers[low - 1] < numbers[low] - x ? low - 1 : low;
  };

  const make = (name, attributes) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const percent = (share) => (100 * share).toFixed(2) + "%";

  const figures = Array.from(document.querySelectorAll("figure[data-chart]"), (figure) => {
    const data = charts[Number(figure.dataset.chart)];
    const plot = figure.querySelector(".plot"), tip = figure.querySelector(".tip");
    const pointer = figure.querySelector(".pointer");
    const [bottom, top] = data.y;
    const across = (x) => x / data.high;
    const up = (y) => data.log
      ? Math.log(y / bottom) / Math.log(top / bottom) : (y - bottom) / (top - bottom);
    const shown = () => data.series.filter((each) => !hidden.has(each.run));
    const every = [...new Set(data.series.flatMap((each) => each.x))].sort((a, b) => a - b);

    const clear = () => { pointer.setAttribute("hidden", ""); tip.hidden = true; };
    const line = (x) => {
      pointer.removeAttribute("hidden");
      pointer.replaceChildren(make("line",
        { x1: percent(across(x)), x2: percent(across(x)), y1: 0, y2: "100%" }));
    };
    // Show each curve's value at its step nearest to x.
    const show = (x) => {
      const tracks = shown();
      if (!tracks.length) { clear(); return; }
      const dense = tracks.find((each) => each.draw !== "points") || tracks[0];
      const at = dense.x[nearest(dense.x, x)];
      line(at);
      const title = document.createElement("b");
      title.textContent = "step " + at.toLocaleString("en");
      const rows = tracks.map((each) => {
        const place = nearest(each.x, at), row = document.createElement("span");
        const name = document.createElement("em"), value = document.createElement("strong");
        row.className = each.style + " " + each.draw;
        const elsewhere = each.draw === "points" && each.x[place] !== at;
        name.textContent = each.name +
          (elsewhere ? " at " + each.x[place].toLocaleString("en") : "");
        value.textContent = format(each.y[place]);
        row.append(name, value);
        pointer.append(make("circle", { class: each.style, r: 4,
          cx: percent(across(each.x[place])), cy: percent(1 - up(each.y[place])) }));
        return row;
      });
      tip.replaceChildren(title, ...rows);
      tip.hidden = false;
      const width = plot.clientWidth, left = across(at) * width;
      const tipLeft = left > width / 2 ? left - tip.offsetWidth - 12 : left + 12;
      tip.style.left = Math.max(Math.min(tipLeft, width - tip.offsetWidth), -40) + "px";
      figure.at = at;
    };

    const follow = (event) => {
      const box = plot.getBoundingClientRect();
      const x = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * data.high;
      show(x);
      for (const other of figures) if (other.plot !== plot) other.line(x);
    };
    const leave = () => { for (const each of figures) each.clear(); };
    plot.addEventListener("pointermove", follow);
    plot.addEventListener("pointerdown", follow);
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("blur", leave);
    plot.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { leave(); return; }
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25 }[event.key];
      const ends = { Home: 0, End: every.length - 1 }[event.key];
      if (step === undefined && ends === undefined) return;
      event.preventDefault();
      const from = figure.at === undefined ? 0 : nearest(every, figure.at);
      const place = ends === undefined ? from + step : ends;
      show(every[Math.min(every.length - 1, Math.max(0, place))]);
    });
    const within = (x) => { if (x <= data.high) line(x); else clear(); };
    return { plot, clear, line: within };
  });
};
