// Charts are drawn after the text is on screen, in the page's own colours, and again when light turns to dark.
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

  if (!document.getElementById("library")) return;
  await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  if (!window.DecompressionStream) {
    document.documentElement.classList.add("no-charts");
    return;
  }
  const script = document.createElement("script");
  script.textContent = await unpack("library");
  document.head.append(script);

  const { colours, items, allocations } = JSON.parse(await unpack("charts"));
  let views = [];
  let drawing = Promise.resolve();
  async function draw() {
    for (const view of views) view.clear();
    views = [];
    Bokeh.documents.length = 0;
    const style = getComputedStyle(document.documentElement);
    const values = new Map(Object.entries(colours).map(([role, key]) => [key, style.getPropertyValue(`--${role}`).trim()]));
    const stand_in = new RegExp([...values.keys()].join("|"), "g");
    for (const [name, item] of Object.entries(items)) {
      const target = document.getElementById(`chart-${name}`);
      target.replaceChildren();
      const themed = JSON.stringify(item).replace(stand_in, (key) => values.get(key));
      const view = await Bokeh.embed.embed_item(JSON.parse(themed), target);
      views.push(view);
      if (name in allocations) {
        const slider = document.getElementById(`detail-${name}`);
        const inks = Object.fromEntries(Object.entries(colours).map(([role, key]) => [role, values.get(key)]));
        fillAllocations(view, allocations[name], inks, slider, slider.nextElementSibling);
      }
    }
    document.documentElement.dataset.drawn = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  }
  const redraw = () => { drawing = drawing.then(draw); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  redraw();
})();
