// The draft tree of a round, drawn: what was proposed, and which path the target took.

import { byId, svg } from "./dom.mjs";
import { NONE, percent, plural, token } from "./format.mjs";
import { chosen, placed } from "./layout.mjs";
import { strip } from "./strip.mjs";

const MOST = 64; // nodes drawn
const LINE = 23; // pixels from line to line
const BOX = 19; // height of a node
const GAP = 22; // pixels between columns
const CHARACTER = 7.3; // width of one, in the monospace of the style sheet
const MARGIN = 6;

export class TreeView {
  #held = null; // the report that is looked at; null: the newest
  #shown = null;
  #history;

  constructor(history) {
    this.#history = history;
    this.hold = byId("hold");
    this.hold.addEventListener("click", () => {
      this.#held = this.#held ? null : (history.rounds.at(-1) ?? null);
      this.draw();
    });
    byId("earlier").addEventListener("click", () => this.#step(-1));
    byId("later").addEventListener("click", () => this.#step(1));
  }

  draw() {
    const rounds = this.#history.rounds;
    const round = this.#held ?? rounds.at(-1);
    this.hold.setAttribute("aria-pressed", String(this.#held !== null));
    this.hold.textContent = this.#held ? "Resume" : "Pause";
    this.hold.disabled = !round;
    const at = rounds.indexOf(round);
    byId("earlier").disabled = !round || at === 0 || rounds.length < 2;
    byId("later").disabled = !this.#held || at === rounds.length - 1;
    if (!round) return;
    byId("tree-title").textContent = round === rounds.at(-1) ? "Draft tree of the last round" : "Draft tree of an earlier round";
    byId("rounds-box").hidden = false;
    strip(byId("rounds"), { rounds, shown: round, choose: (one) => this.#look(one) });
    if (round === this.#shown) return;
    this.#shown = round;
    byId("tree-empty").hidden = true;
    this.#facts(round.report);
    this.#picture(round.report.tree);
  }

  #step(by) {
    const rounds = this.#history.rounds;
    if (!rounds.length) return;
    const at = this.#held ? rounds.indexOf(this.#held) : rounds.length - 1;
    this.#look(rounds[Math.min(rounds.length - 1, Math.max(0, at + by))]);
  }

  #look(round) {
    this.#held = round;
    this.draw();
  }

  #facts(report) {
    const { tree } = report;
    const accepted = tree.path.filter((node) => node !== 0).length;
    byId("tree-facts").textContent = [
      report.arm,
      `${plural(tree.parents.length - 1, "node")} drafted`,
      `${accepted} accepted`,
      `${plural(accepted + 1, "token")} this round`,
    ].filter(Boolean).join(" · ");
  }

  #picture(drafted) {
    const tree = withNext(drafted);
    const bonus = tree === drafted ? -1 : tree.parents.length - 1;
    const nodes = chosen(tree, MOST + 1);
    const { places, lines, columns } = placed(tree, nodes);
    const path = new Set([0, ...tree.path]);
    const kind = (node) => (node === 0 || node === bonus ? " bonus" : path.has(node) ? " taken" : "");
    const labels = new Map(nodes.map((node) => [node, token(tree.tokens[node] ?? "?")]));
    const widths = Array(columns).fill(0);
    for (const node of nodes) {
      const { column } = places.get(node);
      widths[column] = Math.max(widths[column], Array.from(labels.get(node)).length * CHARACTER + 10);
    }
    const lefts = [];
    widths.reduce((left, width, column) => {
      lefts[column] = left;
      return left + width + GAP;
    }, MARGIN);
    const wide = Math.ceil(lefts.at(-1) + widths.at(-1) + MARGIN);
    const high = lines * LINE + 2 * MARGIN + 14;
    const middle = (node) => MARGIN + 14 + places.get(node).line * LINE + LINE / 2;
    const right = (node) => lefts[places.get(node).column] + Array.from(labels.get(node)).length * CHARACTER + 10;

    const links = [];
    const boxes = [];
    for (const node of nodes) {
      const left = lefts[places.get(node).column];
      const y = middle(node);
      const taken = path.has(node);
      if (node !== 0) {
        const parent = tree.parents[node];
        const from = right(parent);
        // Siblings share the way down, so that many of them are still one line.
        const turn = left - GAP / 2;
        const down = y === middle(parent) ? "" : `H${turn}V${y - 5}Q${turn} ${y} ${turn + 5} ${y}`;
        links.push(svg("path", { class: taken ? "link taken" : "link", d: `M${from} ${middle(parent)}${down}H${left}` }));
      }
      const label = labels.get(node);
      boxes.push(svg(
        "g",
        { class: `node${kind(node)}` },
        svg("title", {}, node === bonus ? `${JSON.stringify(tree.tokens[node])}: the bonus token, chosen by the target` : this.#told(tree, node, taken)),
        svg("rect", { x: left, y: y - BOX / 2, width: right(node) - left, height: BOX, rx: 3 }),
        svg("text", { x: left + 5, y: y + 4.1 }, label),
      ));
    }
    const depths = widths.map((width, column) =>
      svg("text", { class: "depth", x: lefts[column] + 1, y: MARGIN + 8 }, column === 0 ? "root" : String(column)));
    const accepted = drafted.path.filter((node) => node !== 0);
    const words = accepted.map((node) => tree.tokens[node]).join("");
    const picture = svg(
      "svg",
      {
        width: wide,
        height: high,
        viewBox: `0 0 ${wide} ${high}`,
        role: "img",
        "aria-label":
          `Draft tree: ${plural(drafted.parents.length - 1, "node")}, ${Math.max(0, ...drafted.depths)} deep; ` +
          (accepted.length ? `accepted ${accepted.length}: “${words}”` : "none accepted"),
      },
      ...depths,
      ...links.sort((one, other) => one.classList.contains("taken") - other.classList.contains("taken")),
      ...boxes,
    );
    byId("tree").replaceChildren(picture);
    const hidden = tree.parents.length - nodes.length;
    byId("tree-note").textContent = hidden
      ? `Drawn: the accepted path and the most probable nodes; ${plural(hidden, "node")} more not drawn.`
      : "";
  }

  #told(tree, node, taken) {
    if (node === 0) return `root: ${JSON.stringify(tree.tokens[0])}, chosen by the target in the round before`;
    const chance = tree.logprobs ? percent(Math.exp(tree.logprobs[node])) : NONE;
    return `${JSON.stringify(tree.tokens[node])} at depth ${tree.depths[node]}, ` +
      `prefix probability ${chance}${taken ? ", accepted" : ""}`;
  }
}

// The tree with the target's next choice after its path, where the server tells it.
function withNext(tree) {
  if (tree.next === undefined || tree.next === null) return tree;
  const last = tree.path.at(-1) ?? 0;
  return {
    tokens: [...tree.tokens, tree.next],
    parents: [...tree.parents, last],
    depths: [...tree.depths, tree.depths[last] + 1],
    logprobs: tree.logprobs && [...tree.logprobs, tree.logprobs[last]],
    path: [...tree.path, tree.parents.length],
  };
}
