// What a page does beyond being read: copying, sorting, printing, and charts that answer the pointer.
(async () => {
  "use strict";
  async function unpack(id) {
    const packed = atob(document.getElementById(id).textContent.trim());
    const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const code = document.getElementById(button.dataset.copy);
      try {
        await navigator.clipboard.writeText(button.dataset.text ?? code.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code); // no clipboard here: leave it selected
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  // A click on a column's title sorts by it: upwards, downwards, then as it was. What has no value stays last.
  const asNumber = (text) => (/^[-−]?[\d.,]+(e[-+]?\d+)?/.test(text) ? parseFloat(text.replace("−", "-").replaceAll(",", "")) : NaN);
  for (const table of document.querySelectorAll("main table")) {
    const body = table.tBodies[0];
    const original = [...body.rows];
    const titles = [...table.tHead.rows[0].cells];
    if (original.length > 1) titles.forEach((title, column) => {
      const texts = new Map(original.map((row) => [row, row.cells[column].dataset.value ?? row.cells[column].textContent.trim()]));
      const known = original.filter((row) => !["", "–"].includes(texts.get(row)));
      const areNumbers = known.every((row) => !Number.isNaN(asNumber(texts.get(row))));
      const compare = areNumbers ? (a, b) => asNumber(texts.get(a)) - asNumber(texts.get(b)) : (a, b) => texts.get(a).localeCompare(texts.get(b), "en", { numeric: true });
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      title.dataset.title = title.textContent; // for paper: titles with a button in them do not come again on the next sheet
      button.append(...title.childNodes);
      title.append(button);
      button.addEventListener("click", () => {
        const next = { ascending: "descending", descending: "" }[title.getAttribute("aria-sort")] ?? "ascending";
        for (const each of titles) each.removeAttribute("aria-sort");
        if (next) title.setAttribute("aria-sort", next);
        const sorted = known.toSorted((a, b) => (next === "descending" ? compare(b, a) : compare(a, b)));
        body.replaceChildren(...(next ? [...sorted, ...original.filter((row) => !known.includes(row))] : original));
      });
    });
  }

  // A long table shows its first rows, and those that have the words one looks for; on paper it is whole.
  for (const box of document.querySelectorAll(".table")) {
    const table = box.firstElementChild, rows = [...table.tBodies[0].rows];
    if (rows.length <= 24) continue;
    const [line, find, all] = ["p", "input", "button"].map((tag) => document.createElement(tag));
    Object.assign(find, { type: "search", placeholder: `Filter ${rows.length} rows`, ariaLabel: "Filter rows" });
    Object.assign(all, { type: "button", textContent: `Show all ${rows.length}` });
    line.className = "fold";
    line.append(find, all);
    box.before(line);
    const update = () => {
      table.classList.toggle("folded", !find.value && !all.hidden);
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(find.value.toLowerCase());
    };
    all.addEventListener("click", () => { find.value = ""; all.hidden = true; update(); });
    find.addEventListener("input", update);
    update();
  }

  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const each of folded) each.open = true;
  });
  addEventListener("afterprint", () => { for (const each of folded) each.open = false; });

  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const seen = new Set();
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) isIntersecting ? seen.add(target.id) : seen.delete(target.id);
    const current = [...links.keys()].find((id) => seen.has(id));
    for (const [id, link] of links) id === current ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
  }, { rootMargin: "-20% 0px -60% 0px" });
  for (const id of links.keys()) watch.observe(document.getElementById(id));

  // What lies under the pointer in a chart is told beside it.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  addEventListener("pointermove", (event) => {
    const said = event.target.dataset?.tip;
    tip.hidden = !said;
    if (!said) return;
    tip.textContent = said;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${event.clientY + 18 + height < innerHeight ? event.clientY + 18 : Math.max(8, event.clientY - 12 - height)}px`;
  });
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

  // Drag over a part of a chart, or turn the wheel with Shift, to see it closer; double-click for all of it.
  const round = (low, high, most) => {
    const unit = 10 ** Math.floor(Math.log10((high - low) / most));
    const step = [1, 2, 5, 10].map((digit) => digit * unit).find((each) => each >= 0.999 * (high - low) / most);
    return Array.from({ length: Math.floor(high / step + 1e-9) - Math.ceil(low / step) + 1 }, (_, at) => (Math.ceil(low / step) + at) * step);
  };
  for (const frame of document.querySelectorAll("[data-zoom*=x]")) {
    const marks = frame.querySelector(".marks"), plot = frame.parentNode, ends = frame.dataset.ends.split(" ").map(Number);
    const all = document.createElement("button");
    Object.assign(all, { type: "button", className: "all", textContent: "Show all", hidden: true });
    plot.parentNode.append(all);
    let shown = [...ends], from = null;
    function show(next) {
      shown = next;
      ["x", "y"].forEach((axis, at) => {
        const [low, high, first, last] = [next[2 * at], next[2 * at + 1], ends[2 * at], ends[2 * at + 1]];
        const scale = (last - first) / (high - low);
        marks.setAttribute(axis, `${100 * (axis === "x" ? (first - low) : (high - last)) / (high - low)}%`);
        marks.setAttribute(axis === "x" ? "width" : "height", `${100 * scale}%`);
        if (!frame.dataset.zoom.includes(axis)) return;
        const group = plot.querySelector(`.${axis}-axis`), line = group.querySelector("line"), text = group.querySelector("text");
        group.querySelectorAll("line, text:not([dy='-.6em'])").forEach((each) => each.remove());
        for (const value of round(low, high, 5)) {
          const place = `${axis === "x" ? 100 * (value - low) / (high - low) : 100 * (high - value) / (high - low)}%`;
          const [rule, name] = [line, text].map((each) => each && group.appendChild(each.cloneNode()));
          for (const end of [1, 2]) rule?.setAttribute(`${axis}${end}`, place);
          name.setAttribute(axis, place);
          name.textContent = Number(value.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 9 });
        }
      });
      all.hidden = next.every((each, at) => each === ends[at]);
    }
    const part = (event) => {
      const { left, top, width, height } = frame.firstElementChild.getBoundingClientRect();
      return [(event.clientX - left) / width, 1 - (event.clientY - top) / height].map((each) => Math.min(1, Math.max(0, each)));
    };
    const along = (at, share) => shown[2 * at] + share * (shown[2 * at + 1] - shown[2 * at]);
    frame.addEventListener("pointerdown", (event) => { from = event; frame.setPointerCapture(event.pointerId); event.preventDefault(); });
    frame.addEventListener("pointerup", (event) => {
      if (!from) return;
      const [start, end] = [part(from), part(event)];
      const far = [Math.abs(event.clientX - from.clientX) > 5, frame.dataset.zoom.includes("y") && Math.abs(event.clientY - from.clientY) > 12];
      from = null;
      if (far.some(Boolean)) show([0, 1].flatMap((at) => (far[at] ? [start[at], end[at]].sort((a, b) => a - b).map((share) => along(at, share)) : shown.slice(2 * at, 2 * at + 2))));
    });
    frame.addEventListener("wheel", (event) => {
      if (!event.shiftKey) return;
      event.preventDefault();
      const middle = along(0, part(event)[0]), factor = (event.deltaY || event.deltaX) < 0 ? 0.8 : 1.25;
      show([Math.max(ends[0], middle - factor * (middle - shown[0])), Math.min(ends[1], middle + factor * (shown[1] - middle)), ...shown.slice(2)]);
    }, { passive: false });
    frame.addEventListener("dblclick", () => show([...ends]));
    all.addEventListener("click", () => show([...ends]));
  }

  if (window.DecompressionStream) {
    const { allocations, tips } = JSON.parse(await unpack("packed"));
    document.querySelectorAll("[data-tip]").forEach((mark, at) => { mark.dataset.tip = tips[at]; });
    for (const [name, data] of Object.entries(allocations)) {
      const slider = document.getElementById(`detail-${name}`);
      slider.parentNode.hidden = false;
      fillAllocations(document.querySelector(`#chart-${name} .marks`), data, slider, slider.nextElementSibling);
    }
  }
  document.documentElement.dataset.drawn = "yes";
})();
