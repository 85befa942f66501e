// Drawing the ring: stations on a loop, blocks that travel along it, sparklines, and stacks of KV blocks.

import { formatBytes } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 122; // of a station
const HEIGHT = 66;
const STATIONS = [
  { role: "api_gateway", title: "gateway", x: 62, y: 166 },
  { role: "tokenizer_pool", title: "tokenizer", x: 112, y: 37 },
  { role: "scheduler", title: "scheduler", x: 288, y: 37 },
  { role: "gpu_worker", title: "worker", x: 338, y: 166 },
  { role: "detokenizer", title: "detokenizer", x: 200, y: 293 },
];
const REQUEST_WAY = "M62 166 V77 Q62 37 102 37 H298 Q338 37 338 77 V166";
const TOKEN_WAY = "M338 166 V253 Q338 293 298 293 H102 Q62 293 62 253 V166";
const CHEVRONS = [[62, 101, -90], [200, 37, 0], [338, 101, 90], [338, 236, 90], [298, 293, 180], [102, 293, 180], [62, 236, -90]];
const BLOCK = 11;
const BLOCKS_SHOWN = 7; // in one row of a station
const LETTERS = { prefill: "P", decode: "D" };

function shape(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export class Loop {
  #svg;
  #moving;
  #stations;
  #speed;
  #bus;

  constructor(svg) {
    this.#svg = svg;
    this.#moving = shape("g", { class: "moving" });
    this.#stations = shape("g");
    this.#speed = shape("text", { x: 200, y: 166, class: "speed" }, "–");
    this.#bus = shape("text", { x: 200, y: 210, class: "bus" });
    svg.append(
      shape("path", { d: REQUEST_WAY, class: "way" }),
      shape("path", { d: TOKEN_WAY, class: "way" }),
      ...CHEVRONS.map(([x, y, turn]) => shape("path", { d: "M-3 -4 L3 0 L-3 4", class: "chevron", transform: `translate(${x} ${y}) rotate(${turn})` })),
      this.#moving,
      this.#stations,
      this.#speed,
      shape("text", { x: 200, y: 184, class: "unit" }, "tokens/s"),
      this.#bus,
    );
  }

  speed(text) {
    this.#speed.textContent = text;
  }

  draw(members) {
    const of = (role) => members.filter((member) => member.role === role);
    this.#stations.replaceChildren(...STATIONS.map((station) => drawStation(station, of(station.role))));
    const bus = of("message_bus")[0];
    this.#bus.textContent = bus ? `message bus ${bus.state}` : "";
    this.#bus.setAttribute("class", `bus ${bus?.state ?? ""}`);
    const words = STATIONS.map(({ role, title }) => {
      const ready = of(role).filter(({ state }) => state === "ready").length;
      return `${title} ${ready} of ${of(role).length} ready`;
    });
    this.#svg.setAttribute("aria-label", `The ring of services: ${words.join(", ")}`);
  }

  /** Animates a few blocks along the loop: more for more traffic, but not one per token. */
  pulse(requests, tokens) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    const few = (amount, most) => Math.min(most, Math.ceil(Math.log2(amount + 1)));
    this.#send(REQUEST_WAY, "request", few(requests, 4));
    this.#send(TOKEN_WAY, "token", few(tokens, 8));
  }

  #send(way, kind, amount) {
    for (let i = 0; i < amount; i++) {
      const block = shape("rect", { class: `pulse ${kind}`, x: -4, y: -3, width: 8, height: 6, rx: 1 });
      block.style.offsetPath = `path("${way}")`;
      this.#moving.append(block);
      const steps = [{ offsetDistance: "0%" }, { offsetDistance: "100%" }];
      const timing = { duration: 1100, delay: (i * 1000) / amount, easing: "linear", fill: "both" };
      block.animate(steps, timing).finished.then(() => block.remove(), () => block.remove());
    }
  }
}

