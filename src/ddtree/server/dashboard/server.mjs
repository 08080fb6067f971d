// What the page asks of its server. Addresses are relative: the page also works behind a proxy's prefix.

import { events } from "./sse.mjs";

const KEY = "ddtree-api-key";
const SILENCE = 6000; // ms without a report after which the connection counts as dead; state comes every second
const UNSEEN = 5000; // ms after which a page that nobody sees gives its connection up
const PATIENCE = [500, 1000, 2000, 4000]; // ms before each try to connect again

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Kept until the tab is closed; where storage is forbidden, until the page is left.
let held = "";
try {
  held = sessionStorage.getItem(KEY) ?? "";
} catch {
  // No storage.
}

export const key = {
  get: () => held,
  set(value) {
    held = value;
    try {
      if (value) sessionStorage.setItem(KEY, value);
      else sessionStorage.removeItem(KEY);
    } catch {
      // No storage.
    }
  },
};

export async function ask(path, { body, signal } = {}) {
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.", 0);
  }
  if (!response.ok) throw new ServerError(await complaint(response), response.status);
  return response;
}

async function complaint(response) {
  if (response.status === 401) return `The server ${key.get() ? "refuses this" : "wants an"} API key: enter ${key.get() ? "another" : "it"} at the top.`;
  const text = await response.text().catch(() => "");
  try {
    const { error, detail } = JSON.parse(text);
    const said = error?.message ?? error ?? detail;
    if (typeof said === "string") return said;
  } catch {
    // Not JSON: a proxy's page, say.
  }
  const wait = response.headers.get("retry-after");
  return `The server answered ${response.status}${wait ? `; try again in ${wait} s` : ""}.`;
}

// The chunks of a streamed chat completion, as they come.
export async function* chat(body, signal) {
  const response = await ask("v1/chat/completions", { body, signal });
  try {
    for await (const { data } of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message ?? String(chunk.error), 0);
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
  }
  throw new ServerError("The connection was lost before the answer ended.", 0);
}

// Round reports and states, for as long as the page lives; connects again whenever the connection ends. Browsers open
// six connections to a server at most, so tabs in the background leave theirs to the others.
// `told(kind, value)`: kind "state" or "round" with the report, "link" with {up, message, status}.
export function follow(told) {
  let attempt = 0;
  let current = null;
  let wake = () => {};

  async function listen() {
    const control = new AbortController();
    current = control;
    let timer = setTimeout(() => control.abort(), SILENCE);
    try {
      const response = await ask("api/events", { signal: control.signal });
      for await (const { name, data } of events(response.body)) {
        clearTimeout(timer);
        timer = setTimeout(() => control.abort(), SILENCE);
        attempt = 0;
        const value = JSON.parse(data);
        try {
          told("link", { up: true });
          told(kindOf(name, value), value);
        } catch (error) {
          reportError(error); // a fault of the page, not of the connection
        }
      }
      return new ServerError("The connection has ended.", 0);
    } catch (error) {
      if (error.name === "AbortError") return new ServerError("The server is silent.", 0);
      return error instanceof ServerError ? error : new ServerError("The connection was lost.", 0);
    } finally {
      clearTimeout(timer);
      control.abort();
    }
  }

  let leaving = null;
  document.addEventListener("visibilitychange", () => {
    clearTimeout(leaving);
    if (document.hidden) leaving = setTimeout(() => current?.abort(), UNSEEN);
  });
  const seen = () => new Promise((resolve) => {
    if (!document.hidden) resolve();
    else document.addEventListener("visibilitychange", () => resolve(seen()), { once: true });
  });

  (async () => {
    for (;;) {
      await seen();
      const { message, status } = await listen();
      told("link", { up: false, message, status });
      const pause = PATIENCE[Math.min(attempt, PATIENCE.length - 1)];
      attempt += 1;
      await new Promise((resolve) => {
        wake = resolve;
        setTimeout(resolve, pause);
      });
    }
  })();

  // Connect anew at once, with another key for instance.
  return () => {
    attempt = 0;
    current?.abort();
    wake();
  };
}

export function kindOf(name, value) {
  if (name === "state" || name === "round") return name;
  return value && "drafting" in value ? "state" : "round";
}
