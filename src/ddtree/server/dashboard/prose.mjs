// Text of an answer, each token marked by how it came.

import { byId, el } from "./dom.mjs";
import { LEVELS, level, told } from "./origins.mjs";

export function write(host, segments) {
  for (const { text, origins, head } of segments) {
    if (!origins.length) {
      host.append(text);
      continue;
    }
    const deepest = Math.max(...origins);
    const span = el("span", { class: `tok ${level(deepest).name}`, title: told(origins) }, text);
    if (head && deepest) span.dataset.depth = deepest;
    host.append(span);
  }
}

// The legend, and the switches for what is shown: marks at all, and depths as numbers.
export function legend() {
  byId("legend").replaceChildren(
    ...LEVELS.map(({ name, label }) => el("li", {}, el("span", { class: `tok ${name}` }, "token"), ` ${label}`)),
  );
  const marks = byId("show-marks");
  const numbers = byId("show-numbers");
  const apply = () => {
    byId("playground").classList.toggle("unmarked", !marks.checked);
    byId("playground").classList.toggle("numbered", marks.checked && numbers.checked);
    numbers.disabled = !marks.checked;
  };
  marks.addEventListener("change", apply);
  numbers.addEventListener("change", apply);
  apply();
}
