// One answer asked for and written as it comes: what the chat and the race share.

import { Answer } from "./answer.mjs";
import { el } from "./dom.mjs";
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

// The figures of an answer, also while it is still written.
export function tell(host, answer) {
  const { tokens, total, ttft, tpot, rate, tau } = answer.figures();
  const ended = answer.reason !== null;
  if (!tokens) {
    host.textContent = ended ? `no text ${NONE} ${answer.reason}` : "running…";
    return;
  }
  const parts = [
    tau === null ? null : `${figure(tau)} tokens a round`,
    `${plural(tokens, "token")} in ${seconds(total)}`,
    ended ? `first after ${seconds(ttft)}` : null,
    ended && tpot !== null ? `then ${seconds(tpot)} each` : null,
    ended && answer.cached ? `${answer.cached} prompt tokens cached` : null,
    { length: "cut at the limit", stopped: "stopped" }[answer.reason],
  ];
  host.replaceChildren(el("b", {}, `${figure(rate)} tokens/s`), ["", ...parts.filter(Boolean)].join(" · "));
}
