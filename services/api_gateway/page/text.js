// Answers as text: fenced code, inline code and bold; everything else stays as the model wrote it.
// Built from text nodes only, so nothing a model says becomes markup.

const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*)/;

export function renderText(target, text) {
  const parts = text.split(/^```/m); // odd parts are inside a fence
  target.replaceChildren(...parts.flatMap((part, index) => (index % 2 ? [codeBlock(part)] : prose(part, index > 0))));
}

function codeBlock(part) {
  const end = part.indexOf("\n");
  const block = document.createElement("pre");
  const code = document.createElement("code");
  code.textContent = end < 0 ? "" : part.slice(end + 1).replace(/\n$/, "");
  const language = (end < 0 ? part : part.slice(0, end)).trim();
  if (language) block.dataset.language = language;
  block.append(code);
  return block;
}

function prose(part, afterCode) {
  const text = afterCode ? part.replace(/^\n+/, "") : part;
  if (text === "") return [];
  const block = document.createElement("div");
  block.className = "prose";
  for (const piece of text.replace(/\n+$/, "").split(INLINE)) {
    if (piece.startsWith("`") && piece.length > 2) block.append(element("code", piece.slice(1, -1)));
    else if (piece.startsWith("**") && piece.length > 4) block.append(element("strong", piece.slice(2, -2)));
    else if (piece) block.append(piece);
  }
  return [block];
}

export function element(name, text = "", className = "") {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function actionButton(label, act, className = "quiet") {
  const button = element("button", label, className);
  button.type = "button";
  button.addEventListener("click", () => act(button));
  return button;
}

/** Adds the end of `text` to an element that shows its beginning: the whole text is never written again. */
export function appendText(target, text) {
  const shown = target.firstChild ?? target.appendChild(document.createTextNode(""));
  if (text.length > shown.length) shown.appendData(text.slice(shown.length));
}

export function formatBytes(bytes) {
  if (!bytes) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log10(bytes) / 3));
  const value = bytes / 1000 ** power;
  return `${value.toFixed(value < 10 && power > 2 ? 1 : 0)} ${units[power]}`;
}

export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  // Over plain http from another machine there is no clipboard API.
  const area = element("textarea", text, "unseen");
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
