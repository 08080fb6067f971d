// The page put together.

import { Chat } from "./chat.mjs";
import { byId } from "./dom.mjs";
import { Drafting } from "./drafting.mjs";
import { History } from "./history.mjs";
import { Live } from "./live.mjs";
import { legend } from "./prose.mjs";
import { Race } from "./race.mjs";
import { follow, key } from "./server.mjs";
import { tabs } from "./tabs.mjs";
import { TreeView } from "./treeview.mjs";

const clock = () => performance.now() / 1000;
const history = new History();
const drafting = new Drafting();
const tree = new TreeView(history);
const live = new Live(history);
const model = () => history.state?.model ?? "";

new Chat(model);
new Race({ model, drafting: () => drafting.current });
legend();
tabs(byId("tabs"));

let drawing = false;
function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    tree.draw();
  });
}

const link = byId("link");
const STATUS = { starting: "starting: measuring the cost of a round", closing: "shutting down" };
let connection = { up: false, message: "Not connected yet." };

// One line on how the server does: unreachable, not ready (and why), or live.
function say() {
  const health = history.state?.health ?? { ready: true };
  const reason = health.error ? `: ${health.error}` : "";
  const text = !connection.up
    ? `${connection.message} Trying again…`
    : health.ready ? "live" : `${STATUS[health.status] ?? health.status}${reason}`;
  if (link.textContent !== text) link.textContent = text;
  link.className = connection.up && health.ready ? "up" : "down";
  document.body.classList.toggle("offline", !connection.up);
}

const again = follow((kind, value) => {
  if (kind === "link") {
    if (value.status === 401 && connection.status !== 401) byId("key-box").open = true;
    connection = value;
    say();
  } else if (kind === "state") {
    history.addState(value, clock());
    say();
    drafting.told(value.drafting ?? {}, value.drafters ?? []);
    live.draw(clock());
    draw();
  } else {
    history.addRound(value, clock());
    draw();
  }
});

const field = byId("key");
field.value = key.get();
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(field.value.trim());
  byId("key-box").open = false;
  connection = { up: false, message: "Connecting." }; // a key that is refused is asked for again
  again();
});

new ResizeObserver(() => {
  live.draw(clock());
  draw();
}).observe(byId("live"));
tree.draw();
