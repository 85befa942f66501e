// Talking to the gateway: the key, errors in OpenAI's shape, server-sent events.
// Paths are relative to the document, so the page also works behind --root-path.

const KEY = "blockyard.api-key";

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function keepApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export class ApiError extends Error {
  /** `status` is the HTTP status, 0 where none arrived; `field` the parameter at fault, if named. */
  constructor(message, { status = 0, kind = "", field = "" } = {}) {
    super(message);
    this.status = status;
    this.kind = kind;
    this.field = field;
  }
}

function fromBody(error, status) {
  const message = typeof error === "string" ? error : error.message ?? "The server gave no reason.";
  const code = Number.isInteger(error.code) ? error.code : status;
  return new ApiError(message, { status: code, kind: error.type ?? "", field: error.param ?? "" });
}

async function fromResponse(response) {
  const text = await response.text().catch(() => "");
  let error;
  try {
    const body = JSON.parse(text);
    error = fromBody(body.error ?? body.detail ?? body.message ?? "The server gave no reason.", response.status);
  } catch {
    const words = text.startsWith("<") ? "" : text.trim().slice(0, 300);
    error = new ApiError(words || response.statusText || "The server gave no reason.", { status: response.status });
  }
  const wait = response.headers.get("Retry-After");
  if (wait) error.message += ` Try again in ${wait} s.`;
  return error;
}

async function request(path, options) {
  const headers = { ...options.headers };
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
    throw new ApiError("The gateway cannot be reached. It may be restarting.");
  }
  if (!response.ok) throw await fromResponse(response);
  return response;
}

export async function getJson(path, timeoutMs) {
  const response = await request(path, { signal: AbortSignal.timeout(timeoutMs) });
  return response.json();
}

/** Splits a stream of text pieces into the data of its events; comments and other fields are left out. */
export class EventReader {
  #held = "";
  #data = [];

  push(piece) {
    const events = [];
    this.#held += piece;
    // A lone \r at the end may be half of a \r\n: it waits for what follows.
    const lines = this.#held.split(/\r\n|\n|\r(?!$)/);
    this.#held = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
    return events;
  }
}

/** POSTs `body` and yields each event's JSON. Throws ApiError, also for an error event in mid-stream. */
export async function* streamEvents(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const bytes = response.body.getReader();
  const decoder = new TextDecoder();
  const reader = new EventReader();
  try {
    for (;;) {
      const { done, value } = await readChunk(bytes);
      if (done) break;
      for (const data of reader.push(decoder.decode(value, { stream: true }))) {
        if (data === "[DONE]") return;
        const event = parse(data);
        if (event.error) throw fromBody(event.error, response.status);
        yield event;
      }
    }
  } finally {
    bytes.cancel().catch(() => {});
  }
  throw new ApiError("The stream ended before the answer was complete.");
}

function parse(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError(`The server sent an event that is not JSON: ${data.slice(0, 120)}`);
  }
}

async function readChunk(bytes) {
  try {
    return await bytes.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke before the answer was complete.");
  }
}
