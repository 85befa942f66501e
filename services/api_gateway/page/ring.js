// The live view: asks for the ring's state once a second and turns totals into rates.

import { getJson } from "./api.js";
import { Loop, drawSpark, drawStacks } from "./loop.js";
import { element, formatBytes } from "./text.js";

const EVERY_MS = 1000;
const TIMEOUT_MS = 4000;
const WINDOW_MS = 3000; // heartbeats and polls do not line up: a rate over one second would flicker
const HISTORY = 60; // points of a sparkline
const GONE_MS = 30000; // how long a member that left stays on the page, marked

const byId = (id) => document.getElementById(id);
const count = (value) => Math.round(value).toLocaleString("en");

/** A counter's speed. Totals fall when a service restarts: such a step counts as nothing. */
export class Rate {
  #samples = [];
  #sum = 0;
  #last = null;
  value = 0;
  history = [];

  push(total, nowMs) {
    this.grown = this.#last === null ? 0 : Math.max(0, total - this.#last);
    this.#last = total;
    this.#sum += this.grown;
    this.#samples.push({ at: nowMs, sum: this.#sum });
    while (this.#samples.length > 2 && nowMs - this.#samples[1].at >= WINDOW_MS) this.#samples.shift();
    const oldest = this.#samples[0];
    const seconds = (nowMs - oldest.at) / 1000;
    if (seconds === 0) return;
    this.value = (this.#sum - oldest.sum) / seconds;
    this.history.push(this.value);
    if (this.history.length > HISTORY) this.history.shift();
  }
}

/** Members as last seen, with those that left lately. */
export class Roster {
  #seen = new Map(); // name -> {member, at}

  update(members, nowMs) {
    for (const member of members) this.#seen.set(member.name, { member, at: nowMs });
    for (const [name, { at }] of this.#seen) if (nowMs - at > GONE_MS) this.#seen.delete(name);
    return [...this.#seen.values()]
      .map(({ member, at }) => ({ ...member, state: at < nowMs ? "gone" : member.ready ? "ready" : "starting" }))
      .sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
  }
}

export function watchRing() {
  const loop = new Loop(byId("ring-loop"));
  const requests = new Rate();
  const tokens = new Rate();
  const roster = new Roster();
  loop.draw([]);

  const tick = async () => {
    if (!document.hidden) {
      try {
        const { members, totals } = await getJson("ring", TIMEOUT_MS);
        const now = performance.now();
        requests.push(totals.requests_total, now);
        tokens.push(totals.output_tokens_total, now);
        const seen = roster.update(members, now);
        loop.draw(seen);
        loop.pulse(requests.grown, tokens.grown);
        drawFigures(requests, tokens, totals, loop);
        drawMembers(seen);
        showState(seen);
      } catch (error) {
        const reason = error.status === 401 || error.status === 403 ? "needs the API key" : "no answer, trying again";
        setState("lost", reason);
      }
    }
    setTimeout(tick, EVERY_MS);
  };
  tick();
}

function showState(members) {
  const missing = members.filter(({ state }) => state === "starting").length;
  const gone = members.filter(({ state }) => state === "gone").length;
  if (gone) setState("waiting", `${gone} gone`);
  else if (missing) setState("waiting", `${missing} starting`);
  else setState("live", `${members.length} members, all ready`);
}

function setState(state, text) {
  const target = byId("ring-state");
  target.dataset.state = state;
  if (target.textContent !== text) target.textContent = text; // a status that stays the same is not read out again
  byId("ring").classList.toggle("stale", state === "lost");
}

function drawFigures(requests, tokens, totals, loop) {
  byId("rate-requests").textContent = requests.value.toFixed(requests.value < 10 ? 1 : 0);
  byId("rate-tokens").textContent = count(tokens.value);
  loop.speed(count(tokens.value));
  drawSpark(byId("spark-requests"), requests.history, HISTORY);
  drawSpark(byId("spark-tokens"), tokens.history, HISTORY);
  byId("running").textContent = count(totals.running);
  byId("waiting").textContent = count(totals.waiting);
  const { blocks_used: used, blocks_total: total } = totals;
  const share = total ? used / total : 0;
  byId("kv-text").textContent = total ? `${count(used)} of ${count(total)}` : "–";
  drawStacks(byId("kv-stacks"), share);
  byId("kv-stacks").setAttribute("aria-valuemax", total);
  byId("kv-stacks").setAttribute("aria-valuenow", used);
}

function drawMembers(members) {
  byId("member-count").textContent = members.length;
  byId("member-rows").replaceChildren(...members.flatMap((member) => {
    const row = element("tr", "", member.state);
    const name = element("th", member.name);
    name.scope = "row";
    if (member.kv_role) name.append(element("span", member.kv_role, "kv-role"));
    const state = member.state === "starting" ? member.phase || "starting" : member.state;
    const { running = 0, rss_bytes: bytes = 0 } = member.stats ?? {};
    row.append(name, element("td", state, "state-cell"), element("td", count(running), "num"), element("td", formatBytes(bytes), "num"));
    return [row, ...(member.ranks ?? []).filter(({ rank }) => rank > 0).map(rankRow)];
  }));
}

function rankRow({ rank, pid, rss_bytes: bytes, state }) {
  const row = element("tr", "", `rank ${state}`);
  const name = element("th", `rank ${rank}, process ${pid}`);
  name.scope = "row";
  row.append(name, element("td", state, "state-cell"), element("td", "", "num"), element("td", formatBytes(bytes), "num"));
  return row;
}
