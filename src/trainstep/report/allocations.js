// Stacks a step's allocations: the largest one by one, the others as one strip for each group.
"use strict";

function layOutAllocations(data, count) {
  const size = (bytes) => {
    const power = Math.min(3, Math.max(1, Math.floor(Math.log2(bytes) / 10)));
    const [value, unit] = [bytes / 2 ** (10 * power), ["KiB", "MiB", "GiB"][power - 1]];
    return `${Number(value.toPrecision(3)).toLocaleString("en")} ${unit}`;
  };
  // What comes and goes is shown before what is always there, however large that is.
  const stays = (item) => Number(data.start[item] === 0 && data.end[item] >= data.last);
  const order = data.start.map((_, item) => item).sort((a, b) => stays(a) - stays(b) || data.bytes[b] - data.bytes[a]);
  const shown = new Set(order.slice(0, count));
  const times = new Set(data.edges);
  for (const item of shown) times.add(data.start[item]).add(data.end[item]);
  const ticks = Float64Array.from(times).sort();
  const tickOf = new Map(Array.from(ticks, (time, index) => [time, index]));
  const base = new Float64Array(ticks.length - 1); // how high the stack is in each stretch between two ticks
  const made = [];
  const tolerance = data.peak / 1500; // less than a pixel

  // One shape on top of the stack: from tick `first` to tick `last`, `height(i)` bytes high in stretch i.
  function add(first, last, height, group, alpha, name, tip) {
    const xs = [], low = [], high = [];
    let from = 0, to = 0;
    for (let i = first; i < last; i++) {
      const bottom = base[i], top = bottom + height(i);
      if (i === first || Math.abs(bottom - from) > tolerance || Math.abs(top - to) > tolerance) {
        if (i > first) { xs.push(ticks[i]); low.push(from); high.push(to); }
        xs.push(ticks[i]); low.push(bottom); high.push(top);
        [from, to] = [bottom, top];
      }
      base[i] = top;
    }
    xs.push(ticks[last]); low.push(from); high.push(to);
    const ys = [...low, ...high.reverse()].map((bytes) => bytes / data.per_unit);
    made.push({ xs: [...xs, ...xs.toReversed()], ys, role: data.roles[group], alpha, tip: `${name}\n${tip}` });
  }

  // The most bytes that a group's other allocations hold in each stretch.
  function strip(group) {
    const heights = new Float64Array(ticks.length - 1);
    const changes = [];
    for (const item of order) {
      if (data.group[item] !== group || shown.has(item)) continue;
      changes.push([data.start[item], data.bytes[item]], [data.end[item], -data.bytes[item]]);
    }
    changes.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const rest = data.rest[group];
    for (let i = 0, next = 0, level = 0, edge = 0; i < heights.length; i++) {
      while (next < changes.length && changes[next][0] <= ticks[i]) level += changes[next++][1];
      let most = level;
      while (next < changes.length && changes[next][0] < ticks[i + 1]) {
        level += changes[next++][1];
        most = Math.max(most, level);
      }
      while (data.edges[edge + 1] <= ticks[i]) edge++;
      heights[i] = most + (rest ? rest[edge] : 0);
    }
    return heights;
  }

  const items = [...shown].sort((a, b) => data.start[a] - data.start[b] || a - b);
  for (const band of [...new Set(data.bands)].sort((a, b) => a - b)) {
    for (const group of data.bands.keys()) {
      if (data.bands[group] !== band) continue;
      const heights = strip(group), most = Math.max(...heights);
      if (!most) continue;
      const first = heights.findIndex((height) => height), last = heights.findLastIndex((height) => height) + 1;
      add(first, last, (i) => heights[i], group, 0.5, data.groups[group], `all others together, at most ${size(most)}`);
    }
    for (const item of items) {
      const group = data.group[item];
      if (data.bands[group] !== band) continue;
      const from = data.start[item] ? `event ${data.start[item]}` : "before";
      const to = data.end[item] >= data.last ? "the end" : `event ${data.end[item]}`;
      const lines = [size(data.bytes[item]), data.whats[data.what[item]], `alive from ${from} to ${to}`, data.stacks[data.stack[item]]];
      add(tickOf.get(data.start[item]), tickOf.get(data.end[item]), () => data.bytes[item], group,
        made.length % 2 ? 0.95 : 0.8, data.groups[group], lines.filter(Boolean).join("\n"));
    }
  }
  const hidden = data.start.length - shown.size + data.left_out;
  const smallest = size(items.reduce((least, item) => Math.min(least, data.bytes[item]), Infinity));
  const says = hidden
    ? `${shown.size.toLocaleString("en")} allocations one by one, down to ${smallest}; ${hidden.toLocaleString("en")} others together`
    : `all ${shown.size.toLocaleString("en")} allocations one by one`;
  return { made, says };
}

// Fill a chart, and again whenever its slider moves. The slider is logarithmic: small counts matter most.
function fillAllocations(marks, data, slider, says) {
  const [, high] = marks.parentNode.dataset.ends.split(" ").slice(2).map(Number);
  const shapes = marks.querySelector("svg");
  marks.querySelectorAll("svg:has(.area)").forEach((each) => each.remove());
  marks.prepend(shapes);
  const most = data.start.length;
  const count = () => Math.max(1, Math.round(most ** Number(slider.value)));
  function fill() {
    const { made, says: said } = layOutAllocations(data, count());
    shapes.replaceChildren(...made.map(({ xs, ys, role, alpha, tip }) => {
      const path = document.createElementNS(marks.namespaceURI, "path");
      path.setAttribute("class", `${role} area`);
      path.setAttribute("style", `fill-opacity: ${alpha}`);
      path.setAttribute("d", `M${xs.map((x, i) => `${(1000 * x / data.last).toFixed(3)} ${(1000 - 1000 * ys[i] / high).toFixed(3)}`).join(" ")}Z`);
      path.dataset.tip = tip;
      return path;
    }));
    says.textContent = said;
  }
  slider.value = most > 1 ? Math.log(data.shown) / Math.log(most) : 1;
  slider.oninput = fill;
  fill();
}
