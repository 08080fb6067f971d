// How each token of an answer came: accepted from the draft at some depth, or chosen by the target itself (bonus).

export const LEVELS = [
  { name: "bonus", least: 0, label: "target's choice" },
  { name: "d1", least: 1, label: "depth 1" },
  { name: "d2", least: 2, label: "2–3" },
  { name: "d4", least: 4, label: "4–7" },
  { name: "d8", least: 8, label: "8+" },
];

export function level(origin) {
  return LEVELS.findLast((one) => origin >= one.least) ?? LEVELS[0];
}

export function told(origins) {
  if (origins.length === 1) return origins[0] ? `accepted at depth ${origins[0]}` : "bonus token";
  const deepest = Math.max(...origins);
  const how = deepest ? `accepted to depth ${deepest}${origins.includes(0) ? ", and a bonus token" : ""}` : "bonus";
  return `${origins.length} tokens: ${how}`;
}

const encoder = new TextEncoder();
const decoder = new TextDecoder();

// The bytes of a token as the server names it: its text, or `bytes:\xe2\x82` for a part of a character.
export function bytesOf(text) {
  if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(text)) return encoder.encode(text);
  return Uint8Array.from(text.slice(6).match(/[0-9a-f]{2}/g), (pair) => parseInt(pair, 16));
}

// Lays final text over the tokens that made it. Text may lag behind its tokens (an incomplete character, a possible
// stop string), so tokens wait until their text has come; one whose text does not come (a special token) is passed over.
export class Aligner {
  #waiting = []; // {data: bytes still to come, origins, begun}

  // Segments [{text, origins, head}] of newly final `text`; `details` are the chunk's {origins, texts}. One that goes
  // on with a token begun before is no head; one of no known token has no origins. Without the tokens' own texts all
  // that has come is one segment.
  add(text, details) {
    const origins = details?.origins ?? [];
    const texts = details?.texts ?? [];
    const known = texts.length === origins.length;
    if (known) origins.forEach((origin, at) => this.#expect(bytesOf(texts[at]), [origin]));
    else this.#expect(null, origins);
    const data = encoder.encode(text);
    const segments = [];
    let at = 0;
    while (at < data.length) {
      const taken = this.#take(data, at);
      segments.push({ text: decoder.decode(data.subarray(at, at + taken.length)), origins: taken.origins, head: taken.head });
      at += taken.length;
    }
    return segments;
  }

  #expect(data, origins) {
    if (data === null || data.length) this.#waiting.push({ data, origins, begun: false });
  }

  #take(data, at) {
    const found = this.#waiting.findIndex((one) => matches(one, data, at));
    if (found < 0) return { length: boundary(data, at + 1) - at, origins: [], head: true };
    this.#waiting.splice(0, found);
    const next = this.#waiting[0];
    if (next.data === null) {
      const origins = this.#waiting.flatMap((one) => one.origins);
      this.#waiting = [];
      return { length: data.length - at, origins, head: true };
    }
    if (!next.begun && next.data[0] === SPACE && data[at] !== SPACE) next.data = next.data.subarray(1);
    // Tokens that share a character are one segment.
    let length = next.data.length;
    let used = 1;
    while (at + length < data.length && boundary(data, at + length) !== at + length && this.#waiting[used]?.data) {
      length += this.#waiting[used].data.length;
      used += 1;
    }
    const origins = this.#waiting.slice(0, used).flatMap((one) => one.origins);
    const head = !next.begun;
    if (at + length > data.length) {
      next.data = next.data.subarray(data.length - at);
      next.begun = true;
      length = data.length - at;
    } else {
      this.#waiting.splice(0, used);
      length = boundary(data, at + length) - at;
    }
    return { length, origins, head };
  }
}

const SPACE = 32;

// Whether the text from `at` on begins with the token's, as far as both go. Some vocabularies drop the first space.
function matches({ data: expected, begun }, data, at) {
  if (expected === null) return true;
  const same = (bytes) => bytes.length > 0 && bytes.every((byte, index) => at + index >= data.length || data[at + index] === byte);
  return same(expected) || (!begun && expected[0] === SPACE && same(expected.subarray(1)));
}

// The first start of a character at or after `at`.
function boundary(data, at) {
  while (at < data.length && (data[at] & 0xc0) === 0x80) at += 1;
  return at;
}
