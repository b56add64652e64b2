// The interval theorem to play with: a row per key, with its score (drag it) and its interval [start, stop), the queries
// that see it; a line at one query. Kept keys are found anew for every prefix, by the definition, and the intervals are
// read off that table: what the picture shows is the theorem, not an assumption.
(function () {
  "use strict";
  const root = document.getElementById("intervals");
  if (!root) return;
  const SVG = "http://www.w3.org/2000/svg";
  const field = (name) => root.querySelector(`[name=${name}]`);
  let seed = 1, keys = 0, scores = [], dragged = null;

  function random() {  // mulberry32: the same numbers on every visit
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  }

  const PATTERNS = {
    independent: () => random(),
    rising: (j) => 0.8 * (j / keys) + 0.2 * random(),
    falling: (j) => 0.8 * (1 - j / keys) + 0.2 * random(),
    bursts: (j) => (Math.floor(j / 5) % 3 === 0 ? 0.6 + 0.4 * random() : 0.4 * random()),
    equal: () => 0.5,
  };

  // By the definition: kept[i] holds the `window` highest-ranked keys up to i; of equal scores the newest is higher.
  function keptSets(window) {
    return scores.map((_, i) => {
      const ranked = Array.from({ length: i + 1 }, (_, j) => j).sort((a, b) => scores[b] - scores[a] || b - a);
      return new Set(ranked.slice(0, window));
    });
  }

  // The queries that see key j; null if they are not consecutive, which would refute the theorem.
  function interval(kept, j) {
    const seen = kept.map((set, i) => (set.has(j) ? i : -1)).filter((i) => i >= 0);
    if (!seen.length) return [j, j];
    const [start, stop] = [seen[0], seen[seen.length - 1] + 1];
    return stop - start === seen.length && start === j ? [start, stop] : null;
  }

  function draw() {
    const window = Number(field("window").value), query = Math.min(Number(field("query").value), keys - 1);
    field("window").nextElementSibling.textContent = `${window} keys`;
    field("query").nextElementSibling.textContent = `position ${query}`;
    const kept = keptSets(window), runs = scores.map((_, j) => interval(kept, j));
    const svg = root.querySelector("svg"), width = Math.max(svg.clientWidth, 240);
    const row = width < 500 ? 13 : 12, top = 18, left = Math.round(0.2 * width), gap = 26;
    const height = top + keys * row + 22, x = (i) => left + gap + (i * (width - left - gap - 4)) / keys;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    const add = (name, attributes, text) => {
      const element = document.createElementNS(SVG, name);
      for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
      if (text !== undefined) element.textContent = text;
      svg.appendChild(element);
      return element;
    };
    add("text", { x: 0, y: 11 }, "score");
    add("text", { x: left + gap, y: 11 }, "queries that see the key →");
    add("rect", { x: x(query), y: top, width: Math.max(2, x(1) - x(0)), height: keys * row, class: "query",
      fill: "var(--md-accent-fg-color)", "fill-opacity": 0.18 });
    runs.forEach((run, j) => {
      const y = top + j * row, visible = kept[query].has(j);
      const colour = visible ? "var(--md-accent-fg-color)" : "var(--md-typeset-a-color)";
      const bar = add("rect", { x: 0, y: y + 1.5, width: Math.max(1, scores[j] * left), height: row - 3, rx: 1.5,
        class: "score", fill: colour, "fill-opacity": visible ? 0.9 : 0.35 });
      bar.dataset.key = j;
      if (j % 5 === 0) add("text", { x: left + gap - 4, y: y + row - 2.5, "text-anchor": "end" }, j);
      if (run === null) return;
      if (run[1] > run[0]) {
        const bar = add("rect", { x: x(run[0]), y: y + 2, width: x(run[1]) - x(run[0]), height: row - 4, rx: 2,
          class: "interval", fill: colour, "fill-opacity": visible ? 0.9 : 0.35 });
        bar.dataset.key = j;
      } else {
        add("circle", { cx: x(j) + (x(1) - x(0)) / 2, cy: y + row / 2, r: 1.6, class: "never",
          fill: "var(--md-default-fg-color--lighter)" });
      }
    });
    for (let i = 0; i < keys; i += 5) add("text", { x: x(i), y: height - 8 }, i);
    const stored = runs.every((run) => run !== null), never = runs.filter((run) => run && run[0] === run[1]).length;
    root.querySelector(".said").textContent =
      `Query ${query} sees ${kept[query].size} of its ${query + 1} keys: ${[...kept[query]].sort((a, b) => a - b).join(", ")}. ` +
      `${never} of ${keys} keys are never seen. ` +
      (stored ? "Each of the others is seen by consecutive queries: two integers per key are the whole mask."
        : "A key came back: please report this.");
    root.dataset.state = JSON.stringify({ window, query, scores, runs, kept: [...kept[query]] });
  }

  function fill() {
    keys = root.clientWidth < 500 ? 26 : 40;
    for (const name of ["window", "query"]) field(name).max = name === "window" ? Math.floor(keys / 2) : keys - 1;
    scores = Array.from({ length: keys }, (_, j) => Math.round(1000 * PATTERNS[field("pattern").value](j)) / 1000);
    draw();
  }

  function drag(event) {
    const svg = root.querySelector("svg"), box = svg.getBoundingClientRect();
    scores[dragged] = Math.min(1, Math.max(0.001, (event.clientX - box.left) / (0.2 * box.width)));
    draw();
  }

  root.querySelector("svg").addEventListener("pointerdown", (event) => {
    const svg = event.currentTarget, box = svg.getBoundingClientRect();
    if (event.clientX - box.left > 0.24 * box.width) return;  // the column of the scores
    const row = Math.floor(((event.clientY - box.top) * svg.viewBox.baseVal.height) / box.height - 18);
    const j = Math.floor(row / (svg.clientWidth < 500 ? 13 : 12));
    if (j < 0 || j >= keys) return;
    dragged = j;
    svg.setPointerCapture(event.pointerId);
    drag(event);
  });
  root.querySelector("svg").addEventListener("pointermove", (event) => { if (dragged !== null) drag(event); });
  for (const end of ["pointerup", "pointercancel"])
    root.querySelector("svg").addEventListener(end, () => { dragged = null; });
  field("window").addEventListener("input", draw);
  field("query").addEventListener("input", draw);
  field("pattern").addEventListener("change", fill);
  field("again").addEventListener("click", () => { seed += 1000; fill(); });
  let width = 0;
  new ResizeObserver(() => {
    if (root.clientWidth === width) return;
    width = root.clientWidth;
    if (keys !== (width < 500 ? 26 : 40)) fill();
    else draw();
  }).observe(root);
  fill();
})();
