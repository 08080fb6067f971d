// The live figures: charts and tables, drawn from what was kept.

import { bars, overTime } from "./charts.mjs";
import { byId, el } from "./dom.mjs";
import { bytes, figure, NONE, percent, seconds } from "./format.mjs";
import { gain } from "./history.mjs";

const CHOICES = 8; // newest ones listed

export class Live {
  constructor(history) {
    this.history = history;
  }

  draw(now) {
    const { state } = this.history;
    if (!state) return;
    const rolling = state.rolling ?? {};
    this.#vitals(state);
    this.#head("tau", figure(rolling.tau || NaN));
    this.#head("rate", figure(rolling.tokens_per_second || NaN));
    const { drafted = {}, plain = {} } = rolling;
    this.#head("ttft", seconds(drafted.ttft_p50 || NaN));
    this.#head("tpot", seconds(drafted.tpot_p50 || NaN));
    const chart = (name, format, label, reference, nothing) => overTime(byId(`${name}-chart`), {
      series: [{ lines: this.history.lines(name, now), name }], format, label, reference, nothing,
    });
    chart("tau", figure, `Tokens per round over two minutes, now ${figure(rolling.tau)}`, { value: 1, label: "autoregressive: 1" });
    chart("rate", figure, `Tokens per second over two minutes, now ${figure(rolling.tokens_per_second)}`,
      level("autoregressive, one answer", rolling.by_arm?.off?.tokens_per_second, figure));
    chart("ttft", seconds, `Time to first token over two minutes, now ${seconds(drafted.ttft_p50 ?? NaN)}`,
      level("autoregressive", plain.ttft_p50, seconds), "no drafted answer has ended yet");
    chart("tpot", seconds, `Time per output token over two minutes, now ${seconds(drafted.tpot_p50 ?? NaN)}`,
      level("autoregressive", plain.tpot_p50, seconds), "no drafted answer has ended yet");
    const times = gain(rolling);
    byId("gain-box").hidden = !times;
    byId("gain").textContent = times ? `${times.toFixed(2)}×` : "";
    byId("tpot-note").textContent = times
      ? `Drafted answers decode ${times.toFixed(2)}× as fast as autoregressive ones.`
      : "To compare, run a race: it decodes with and without drafting.";
    this.#depths(state.accepted_per_depth ?? []);
    this.#split();
    this.#arms(rolling.by_arm ?? {});
    this.#choices(state.switches ?? [], state.controller ?? []);
  }

  #head(name, text) {
    byId(`${name}-now`).textContent = text;
  }

  #vitals({ model, rows, waiting, kv }) {
    byId("model").textContent = model ?? NONE;
    byId("rows").textContent = rows ?? NONE;
    byId("waiting").textContent = waiting ?? NONE;
    byId("kv").textContent = kv?.limit ? `${bytes(kv.used)} of ${bytes(kv.limit)}` : bytes(kv?.used);
  }

  #depths(counts) {
    const deepest = counts.findLastIndex((share) => share > 0) + 1;
    bars(byId("depths-chart"), {
      values: counts.map((share, index) => ({
        name: String(index + 1),
        value: share,
        told: `${percent(share)} of rounds accepted a node at depth ${index + 1}`,
      })),
      top: 1,
      format: percent,
      label: `Share of rounds that accepted a node at each depth: ${
        counts.slice(0, deepest).map((share, index) => `${index + 1}: ${percent(share)}`).join(", ") || NONE}`,
      nothing: "nothing accepted yet",
    });
    this.#head("depths", deepest ? `to ${deepest}` : NONE);
  }

  #split() {
    const parts = this.history.split();
    const total = parts.reduce((sum, part) => sum + part.seconds, 0);
    this.#head("split", total ? seconds(total) : NONE);
    byId("split-bar").replaceChildren(
      ...parts.map(({ share }, index) => {
        const piece = el("span", { class: `p${index % 6}` });
        piece.style.flexGrow = share;
        return piece;
      }),
    );
    byId("split-bar").hidden = !parts.length;
    byId("split-list").replaceChildren(
      ...(parts.length
        ? parts.map(({ part, share, seconds: spent }, index) =>
            el("li", {}, el("i", { class: `p${index % 6}` }), el("span", {}, part),
              el("span", { class: "number" }, percent(share)), el("span", { class: "number dim" }, seconds(spent))))
        : [el("li", { class: "empty" }, "no rounds in the last two minutes")]),
    );
  }

  #arms(arms) {
    const rows = Object.entries(arms).sort((one, other) => (other[1].rounds ?? 0) - (one[1].rounds ?? 0));
    byId("arms").replaceChildren(...(rows.length ? rows.map(([name, arm]) => el("tr", {},
      el("th", { scope: "row" }, name),
      el("td", {}, figure(arm.rounds)),
      el("td", {}, figure(arm.tau)),
      el("td", {}, figure(arm.tokens_per_second)),
    )) : [el("tr", {}, el("td", { class: "empty", colspan: 4 }, "no rounds yet"))]));
  }

  // Changes of arm, newest first, and then the arms of loads that never changed theirs.
  #choices(switches, groups) {
    const changed = switches.map((one) => ({ ...one, arm: `${one.before} → ${one.after}` })).reverse();
    const kept = groups.filter(({ at }) => !Number.isFinite(at));
    const newest = [...changed, ...kept].slice(0, CHOICES);
    byId("choices").replaceChildren(...(newest.length ? newest.map(({ at, load, arm, reason }) => el("tr", {},
      el("td", { class: "dim" }, when(at)),
      el("td", {}, load === null || load === undefined ? NONE : String(load)),
      el("th", { scope: "row" }, arm ?? NONE),
      el("td", { class: "reason" }, reason ?? ""),
    )) : [el("tr", {}, el("td", { class: "empty", colspan: 4 }, "no choice yet: only “auto” chooses"))]));
  }
}

// A line to compare with, when it was measured.
const level = (name, value, format) => (value ? { value, label: `${name}: ${format(value)}` } : null);

// A time of day when `at` is one (seconds since 1970), a round's number otherwise.
export function when(at) {
  if (!Number.isFinite(at)) return NONE;
  return at > 1e9 ? new Date(at * 1000).toLocaleTimeString() : `#${Math.round(at)}`;
}
