// Server-sent events out of a body that arrives in pieces. EventSource is not used: it can send no API key.

export class Parser {
  #rest = "";
  #data = [];
  #name = "";

  // The events that `text` completes: a list of {name, data}.
  push(text) {
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    const found = [];
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) found.push({ name: this.#name || "message", data: this.#data.join("\n") });
        this.#data = [];
        this.#name = "";
        continue;
      }
      const colon = line.indexOf(":");
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (field === "data") this.#data.push(value);
      else if (field === "event") this.#name = value;
    }
    return found;
  }
}

export async function* events(body) {
  const parser = new Parser();
  const decoder = new TextDecoder();
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
