// Small charts. Each is drawn anew from plain numbers, as wide as the place it stands in.

import { svg } from "./dom.mjs";
import { SPAN } from "./history.mjs";

const HIGH = 116;
const LEFT = 44;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 18;

const width = (host) => Math.max(200, Math.floor(host.clientWidth));

// A round figure at or above `value` that halves well.
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 6, 8, 10].map((step) => step * power).find((one) => one >= value * 0.999);
}

function frame(host, top, format, label) {
  const wide = width(host);
  const chart = svg("svg", {
    width: wide, height: HIGH, viewBox: `0 0 ${wide} ${HIGH}`, role: "img", "aria-label": label,
  });
  const y = (value) => TOP + (1 - value / top) * (HIGH - TOP - BOTTOM);
  for (const value of [0, top / 2, top]) {
    chart.append(
      svg("line", { class: value ? "grid" : "base", x1: LEFT, x2: wide - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" }, value ? format(value) : "0"),
    );
  }
  return { chart, wide, y };
}

function empty(host, chart, wide, words) {
  chart.append(svg("text", { class: "empty", x: (LEFT + wide) / 2, y: HIGH / 2, "text-anchor": "middle" }, words));
  host.replaceChildren(chart);
}

// Lines over the last minutes. `series`: [{lines, name}], drawn solid, then dashed; `reference`: a level to compare
// with, {value, label}.
export function overTime(host, { series, format, label, reference = null, nothing = "no rounds in the last two minutes" }) {
  const values = series.flatMap(({ lines }) => lines.flat().map(([, value]) => value));
  const top = ceiling(Math.max(0, ...values, reference?.value ?? 0));
  const { chart, wide, y } = frame(host, top, values.length || reference ? format : () => "", label);
  const x = (age) => wide - RIGHT - (Math.min(age, SPAN) / SPAN) * (wide - RIGHT - LEFT);
  chart.append(
    svg("text", { class: "tick", x: LEFT, y: HIGH - 4 }, "2 min ago"),
    svg("text", { class: "tick", x: wide - RIGHT, y: HIGH - 4, "text-anchor": "end" }, "now"),
  );
  if (reference) {
    const at = y(reference.value);
    chart.append(
      svg("line", { class: "reference", x1: LEFT, x2: wide - RIGHT, y1: at, y2: at }),
      svg("text", { class: "tick strong", x: LEFT + 4, y: at < TOP + 14 ? at + 12 : at - 4 }, reference.label),
    );
  }
  if (!values.length) return empty(host, chart, wide, nothing);
  series.forEach(({ lines }, index) => {
    for (const line of lines) {
      const points = line.map(([age, value]) => `${x(age).toFixed(1)} ${y(value).toFixed(1)}`);
      const d = points.length > 1 ? `M${points.join("L")}` : `M${points[0]}h1.5`;
      chart.append(svg("path", { class: `line s${index}`, d }));
    }
  });
  host.replaceChildren(chart);
}

// Lines from the origin, of unequal length: [{points: [[x, y]...], name}].
export function fromStart(host, { series, formatX, formatY, label }) {
  const all = series.flatMap(({ points }) => points);
  const top = ceiling(1.15 * Math.max(1, ...all.map(([, value]) => value))); // room for the name
  const end = Math.max(0.001, ...all.map(([at]) => at));
  const { chart, wide, y } = frame(host, top, formatY, label);
  const x = (at) => LEFT + (at / end) * (wide - RIGHT - LEFT);
  chart.append(
    svg("text", { class: "tick", x: LEFT, y: HIGH - 4 }, "0 s"),
    svg("text", { class: "tick", x: wide - RIGHT, y: HIGH - 4, "text-anchor": "end" }, formatX(end)),
  );
  series.forEach(({ points, name }, index) => {
    if (!points.length) return;
    const [lastX, lastY] = points.at(-1);
    const d = `M${[[points[0][0], 0], ...points].map(([at, value]) => `${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("L")}`;
    chart.append(svg("path", { class: `line s${index}`, d }));
    // Names keep apart: the first stands above the end of its line, the second below.
    chart.append(svg("text", {
      class: `name s${index}`,
      x: Math.max(LEFT + 80, x(lastX)),
      y: Math.max(TOP + 4, Math.min(HIGH - BOTTOM - 4, y(lastY) + (index === 0 ? -6 : 18))),
      "text-anchor": "end",
    }, name));
  });
  host.replaceChildren(chart);
}

// One bar for each of `values`, [{name, value, told}], of at most `top`.
export function bars(host, { values, format, label, nothing, top }) {
  const { chart, wide, y } = frame(host, top, format, label);
  if (!values.some(({ value }) => value > 0)) return empty(host, chart, wide, nothing);
  const step = (wide - RIGHT - LEFT) / values.length;
  values.forEach(({ name, value, told }, index) => {
    const x = LEFT + index * step;
    chart.append(
      svg("rect", { class: "bar", x: x + step * 0.12, width: step * 0.76, y: y(value), height: y(0) - y(value) },
        svg("title", {}, told)),
      svg("text", { class: "tick", x: x + step / 2, y: HIGH - 4, "text-anchor": "middle" }, name),
    );
  });
  host.replaceChildren(chart);
}
