// What is kept of reports and states: enough to draw the last minutes. Times are the page's own, in seconds.

export const SPAN = 120; // seconds that the charts look back
export const ROUNDS = 80; // round reports with a tree that can be looked back at
const GAP = 3.5; // seconds between two states that are drawn as a break

const finite = (value) => (Number.isFinite(value) && value > 0 ? value : null);

export class History {
  constructor() {
    this.state = null;
    this.samples = []; // {at, tau, rate, ttft, tpot}, times of drafted answers
    this.rounds = []; // {at, report}, those with a tree
    this.parts = []; // {at, seconds}
  }

  addState(state, at) {
    this.state = state;
    const rolling = state.rolling ?? {};
    this.samples.push({
      at,
      tau: finite(rolling.tau),
      rate: finite(rolling.tokens_per_second),
      ttft: finite(rolling.drafted?.ttft_p50),
      tpot: finite(rolling.drafted?.tpot_p50),
    });
    // A page that opens later than the last round shows that one all the same.
    if (state.tree && !this.rounds.length) this.rounds.push({ at, report: { tree: state.tree } });
    this.#forget(at);
  }

  addRound(report, at) {
    if (report.tree) {
      this.rounds.push({ at, report });
      if (this.rounds.length > ROUNDS) this.rounds.shift();
    }
    if (report.seconds) this.parts.push({ at, seconds: report.seconds });
    this.#forget(at);
  }

  // Points of one figure as lines: lists of [age in seconds, value], broken where nothing was measured.
  lines(name, now) {
    const lines = [];
    let last = -Infinity;
    for (const sample of this.samples) {
      const value = sample[name];
      if (value === null) {
        last = -Infinity;
        continue;
      }
      if (sample.at - last > GAP) lines.push([]);
      lines.at(-1).push([now - sample.at, value]);
      last = sample.at;
    }
    return lines;
  }

  // Where a round's time goes: [{part, seconds, share}], seconds a round, longest first. Not every round is reported.
  split() {
    const sums = new Map();
    for (const { seconds } of this.parts) {
      for (const [part, spent] of Object.entries(seconds)) sums.set(part, (sums.get(part) ?? 0) + spent);
    }
    const total = [...sums.values()].reduce((sum, spent) => sum + spent, 0);
    return [...sums]
      .filter(([, spent]) => spent > 0)
      .sort((one, other) => other[1] - one[1])
      .map(([part, spent]) => ({ part, seconds: spent / this.parts.length, share: spent / total }));
  }

  #forget(now) {
    while (this.samples.length && now - this.samples[0].at > SPAN) this.samples.shift();
    while (this.parts.length && now - this.parts[0].at > SPAN) this.parts.shift();
  }
}

// How many times as fast drafted answers go on as others; null until both were seen.
export function gain(rolling) {
  const [drafted, plain] = [finite(rolling?.drafted?.tpot_p50), finite(rolling?.plain?.tpot_p50)];
  return drafted && plain && plain / drafted;
}
