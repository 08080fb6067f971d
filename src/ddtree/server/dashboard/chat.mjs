// The chat: a conversation with the model, drafted for as the server is set, so that the controls act in mid-answer.

import { swap } from "./busy.mjs";
import { byId, el } from "./dom.mjs";
import { run, tell } from "./run.mjs";
import { sampling } from "./settings.mjs";

export class Chat {
  #messages = [];
  #control = null;
  #model;

  constructor(model) {
    this.#model = model; // () => name
    this.log = byId("chat-log");
    this.input = byId("chat-input");
    this.note = byId("chat-note");
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    byId("chat-stop").addEventListener("click", () => this.#control?.abort());
    byId("chat-clear").addEventListener("click", () => this.#clear());
    byId("examples").addEventListener("click", ({ target }) => {
      if (!(target instanceof HTMLButtonElement)) return;
      this.input.value = target.textContent;
      this.input.focus();
      this.#send();
    });
  }

  async #send() {
    const words = this.input.value.trim();
    if (!words || this.#control) return;
    let fields;
    try {
      fields = sampling();
    } catch (error) {
      this.#say(error.message, true);
      return;
    }
    this.#say("");
    byId("chat-empty").hidden = true;
    const asked = this.#messages.length;
    this.#messages.push({ role: "user", content: words });
    const question = this.#entry("you", words);
    const text = el("div", { class: "text" });
    const figures = el("p", { class: "figures" });
    const reply = el("li", { class: "answer" }, el("h4", {}, this.#model()), text, figures);
    this.log.append(reply);
    this.input.value = "";
    this.#busy(new AbortController());
    try {
      const body = { model: this.#model(), messages: this.#messages, ...fields };
      const answer = await run(body, text, this.#control.signal, (answer) => {
        tell(figures, answer);
        this.#follow();
      });
      this.#messages.push({ role: "assistant", content: answer.text });
      tell(figures, answer);
      this.#say(answer.reason === "stopped" ? "Stopped." : "Answer complete.");
    } catch (error) {
      // The conversation stays as it was before, and the words come back to be sent again.
      this.#messages.length = asked;
      question.classList.add("unsent");
      if (!text.hasChildNodes()) text.remove();
      figures.textContent = error.message;
      figures.classList.add("failed");
      if (!this.input.value) this.input.value = words;
      this.#say(error.message, true);
    } finally {
      this.#busy(null);
      this.#follow();
    }
  }

  #entry(name, words) {
    const entry = el("li", { class: "question" }, el("h4", {}, name), el("div", { class: "text" }, words));
    this.log.append(entry);
    this.log.scrollTop = this.log.scrollHeight;
    return entry;
  }

  // Keep the end in view, unless the reader has scrolled back.
  #follow() {
    if (this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 120) this.log.scrollTop = this.log.scrollHeight;
  }

  #busy(control) {
    this.#control = control;
    swap(byId("chat-send"), byId("chat-stop"), control !== null);
    byId("chat-clear").disabled = control !== null;
  }

  #clear() {
    this.#messages = [];
    this.log.replaceChildren();
    byId("chat-empty").hidden = false;
    this.#say("");
    this.input.focus();
  }

  #say(text, failed = false) {
    this.note.textContent = text;
    this.note.classList.toggle("failed", failed);
  }
}
