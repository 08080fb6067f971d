// The server's drafting: shown as it is, changed as it is moved. The server's word wins unless a change is on its way.

import { byId, el } from "./dom.mjs";
import { ask } from "./server.mjs";

const BUDGETS = [0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024];
const PAUSE = 150; // ms that a slider rests before its value is sent
const UNDERWAY = 500; // ms after a change in which a state may still tell what was before

export class Drafting {
  #current = { method: "auto", depth: 16, budget: "auto", drafter: null };
  #timer = null;
  #sending = 0;
  #edited = 0;
  #changes = {}; // not sent yet
  #settled = -Infinity; // when the last change was answered

  constructor() {
    this.methods = byId("methods");
    this.depth = byId("depth");
    this.budget = byId("budget");
    this.automatic = byId("budget-auto");
    this.drafter = byId("drafter");
    this.note = byId("drafting-note");
    this.budget.max = BUDGETS.length - 1;
    this.methods.addEventListener("change", () => this.#edit({ method: this.#method() }, 0));
    this.depth.addEventListener("input", () => this.#edit({ depth: Number(this.depth.value) }));
    this.budget.addEventListener("input", () => this.#edit({ budget: BUDGETS[this.budget.value] }));
    this.automatic.addEventListener("change", () => {
      this.#edit({ budget: this.automatic.checked ? "auto" : BUDGETS[this.budget.value] }, 0);
    });
    this.drafter.addEventListener("change", () => this.#edit({ drafter: this.drafter.value || null }, 0));
  }

  get current() {
    return this.#current;
  }

  // What the server says.
  told(drafting, drafters) {
    this.#list(drafters);
    const settled = performance.now() - this.#settled > UNDERWAY;
    if (this.#timer === null && this.#sending === 0 && settled) this.#show(drafting);
  }

  #method() {
    return this.methods.querySelector("input:checked").value;
  }

  #edit(change, pause = PAUSE) {
    this.#show(change);
    Object.assign(this.#changes, change);
    this.#edited += 1;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#send(), pause);
  }

  async #send() {
    this.#timer = null;
    this.#sending += 1;
    const edit = this.#edited;
    const body = this.#changes; // nothing else, as others may have changed that
    this.#changes = {};
    try {
      const response = await ask("api/drafting", { body });
      const accepted = await response.json();
      if (edit === this.#edited) {
        this.#show(accepted);
        this.#settled = performance.now();
        this.#say("In use from the next round on.");
      }
    } catch (error) {
      this.#say(`Not changed: ${error.message}`, true);
    } finally {
      this.#sending -= 1;
    }
  }

  #say(text, failed = false) {
    this.note.textContent = text;
    this.note.classList.toggle("failed", failed);
  }

  #show(drafting) {
    this.#current = { ...this.#current, ...drafting };
    const { method, depth, budget, drafter } = this.#current;
    for (const radio of this.methods.querySelectorAll("input")) radio.checked = radio.value === method;
    this.depth.value = depth;
    byId("depth-value").textContent = depth;
    this.automatic.checked = budget === "auto";
    if (budget !== "auto") this.budget.value = BUDGETS.findLastIndex((one) => one <= budget);
    this.budget.classList.toggle("idle", budget === "auto");
    byId("budget-value").textContent = budget === "auto" ? "auto" : budget;
    this.budget.setAttribute("aria-valuetext", budget === "auto" ? "auto" : `${budget} nodes`);
    if (![...this.drafter.options].some((one) => one.value === (drafter ?? ""))) {
      this.drafter.append(el("option", { value: drafter }, drafter));
    }
    this.drafter.value = drafter ?? "";
    const off = method === "off";
    byId("drafting").classList.toggle("off", off);
  }

  #list(drafters) {
    const wanted = ["", ...drafters];
    if (wanted.join("\n") === [...this.drafter.options].map((one) => one.value).join("\n")) return;
    const all = drafters.length === 1 ? drafters[0] : drafters.length ? "all loaded" : "none loaded";
    this.drafter.replaceChildren(
      ...wanted.filter((name) => name === "" || drafters.length > 1)
        .map((name) => el("option", { value: name }, name || all)),
    );
    this.drafter.disabled = drafters.length < 2;
    this.drafter.value = this.#current.drafter ?? "";
  }
}
