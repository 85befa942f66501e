// Probabilities of tokens: coloured spans, the legend, and the card with the other candidates.

import { appendText, element } from "./text.js";

const BANDS = [
  { name: "sure", from: 0.9, label: "90 – 100 %" },
  { name: "likely", from: 0.6, label: "60 – 90 %" },
  { name: "even", from: 0.3, label: "30 – 60 %" },
  { name: "odd", from: 0.1, label: "10 – 30 %" },
  { name: "rare", from: 0, label: "under 10 %" },
];

const band = (logprob) => BANDS.find(({ from }) => Math.exp(logprob) >= from) ?? BANDS[BANDS.length - 1];

/** One choice's logprobs, chat's or completion's shape, as [{text, bytes, logprob, top}]. */
export function readTokens(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, bytes, logprob, top_logprobs: top }) => ({
      text: token,
      bytes,
      logprob,
      top: (top ?? []).map((other) => ({ text: other.token, logprob: other.logprob })),
    }));
  }
  return (logprobs.tokens ?? []).map((text, index) => ({
    text,
    bytes: null,
    logprob: logprobs.token_logprobs?.[index] ?? 0,
    top: Object.entries(logprobs.top_logprobs?.[index] ?? {}).map(([other, logprob]) => ({ text: other, logprob })),
  }));
}

const encoder = new TextEncoder();

/**
 * Takes the tokens that spell `piece` out of `tokens`. What is before them (a marker, the head of a call) is dropped;
 * what is behind them belongs to a later piece. Text that no token spells, such as arguments that the server wrote in
 * another way than the model, comes as one token without a probability.
 */
function takeSpelling(piece, tokens) {
  const wanted = byteString(encoder.encode(piece));
  const spelled = tokens.map(({ bytes, text }) => byteString(bytes ?? encoder.encode(text)));
  const begin = spelled.join("").lastIndexOf(wanted);
  const end = begin + wanted.length;
  if (begin < 0) {
    tokens.length = 0;
    return [{ text: piece, bytes: null, logprob: null, top: [] }];
  }
  const found = [];
  for (let at = 0; at < end; ) {
    const token = tokens.shift();
    const all = [...spelled.shift()].map((byte) => byte.charCodeAt(0));
    const bytes = all.slice(Math.max(0, begin - at), end - at); // the piece may begin within its first token
    if (bytes.length) found.push({ ...token, bytes });
    at += all.length;
    if (at > end) tokens.unshift({ ...token, bytes: all.slice(end - at) }); // and end within its last one
  }
  return found;
}

const byteString = (bytes) => String.fromCharCode(...bytes);

/** Text that arrives in pieces, in `target`: plain, or with a coloured span a token. */
export class TokenText {
  text = "";
  #target;
  #masked;
  #plain;
  #tokens = [];
  #hasColours = false;
  #coloured = false;
  #drawn = 0; // tokens that have their spans
  #decoder;
  #reachable = false; // one span is in the order of the Tab key

  /** `masked`: a schema limited the tokens. `plain` draws the text without colours. */
  constructor(target, { masked = false, plain = appendText } = {}) {
    this.#target = target;
    this.#masked = masked;
    this.#plain = plain;
  }

  /** Adds a piece of text and takes its tokens out of `tokens`. */
  push(piece, tokens) {
    if (piece === "") return;
    this.text += piece;
    this.add(takeSpelling(piece, tokens));
  }

  add(tokens) {
    this.#tokens.push(...tokens);
    this.#hasColours ||= tokens.some(({ logprob }) => logprob !== null);
  }

  draw(colours) {
    const coloured = colours && this.#hasColours;
    if (coloured !== this.#coloured) {
      this.#coloured = coloured;
      this.#target.classList.toggle("tokens", coloured);
      this.#target.replaceChildren();
      this.#drawn = 0;
      this.#reachable = false;
      this.#decoder = new TextDecoder();
    }
    if (!coloured) {
      this.#plain(this.#target, this.text);
      return;
    }
    this.#target.append(...this.#tokens.slice(this.#drawn).map((token) => this.#span(token)));
    this.#drawn = this.#tokens.length;
  }

  #span(token) {
    // A character may be spread over several tokens: it shows at the one that completes it.
    const text = token.bytes ? this.#decoder.decode(new Uint8Array(token.bytes), { stream: true }) : token.text;
    if (token.logprob === null) return element("span", text);
    const span = element("span", text, `token ${band(token.logprob).name}`);
    span.tabIndex = this.#reachable ? -1 : 0;
    this.#reachable = true;
    if (text === "") span.classList.add("part");
    if (this.#masked && token.top.some(({ logprob }) => logprob > token.logprob)) span.classList.add("forced");
    if (text.includes("\n")) span.classList.add("break");
    facts.set(span, token);
    return span;
  }
}

const facts = new WeakMap(); // span -> its token

export function drawLegend(target) {
  target.append(element("span", "Chance of each token", "unseen"));
  for (const { name, label } of [...BANDS].reverse()) {
    target.append(element("span", label, `token ${name}`));
  }
}

/** The card of one token, for all token spans of the page. */
export function watchTokens(root, card) {
  let shown = null;
  const show = (span) => {
    if (!span || span === shown) return;
    hide();
    shown = span;
    span.setAttribute("aria-describedby", card.id);
    fillCard(card, facts.get(span));
    card.hidden = false;
    place(card, span);
  };
  const hide = () => {
    shown?.removeAttribute("aria-describedby");
    shown = null;
    card.hidden = true;
  };
  const spanOf = (event) => {
    const span = event.target.closest?.(".tokens > .token");
    return span && facts.has(span) ? span : null;
  };
  root.addEventListener("pointerover", (event) => (spanOf(event) ? show(spanOf(event)) : hide()));
  root.addEventListener("pointerleave", hide);
  root.addEventListener("focusin", (event) => show(spanOf(event)));
  root.addEventListener("focusout", hide);
  const follow = () => (shown && shown === document.activeElement ? place(card, shown) : hide());
  root.addEventListener("scroll", follow, true); // focusing a token may itself scroll it into view
  root.addEventListener("click", (event) => spanOf(event)?.focus());
  root.addEventListener("keydown", (event) => {
    const span = spanOf(event);
    const next = { ArrowRight: span?.nextElementSibling, ArrowLeft: span?.previousElementSibling }[event.key];
    if (!next || !facts.has(next)) return;
    event.preventDefault();
    span.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}

function fillCard(card, token) {
  const rows = [...token.top].sort((a, b) => b.logprob - a.logprob);
  if (!rows.some(({ text }) => text === token.text)) rows.push(token);
  const list = element("ol");
  for (const row of rows) {
    const item = element("li", "", row.text === token.text ? "taken" : "");
    const bar = element("span", "", "bar");
    bar.style.setProperty("--share", `${Math.exp(row.logprob) * 100}%`);
    item.append(element("code", visible(row.text)), bar, element("span", percent(row.logprob), "share"));
    list.append(item);
  }
  card.replaceChildren(list);
}

function visible(text) {
  return text === "" ? "∅" : text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

function percent(logprob) {
  const share = Math.exp(logprob) * 100;
  if (share < 0.1) return "< 0.1 %";
  return `${share.toFixed(share >= 99.95 ? 0 : 1)} %`;
}

function place(card, span) {
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const below = at.bottom + card.offsetHeight + 12 < innerHeight;
  card.style.top = `${below ? at.bottom + 6 : Math.max(6, at.top - card.offsetHeight - 6)}px`;
  card.style.left = `${Math.max(8, Math.min(at.left, innerWidth - card.offsetWidth - 8))}px`;
}
