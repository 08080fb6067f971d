// One answer asked for and written as it comes: what the chat and the race share.

import { Answer } from "./answer.mjs";
import { figure, NONE, plural, seconds } from "./format.mjs";
import { write } from "./prose.mjs";
import { chat } from "./server.mjs";

const clock = () => performance.now() / 1000;

// Streams into `host`; gives the Answer, also of one that was stopped. `progress(answer)` after each chunk.
export async function run(body, host, signal, progress = () => {}) {
  const answer = new Answer(clock());
  try {
    const request = { ...body, stream: true, stream_options: { include_usage: true }, ddtree_details: true };
    for await (const chunk of chat(request, signal)) {
      write(host, answer.add(chunk, clock()));
      progress(answer);
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    answer.reason = "stopped";
  }
  return answer;
}

export function summary(answer) {
  const { tokens, total, ttft, tpot, rate, tau } = answer.figures();
  const parts = [
    plural(tokens, "token"),
    seconds(total),
    `${figure(rate)} tokens/s`,
    `first after ${seconds(ttft)}`,
    tpot === null ? null : `${seconds(tpot)} per token`,
    tau === null ? null : `τ ${figure(tau)}`,
    answer.cached ? `${answer.cached} prompt tokens cached` : null,
    { length: "cut at the limit", stopped: "stopped" }[answer.reason],
  ];
  return tokens ? parts.filter(Boolean).join(" · ") : `no text ${NONE} ${answer.reason ?? "ended"}`;
}
