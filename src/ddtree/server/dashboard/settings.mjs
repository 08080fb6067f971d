// How answers of the playground are sampled.

import { byId } from "./dom.mjs";

// The request's fields; throws an Error whose message says which field is wrong.
export function sampling() {
  const fields = { temperature: number("temperature", "Temperature"), max_tokens: number("max-tokens", "Max tokens") };
  const seed = byId("seed").value.trim();
  if (seed !== "") fields.seed = number("seed", "Seed");
  return fields;
}

function number(id, name) {
  const input = byId(id);
  if (input.value.trim() === "" || !input.checkValidity()) {
    input.focus();
    throw new Error(`${name} must be ${input.step === "1" ? "a whole number" : "a number"} from ${input.min} to ${input.max}.`);
  }
  return Number(input.value);
}

export const drawnSeed = () => Math.floor(Math.random() * 2 ** 31);