function drawStation({ role, title, x, y }, members) {
  const group = shape("g", { class: "station", "data-role": role, transform: `translate(${x - WIDTH / 2} ${y - HEIGHT / 2})` });
  const starting = members.find(({ state }) => state === "starting");
  const ready = members.filter(({ state }) => state === "ready");
  const gone = members.length > 0 && ready.length === 0 && !starting;
  if (!ready.length) group.classList.add("down");
  group.append(
    shape("rect", { class: "box", width: WIDTH, height: HEIGHT, rx: 5 }),
    shape("text", { x: 10, y: 18, class: "title" }, title),
  );
  const all = ready.length === members.length;
  const replicas = all ? `×${members.length}` : `${ready.length}/${members.length}`;
  if (members.length > 1) group.append(shape("text", { x: WIDTH - 10, y: 18, class: "replicas" }, replicas));
  const shown = members.slice(0, members.length > BLOCKS_SHOWN ? BLOCKS_SHOWN - 1 : BLOCKS_SHOWN);
  const left = (index) => 10 + index * (BLOCK + 3);
  shown.forEach((member, index) => group.append(drawReplica(member, left(index))));
  group.append(...drawSends(shown, left));
  if (shown.length < members.length) {
    group.append(shape("text", { x: 10 + shown.length * (BLOCK + 3), y: 36, class: "more" }, `+${members.length - shown.length}`));
  }
  const trouble = starting ? starting.phase || "starting" : gone ? "gone" : "not there";
  if (starting || !ready.length) {
    group.append(shape("text", { x: 10, y: 55, class: "detail alarm" }, trouble.slice(0, 20)));
  } else {
    const sum = (field) => ready.reduce((total, { stats }) => total + (stats?.[field] ?? 0), 0);
    const work = sum("running") ? `${sum("running")} running` : "";
    group.append(shape("text", { x: 10, y: 55, class: "detail" }, work));
    group.append(shape("text", { x: WIDTH - 10, y: 55, class: "detail memory" }, formatBytes(sum("rss_bytes"))));
  }
  return group;
}

function drawReplica(member, x) {
  const group = shape("g", { class: `replica ${member.state}`, "data-name": member.name, transform: `translate(${x} 26)` });
  const { running = 0, rss_bytes: bytes = 0 } = member.stats ?? {};
  const state = member.state === "starting" ? member.phase : member.state;
  group.append(
    shape("title", {}, `${member.name}: ${member.kv_role ? `${member.kv_role}, ` : ""}${state}, ${running} running, ${formatBytes(bytes)}`),
    shape("rect", { width: BLOCK, height: BLOCK, rx: 1.5 }),
  );
  if (LETTERS[member.kv_role]) group.append(shape("text", { x: BLOCK / 2, y: 8.5 }, LETTERS[member.kv_role]));
  if (member.state === "gone") group.append(shape("path", { d: "M2.5 2.5 L8.5 8.5 M8.5 2.5 L2.5 8.5" }));
  return group;
}

/** An arc below the row from each worker to the workers that it sends KV blocks to. */
function drawSends(members, left) {
  const places = new Map(members.map(({ incarnation }, index) => [incarnation, left(index) + BLOCK / 2]));
  return members.flatMap((member) => (member.sends_to ?? []).filter((to) => places.has(to)).map((to) => {
    const [from, end] = [places.get(member.incarnation), places.get(to)];
    return shape("path", { class: "sending", "data-from": member.name, d: `M${from} 38 Q${(from + end) / 2} 47 ${end} 38` });
  }));
}

export function drawSpark(svg, values, points) {
  if (values.length < 2) return;
  const top = Math.max(1, ...values);
  const step = 120 / (points - 1);
  const left = 120 - (values.length - 1) * step;
  const line = values.map((value, i) => `${(left + i * step).toFixed(1)} ${(26 - (value / top) * 24).toFixed(1)}`);
  svg.replaceChildren(
    shape("path", { class: "area", d: `M${left.toFixed(1)} 28 L${line.join(" L")} L120 28 Z` }),
    shape("path", { class: "line", d: `M${line.join(" L")}` }),
  );
}

const COLUMNS = 32;
const ROWS = 4;

/** Blocks stacked from the left, each column from the ground up; any use at all shows at least one. */
export function drawStacks(target, share) {
  if (!target.childElementCount) {
    for (let i = 0; i < COLUMNS * ROWS; i++) target.append(document.createElement("i"));
  }
  const filled = Math.ceil(share * COLUMNS * ROWS);
  [...target.children].forEach((cell, i) => cell.classList.toggle("full", i < filled));
  target.classList.toggle("tight", share > 0.9);
}
