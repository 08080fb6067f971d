// The dashboard's logic that needs no page. Run with: node --test tests/server/dashboard.test.mjs

import assert from "node:assert/strict";
import { test } from "node:test";

const from = (name) => import(new URL(`../../src/ddtree/server/dashboard/${name}`, import.meta.url));
const { Parser } = await from("sse.mjs");
const { Aligner, bytesOf, level, told } = await from("origins.mjs");
const { Answer, parting } = await from("answer.mjs");
const { chosen, placed } = await from("layout.mjs");
const { History, SPAN, gain } = await from("history.mjs");
const { bytes, figure, seconds, token } = await from("format.mjs");
const { ceiling } = await from("charts.mjs");
const { chat, kindOf, key } = await from("server.mjs");
const { gapAt } = await from("tie.mjs");

const words = (segments) => segments.map(({ text, origins }) => [text, ...origins]);

test("events are found however the stream is cut", () => {
  const stream = 'event: state\r\ndata: {"a":1}\r\n\r\n: waiting\n\ndata: one\ndata: two\n\ndata:[DONE]\n\n';
  const whole = new Parser().push(stream);
  assert.deepEqual(whole, [
    { name: "state", data: '{"a":1}' },
    { name: "message", data: "one\ntwo" },
    { name: "message", data: "[DONE]" },
  ]);
  const parser = new Parser();
  assert.deepEqual([...stream].flatMap((character) => parser.push(character)), whole);
});

test("reports and states are told apart with and without names", () => {
  assert.equal(kindOf("round", {}), "round");
  assert.equal(kindOf("message", { drafting: {} }), "state");
  assert.equal(kindOf("message", { arm: "off" }), "round");
});

test("text is laid over the tokens that made it", () => {
  const aligner = new Aligner();
  assert.deepEqual(words(aligner.add("The", { origins: [0], texts: ["The"] })), [["The", 0]]);
  assert.deepEqual(words(aligner.add(" sky is", { origins: [1, 0], texts: [" sky", " is"] })), [[" sky", 1], [" is", 0]]);
});

test("text that is held back goes to its token when it comes", () => {
  const aligner = new Aligner();
  assert.deepEqual(words(aligner.add("a", { origins: [1, 0], texts: ["a", " STO"] })), [["a", 1]]);
  assert.deepEqual(words(aligner.add(" STORE", { origins: [0], texts: ["RE"] })), [[" STO", 0], ["RE", 0]]);
  const halves = new Aligner();
  const first = halves.add(" hel", { origins: [3], texts: [" hello"] });
  const second = halves.add("lo", { origins: [], texts: [] });
  assert.deepEqual([first[0].head, second[0].head, ...second[0].origins], [true, false, 3]);
});

test("a character made of several tokens is one segment", () => {
  const aligner = new Aligner();
  assert.deepEqual(aligner.add("", { origins: [1, 2], texts: ["bytes:\\xf0\\x9f", "bytes:\\x8c"] }), []);
  assert.deepEqual(words(aligner.add("🌍!", { origins: [3, 0], texts: ["bytes:\\x8d", "!"] })), [["🌍", 1, 2, 3], ["!", 0]]);
  assert.deepEqual([...bytesOf("bytes:\\xe2\\x82")], [0xe2, 0x82]);
  assert.equal(bytesOf("bytes: 3").length, 8);
});

test("tokens without text and dropped first spaces do not shift the rest", () => {
  const aligner = new Aligner();
  const details = { origins: [0, 1, 2, 0], texts: [" The", "<|special|>", " sky", "!"] };
  assert.deepEqual(words(aligner.add("The sky!", details)), [["The", 0], [" sky", 2], ["!", 0]]);
});

test("text of no known token is kept, and so is all text without the tokens' texts", () => {
  assert.deepEqual(words(new Aligner().add("é", {})), [["é"]]);
  assert.deepEqual(words(new Aligner().add("some text", { origins: [1, 2, 0], tokens: [5, 6, 7] })), [["some text", 1, 2, 0]]);
  const odd = new Aligner().add("xx y", { origins: [1], texts: [" y"] });
  assert.equal(odd.map(({ text }) => text).join(""), "xx y");
  assert.deepEqual(odd.at(-1).origins, [1]);
});

