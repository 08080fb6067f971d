// The rounds that can be looked back at, as bars: the token that the target added, and on it those accepted.

import { svg } from "./dom.mjs";
import { plural } from "./format.mjs";
import { ROUNDS } from "./history.mjs";

const HIGH = 58;
const TOP = 14;
const LEFT = 20;

// `shown` is marked; a click calls `choose(round)`.
export function strip(host, { rounds, shown, choose }) {
  const made = rounds.map(({ report }) => report.tree.path.filter((node) => node !== 0).length + 1);
  const most = Math.max(4, ...made);
  const wide = Math.max(200, Math.floor(host.clientWidth));
  const step = (wide - LEFT) / ROUNDS;
  const unit = (HIGH - TOP) / most;
  const at = rounds.indexOf(shown);
  const label = `Tokens of the last ${plural(rounds.length, "drafted round")}${at < 0 ? "" : `; the one shown above made ${made[at]}`}`;
  const picture = svg("svg", { width: wide, height: HIGH, viewBox: `0 0 ${wide} ${HIGH}`, role: "img", "aria-label": label });
  for (const value of [1, most]) {
    const y = HIGH - value * unit;
    picture.append(
      svg("line", { class: value === 1 ? "reference" : "grid", x1: LEFT, x2: wide, y1: y, y2: y }),
      svg("text", { class: "tick", x: LEFT - 5, y: y + 3.5, "text-anchor": "end" }, value),
    );
  }
  rounds.forEach((round, index) => {
    const x = LEFT + index * step;
    const bar = svg("g", { class: round === shown ? "round shown" : "round" },
      svg("title", {}, `${plural(made[index], "token")} in this round`),
      svg("rect", { class: "hit", x, width: step, y: 0, height: HIGH }),
      svg("rect", { class: "own", x: x + step * 0.12, width: step * 0.76, y: HIGH - unit, height: unit }),
      svg("rect", { class: "bar", x: x + step * 0.12, width: step * 0.76, y: HIGH - made[index] * unit, height: (made[index] - 1) * unit }),
    );
    if (round === shown) bar.append(svg("text", { class: "mark", x: x + step / 2, y: HIGH - made[index] * unit - 3, "text-anchor": "middle" }, "▾"));
    bar.addEventListener("click", () => choose(round));
    picture.append(bar);
  });
  host.replaceChildren(picture);
}
