// One streamed answer: its text, and what can be measured of it from here.

import { Aligner } from "./origins.mjs";

export class Answer {
  constructor(started) {
    this.started = started; // seconds
    this.first = null;
    this.last = started;
    this.text = "";
    this.tokens = 0;
    this.origins = [];
    this.ids = [];
    this.marks = []; // [seconds since the start, tokens by then]
    this.reason = null;
    this.cached = 0;
    this.aligner = new Aligner();
  }

  // Take a chunk in; gives its text as segments.
  add(chunk, now) {
    const choice = chunk.choices?.[0];
    const text = choice?.delta?.content ?? "";
    const details = choice?.ddtree ?? chunk.ddtree;
    const came = details?.tokens?.length ?? (text ? 1 : 0);
    if (came) {
      this.first ??= now;
      this.last = now;
      this.tokens += came;
      this.origins.push(...(details?.origins ?? []));
      this.ids.push(...(details?.tokens ?? []));
      this.marks.push([now - this.started, this.tokens]);
    }
    if (choice?.finish_reason) this.reason = choice.finish_reason;
    if (chunk.usage) {
      this.tokens = chunk.usage.completion_tokens ?? this.tokens;
      this.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
    }
    this.text += text;
    return this.aligner.add(text, details);
  }

  // Seconds; tau is null when the server told no origins.
  figures() {
    const total = this.last - this.started;
    const ttft = this.first === null ? null : this.first - this.started;
    const tpot = this.tokens > 1 ? (this.last - this.first) / (this.tokens - 1) : null;
    const bonus = this.origins.filter((origin) => origin === 0).length;
    return {
      tokens: this.tokens,
      total,
      ttft,
      tpot,
      rate: total > 0 && this.tokens ? this.tokens / total : null,
      tau: bonus > 1 ? (this.origins.length - 1) / (bonus - 1) : null, // the first token is the prompt's, not a round's
    };
  }
}

// Where two texts part: the index of the first character that differs, or -1 when they are the same.
export function parting(one, other) {
  if (one === other) return -1;
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  return at;
}