test("origins have levels and words", () => {
  assert.deepEqual([0, 1, 2, 3, 4, 7, 8, 16].map((origin) => level(origin).name),
    ["bonus", "d1", "d2", "d2", "d4", "d4", "d8", "d8"]);
  assert.equal(told([0]), "bonus token");
  assert.equal(told([3]), "accepted at depth 3");
  assert.match(told([1, 2, 0]), /3 tokens: accepted to depth 2, and a bonus token/);
});

test("an answer's figures", () => {
  const answer = new Answer(10);
  const chunk = (content, origins) => ({ choices: [{ delta: { content } }], ddtree: { origins, tokens: origins } });
  answer.add({ choices: [{ delta: { role: "assistant", content: "" } }] }, 10.1);
  assert.equal(answer.figures().ttft, null);
  answer.add(chunk("a", [0]), 10.5);
  answer.add(chunk("bcd", [1, 2, 0]), 11);
  answer.add(chunk("ef", [1, 0]), 11.5);
  answer.add({ choices: [{ delta: {}, finish_reason: "length" }] }, 11.6);
  answer.add({ choices: [], usage: { completion_tokens: 6, prompt_tokens_details: { cached_tokens: 4 } } }, 11.6);
  assert.equal(answer.text, "abcdef");
  assert.deepEqual(answer.figures(), { tokens: 6, total: 1.5, ttft: 0.5, tpot: 0.2, rate: 4, tau: 2.5 });
  assert.deepEqual([answer.reason, answer.cached], ["length", 4]);
  assert.deepEqual(answer.marks, [[0.5, 1], [1, 4], [1.5, 6]]);
});

test("where two texts part", () => {
  assert.equal(parting("same", "same"), -1);
  assert.equal(parting("same", "some"), 1);
  assert.equal(parting("same", "sam"), 3);
});

const tree = {
  tokens: ["r", "a", "b", "aa", "ab", "ba", "aba"],
  parents: [0, 0, 0, 1, 1, 2, 4],
  depths: [0, 1, 1, 2, 2, 2, 3],
  logprobs: [0, -0.1, -2, -0.2, -3, -2.1, -3.1],
  path: [0, 1, 4],
};

test("a tree is laid out with each leaf on its own line, and the accepted path straight", () => {
  const { places, lines, columns } = placed(tree, chosen(tree, 64));
  assert.deepEqual([lines, columns, places.size], [3, 4, 7]);
  for (const node of [0, 1, 4, 6]) assert.equal(places.get(node).line, 0);
  for (const [node, { column }] of places) assert.equal(column, tree.depths[node]);
  const cells = new Set([...places.values()].map(({ column, line }) => `${column} ${line}`));
  assert.equal(cells.size, places.size);
});

test("a large tree keeps its path and its most probable nodes, with all their ancestors", () => {
  assert.deepEqual(chosen(tree, 4), [0, 1, 3, 4]);
  assert.deepEqual(chosen(tree, 1), [0, 1, 4]);
  const parents = [0];
  for (let node = 1; node < 500; node++) parents.push(Math.floor((node * 7919) % node));
  const large = { parents, path: [], logprobs: parents.map((_, node) => -((node * 31) % 97)) };
  const kept = chosen(large, 64);
  assert.equal(kept.length, 64);
  for (const node of kept) assert.ok(kept.includes(parents[node]));
  assert.ok(placed(large, kept).places.size === 64);
});

test("a root alone is a tree", () => {
  const root = { tokens: ["r"], parents: [0], depths: [0], path: [] };
  assert.deepEqual(placed(root, chosen(root, 64)).places.get(0), { column: 0, line: 0 });
});

const state = (tau, more = {}) => ({ rolling: { tau, tokens_per_second: 5, drafted: { ttft_p50: null, tpot_p50: 0.1 } }, ...more });

test("lines break where nothing was measured or the server was away", () => {
  const history = new History();
  [[0, 2], [1, 3], [2, null], [3, 4], [9, 5]].forEach(([at, tau]) => history.addState(state(tau), at));
  assert.deepEqual(history.lines("tau", 10), [[[10, 2], [9, 3]], [[7, 4]], [[1, 5]]]);
  assert.deepEqual(history.lines("ttft", 10), []);
  assert.equal(history.lines("tpot", 10).flat().length, 5);
});

test("what is older than the charts is forgotten", () => {
  const history = new History();
  for (let at = 0; at < 500; at++) {
    history.addState(state(2), at);
    for (let time = 0; time < 3; time++) history.addRound({ seconds: { verify: 1 }, tree }, at);
  }
  assert.ok(history.samples.length <= SPAN + 1);
  assert.ok(history.parts.length <= 3 * (SPAN + 1));
  assert.ok(history.rounds.length <= 100);
});

