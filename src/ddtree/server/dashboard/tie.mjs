// Two answers of one request part: how close were the target's two best choices there?

import { ask } from "./server.mjs";

// The distance of the two best log-probabilities at the first token that differs; null where that tells nothing:
// when the answers were drawn at random, or one is the start of the other.
export async function gapAt({ model, content, fields }, one, other, signal) {
  const at = one.findIndex((token, index) => token !== other[index]);
  if (fields.temperature !== 0 || at < 0 || at >= other.length) return null;
  const asked = { model, messages: [{ role: "user", content }] };
  const { tokens } = await (await ask("tokenize", { body: asked, signal })).json();
  const body = { model, prompt: [...tokens, ...one.slice(0, at)], max_tokens: 1, temperature: 0, logprobs: 2, ddtree: { method: "off" } };
  const { choices } = await (await ask("v1/completions", { body, signal })).json();
  const [best, second] = Object.values(choices[0].logprobs.top_logprobs[0]).sort((left, right) => right - left);
  return Number.isFinite(best - second) ? best - second : null;
}
