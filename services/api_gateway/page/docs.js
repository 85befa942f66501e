// The page of /docs and /redoc: lists the operations of openapi.json, and on /docs sends requests.
// Paths are relative to the document, so the page also works behind --root-path.

import { apiKey, keepApiKey } from "./api.js";

const tries = !location.pathname.endsWith("/redoc");
const EXAMPLES = {
  messages: [{ role: "user", content: "Say hello." }],
  prompt: "Once upon a time",
  input: "Say hello.",
  tokens: [1, 2, 3],
  max_tokens: 32,
};

function element(name, text = "", fields = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  return Object.assign(made, fields);
}

function resolve(schema, api) {
  if (schema?.$ref) return api.components.schemas[schema.$ref.split("/").pop()];
  return schema?.anyOf ? resolve(schema.anyOf[0], api) : schema;
}

function typeName(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeName).join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array") return `list of ${typeName(schema.items ?? {})}`;
  return schema.type ?? "any";
}

function fieldsTable(schema) {
  const table = element("table");
  const head = table.createTHead().insertRow();
  for (const name of ["field", "type", "default", ""]) head.append(element("th", name));
  const body = table.createTBody();
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const row = body.insertRow();
    row.insertCell().append(element("code", name));
    row.insertCell().textContent = typeName(field) + (schema.required?.includes(name) ? ", needed" : "");
    row.insertCell().textContent = field.default === undefined ? "" : JSON.stringify(field.default);
    row.insertCell().textContent = field.description ?? "";
  }
  return table;
}

function exampleBody(schema) {
  const known = Object.entries(EXAMPLES).filter(([name]) => name in (schema.properties ?? {}));
  if (known.some(([name]) => name === "messages")) known.splice(0, known.length, ...known.filter(([name]) => name !== "prompt"));
  return JSON.stringify(Object.fromEntries(known), null, 2);
}

async function send(method, path, body, output) {
  output.textContent = "…";
  output.className = "";
  const headers = apiKey() ? { Authorization: `Bearer ${apiKey()}` } : {};
  if (method === "POST") headers["Content-Type"] = "application/json";
  try {
    const response = await fetch(path.slice(1), { method, headers, body: method === "POST" ? body : undefined });
    output.textContent = `${response.status}\n`;
    output.className = response.ok ? "" : "error";
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) output.append(part.value);
    const [status, ...rest] = output.textContent.split("\n");
    try {
      output.textContent = `${status}\n${JSON.stringify(JSON.parse(rest.join("\n")), null, 2)}`;
    } catch {
      // events or text stay as they came
    }
  } catch (error) {
    output.className = "error";
    output.textContent = `The server cannot be reached: ${error.message}`;
  }
}

function tryForm(method, path, schema) {
  const form = element("form");
  const parameters = [...path.matchAll(/\{(\w+)\}/g)].map(([, name]) => {
    const input = element("input", "", { name, required: true });
    const label = element("label", `${name} `);
    label.append(input);
    form.append(label);
    return input;
  });
  const text = element("textarea", "", { value: schema ? exampleBody(schema) : "{}", spellcheck: false });
  text.setAttribute("aria-label", "body");
  if (method === "POST") form.append(text);
  const output = element("pre");
  output.setAttribute("aria-live", "polite");
  form.append(element("button", "Send"), output);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const filled = parameters.reduce((to, input) => to.replace(`{${input.name}}`, encodeURIComponent(input.value)), path);
    send(method, filled, text.value, output);
  });
  return form;
}

function operationView(method, path, operation, api) {
  const view = element("details");
  const head = element("summary");
  head.append(element("code", `${method} ${path}`), element("span", operation.summary === path ? "" : operation.summary));
  view.append(head);
  const schema = resolve(operation.requestBody?.content["application/json"].schema, api);
  if (schema) view.append(fieldsTable(schema));
  if (tries) view.append(tryForm(method, path, schema));
  return view;
}

async function show() {
  const list = document.getElementById("operations");
  const response = await fetch("openapi.json");
  const api = await response.json();
  const tags = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const [tag] = operation.tags;
      if (!tags.has(tag)) tags.set(tag, []);
      tags.get(tag).push(operationView(method.toUpperCase(), path, operation, api));
    }
  }
  for (const [tag, views] of tags) list.append(element("h2", tag), ...views);
  list.removeAttribute("aria-busy");
}

const key = document.getElementById("key");
key.value = apiKey();
key.addEventListener("change", () => keepApiKey(key.value.trim()));
document.getElementById("key-row").hidden = !tries;
show();