test("where a round's time goes", () => {
  const history = new History();
  history.addRound({ seconds: { draft: 1, verify: 3, prefill: 0 } }, 0);
  history.addRound({ seconds: { verify: 4 } }, 1);
  assert.deepEqual(history.split(), [
    { part: "verify", seconds: 3.5, share: 0.875 },
    { part: "draft", seconds: 0.5, share: 0.125 },
  ]);
});

test("the last tree is shown to a page that came later", () => {
  const history = new History();
  history.addState(state(null, { tree }), 0);
  history.addState(state(null, { tree }), 1);
  assert.equal(history.rounds.length, 1);
});

test("the gain needs answers of both kinds", () => {
  assert.equal(gain({ drafted: { tpot_p50: 0.02 }, plain: { tpot_p50: 0.05 } }), 2.5);
  assert.equal(gain({ drafted: { tpot_p50: 0.02 }, plain: { tpot_p50: null } }), null);
  assert.equal(gain({ drafted: { tpot_p50: null }, plain: { tpot_p50: 0.05 } }), null);
  assert.equal(gain(undefined), null);
});

test("figures are short", () => {
  assert.deepEqual([0.0042, 0.083, 1.234, 61.8, 250, null].map(seconds), ["4.2 ms", "83 ms", "1.23 s", "61.8 s", "250 s", "–"]);
  assert.deepEqual([3.456, 71.26, 412, 12899].map(figure), ["3.46", "71.3", "412", "12.9k"]);
  assert.deepEqual([0, 1536, 31457280].map(bytes), ["0 B", "1.5 KiB", "30.0 MiB"]);
  assert.equal(token(" a\n"), "␣a↵");
  assert.equal(Array.from(token("x".repeat(40))).length, 12);
  assert.equal(token(""), "∅");
});

test("axes end at round figures", () => {
  assert.deepEqual([0, 0.7, 1, 3.2, 41, 77, 101].map(ceiling), [1, 0.8, 1, 4, 50, 80, 200]);
});

// What the page asks for, answered here.
function answering(answers) {
  const asked = [];
  globalThis.fetch = async (path, { headers, body }) => {
    asked.push({ path, headers, body: body && JSON.parse(body) });
    const { status = 200, text } = answers[path];
    return new Response(text, { status });
  };
  return asked;
}

async function all(stream) {
  const found = [];
  for await (const one of stream) found.push(one);
  return found;
}

test("a chat's chunks come with the key, up to the end", async () => {
  key.set("sesame");
  const asked = answering({ "v1/chat/completions": { text: 'data: {"a":1}\n\ndata: [DONE]\n\ndata: {"b":1}\n\n' } });
  assert.deepEqual(await all(chat({ model: "m" })), [{ a: 1 }]);
  assert.equal(asked[0].headers.Authorization, "Bearer sesame");
  key.set("");
});

test("what goes wrong in a chat is told plainly", async () => {
  const told = async (answer) => {
    answering({ "v1/chat/completions": answer });
    return all(chat({})).then(() => null, (error) => error.message);
  };
  assert.equal(await told({ text: 'data: {"a":1}\n\n' }), "The connection was lost before the answer ended.");
  assert.equal(await told({ text: 'data: {"error":{"message":"no memory"}}\n\n' }), "no memory");
  assert.equal(await told({ status: 400, text: '{"error":{"message":"depth=99 is too deep"}}' }), "depth=99 is too deep");
  assert.match(await told({ status: 401, text: "{}" }), /API key/);
  assert.equal(await told({ status: 502, text: "<html>" }), "The server answered 502.");
});

test("where two answers part, the target's two best scores are compared", async () => {
  const asked = answering({
    tokenize: { text: '{"tokens":[1,2]}' },
    "v1/completions": { text: '{"choices":[{"logprobs":{"top_logprobs":[{" a":-1.5,"b":-1}]}}]}' },
  });
  const request = { model: "m", content: "hi", fields: { temperature: 0 } };
  assert.equal(await gapAt(request, [5, 6, 7], [5, 9]), 0.5);
  assert.deepEqual(asked[1].body.prompt, [1, 2, 5]);
  assert.equal(await gapAt(request, [5, 6], [5]), null);
  assert.equal(await gapAt({ ...request, fields: { temperature: 1 } }, [5, 6], [5, 7]), null);
});
