// One prompt answered twice, drafting on and off: the same text, and what it took.

import { parting } from "./answer.mjs";
import { swap } from "./busy.mjs";
import { fromStart } from "./charts.mjs";
import { byId, el } from "./dom.mjs";
import { figure, plural, seconds } from "./format.mjs";
import { run, tell } from "./run.mjs";
import { gapAt } from "./tie.mjs";
import { drawnSeed, sampling } from "./settings.mjs";

const LANES = ["on", "off"];
const NEAR = 0.25; // between log-probabilities: two steps of bfloat16 at logits of 16 to 32

export class Race {
  #control = null;
  #model;
  #drafting;

  constructor({ model, drafting }) {
    this.#model = model;
    this.#drafting = drafting;
    this.note = byId("race-note");
    byId("race-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#start();
    });
    byId("race-input").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#start();
    });
    byId("race-stop").addEventListener("click", () => this.#control?.abort());
  }

  async #start() {
    const words = byId("race-input").value.trim();
    if (!words || this.#control) return;
    let fields;
    try {
      fields = { seed: drawnSeed(), ...sampling() };
    } catch (error) {
      this.#say(error.message, "failed");
      return;
    }
    const set = this.#drafting();
    const on = { ...set, method: set.method === "off" ? "auto" : set.method };
    if (on.drafter === null) delete on.drafter;
    const overrides = { on, off: { method: "off" } };
    byId("race-on-name").textContent = `Drafting on: ${on.method}`;
    for (const lane of LANES) {
      byId(`race-${lane}`).replaceChildren();
      byId(`race-${lane}-figures`).textContent = "";
    }
    byId("race-result").hidden = false;
    this.#busy(new AbortController());
    const answers = {};
    const body = { model: this.#model(), messages: [{ role: "user", content: words }], ...fields };
    const go = async (lane) => {
      byId(`race-${lane}-figures`).textContent = "running…";
      answers[lane] = await run({ ...body, ddtree: overrides[lane] }, byId(`race-${lane}`), this.#control.signal, (answer) => {
        answers[lane] = answer;
        tell(byId(`race-${lane}-figures`), answer);
        this.#draw(answers);
      });
      tell(byId(`race-${lane}-figures`), answers[lane]);
    };
    try {
      // The prompt is read beforehand: else whoever comes second finds it in the prefix cache, and has a head start.
      this.#say("Reading the prompt…");
      await run({ ...body, max_tokens: 1, ddtree: overrides.on }, el("div"), this.#control.signal);
      if (this.#control.signal.aborted) this.#say("Stopped.");
      else if (byId("race-at-once").checked) {
        this.#say("Both are running, and share the machine.");
        await Promise.all(LANES.map(go));
      } else {
        this.#say("First with drafting…");
        await go("on");
        if (!this.#control.signal.aborted) {
          this.#say("Now without…");
          await go("off");
        }
      }
      if (this.#control.signal.aborted) this.#say("Stopped.");
      else await this.#judge(answers, words, fields);
    } catch (error) {
      this.#control.abort();
      this.#say(error.message, "failed");
      for (const lane of LANES) if (!answers[lane]?.reason) byId(`race-${lane}-figures`).textContent = "not finished";
    } finally {
      this.#busy(null);
    }
  }

  #draw(answers) {
    const tokens = (lane) => answers[lane]?.marks ?? [];
    fromStart(byId("race-chart"), {
      series: [
        { points: tokens("on"), name: "drafting on" },
        { points: tokens("off"), name: "off" },
      ],
      formatX: seconds,
      formatY: figure,
      label: "Tokens over seconds since each request began",
    });
  }

  async #judge({ on, off }, words, fields) {
    const at = parting(on.text, off.text);
    const [fast, plain] = [on.figures(), off.figures()];
    const gain = fast.rate / plain.rate;
    const pace = `Drafting: ${gain.toFixed(2)}× the tokens per second (${figure(fast.rate)} against ${figure(plain.rate)}).`;
    if (at < 0) {
      this.#say(`Same text, ${plural(on.text.length, "character")}. ${pace}`, "good");
      return;
    }
    const parted = `The first ${plural(at, "character")} are the same, then comes “${piece(on.text, at)}” against “${piece(off.text, at)}”`;
    this.#say(`${parted}.`);
    const request = { model: this.#model(), content: words, fields };
    const gap = await gapAt(request, on.ids, off.ids, this.#control.signal).catch(() => null);
    if (gap === null) {
      this.#say(`${parted}. In bfloat16 and float16, rounding can swap scores that nearly tie; in float32 this is a defect.`, "failed");
    } else if (gap <= NEAR) {
      this.#say(
        `${pace} ${parted}, where the target's two best scores are ${gap.toFixed(3)} apart: a near-tie, which rounding ` +
          "decides in bfloat16 and float16.",
        "near",
      );
    } else {
      this.#say(`${parted}, and the target's two best scores are ${gap.toFixed(3)} apart there: more than rounding explains.`, "failed");
    }
  }

  #busy(control) {
    this.#control = control;
    swap(byId("race-go"), byId("race-stop"), control !== null);
  }

  #say(text, kind = "") {
    this.note.textContent = text;
    this.note.className = `note ${kind}`;
  }
}

// What a text goes on with from `at`, begun at a word.
function piece(text, at) {
  const from = text.lastIndexOf(" ", at - 1) + 1;
  return `${text.slice(Math.max(from, at - 20), at + 12).trim()}…`;
}
