// @ts-check
/** Requests to the service's REST API, relative to the page's address, with the token that was entered once in this tab. */
import { size } from "./format.js";
import { NotRecorded, recorded } from "./recorded.js";

const TOKEN = "ratchet.token";
/** Bytes that a page fetches at most as one Blob: it is in the browser's memory. */
const LARGEST = 1e9;

/** A refusal of the service: ``application/problem+json``. */
export class Problem extends Error {
  /**
   * ``used``: the token that the request had; ``wait``: seconds of Retry-After.
   * @param {number} status @param {{code?: string, detail?: string, errors?: {pointer: string, detail: string}[]}} body
   * @param {{used?: string, wait?: number}} [more]
   */
  constructor(status, body, { used = "", wait = 0 } = {}) {
    super(body.detail ?? `the service answered with status ${status}`);
    this.status = status;
    this.code = body.code ?? "";
    this.errors = body.errors ?? [];
    this.used = used;
    this.wait = wait;
  }
}

/** The request needs a token, or another one. */
export class TokenNeeded extends Problem {}

/** No answer came: the service is stopped, restarts, or the network is down. */
export class Unreachable extends Error {
  constructor() {
    super("The service does not answer. This page tries again by itself.");
  }
}

export const token = () => recorded ? "" : sessionStorage.getItem(TOKEN) ?? "";

/** @param {string} value - empty: forget it */
export function setToken(value) {
  if (value) sessionStorage.setItem(TOKEN, value);
  else sessionStorage.removeItem(TOKEN);
}

/** The service's clock minus this browser's, in milliseconds; 0: about equal, or not known. */
let skew = 0;

/** The time of the service's clock, in milliseconds; in a report the time when it was made. */
export const serverNow = () => (recorded ? Date.parse(recorded.made_at) : Date.now() + skew);

/** Whether an error is a refusal that a later request would meet again. @param {unknown} error */
export const isFinal = (error) => error instanceof Problem && error.status < 500 && error.status !== 429;

/**
 * @param {string} path @param {RequestInit & {headers?: Record<string, string>}} options
 * @returns {Promise<Response>} a response of status 2xx or 304; raises Problem, TokenNeeded, Unreachable, and NotRecorded in a report
 */
async function request(path, options) {
  if (recorded) throw new NotRecorded(recorded, path);
  let answer;
  const used = token();
  const sent = used ? { ...options.headers, Authorization: `Bearer ${used}` } : { ...options.headers };
  try {
    answer = await fetch(path, { ...options, headers: sent, cache: "no-store" });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Unreachable();
  }
  const ahead = Date.parse(answer.headers.get("Date") ?? "") - Date.now();
  skew = Math.abs(ahead) > 2000 ? ahead : 0; // the header has whole seconds; NaN: 0
  if (answer.ok || answer.status === 304) return answer;
  if (answer.status === 502 || answer.status === 504) throw new Unreachable();
  const body = await answer.json().catch(() => ({}));
  throw new (answer.status === 401 ? TokenNeeded : Problem)(answer.status, body, { used, wait: Number(answer.headers.get("Retry-After")) || 0 });
}

/**
 * Read JSON. ``data`` is null if the answer is still the one with the tag ``etag``.
 * @template {string} P @param {P} path @param {{etag?: string, signal?: AbortSignal}} [options]
 * @returns {Promise<{data: import("./types").Answer<P>, etag: string}>}
 */
export async function read(path, { etag = "", signal } = {}) {
  if (recorded) return { data: (await import("./recorded_answers.js")).answerFrom(recorded, path), etag: "" };
  /** @type {Record<string, string>} */
  const asked = etag ? { Accept: "application/json", "If-None-Match": etag } : { Accept: "application/json" };
  const answer = await request(path, { headers: asked, signal });
  if (answer.status === 304) return { data: /** @type {any} */ (null), etag };
  return { data: await answer.json(), etag: answer.headers.get("ETag") ?? "" };
}

/**
 * A reader for ``useLive`` that reads a list to its end, or its first ``most`` pages: then ``next_cursor`` is not null.
 * @param {number} most @param {(path: string, options: {etag?: string, signal?: AbortSignal}) => Promise<{data: any, etag: string}>} [get]
 * @returns {(path: string, options?: {etag?: string, signal?: AbortSignal}) => Promise<{data: any, etag: string}>}
 */
export const pages = (most, get = read) => async (path, { etag, signal } = {}) => {
  let found = await get(path, { etag, signal });
  if (!found.data?.next_cursor) return found;
  const items = [...found.data.items];
  for (let n = 1; n < most && found.data.next_cursor; n += 1) {
    found = await get(`${path}&cursor=${encodeURIComponent(found.data.next_cursor)}`, { signal });
    items.push(...found.data.items);
  }
  return { data: { items, next_cursor: found.data.next_cursor }, etag: "" };
};

/** Idempotency keys of requests that had no answer, by path and body. @type {Map<string, string>} */
const unanswered = new Map();

/**
 * Change something. A POST has an idempotency key, so that a repeated request does it once: the key stays until an answer came.
 * @param {"POST" | "PATCH" | "PUT" | "DELETE"} method @param {string} path @param {any} [body]
 * @returns {Promise<any>} the answer's JSON, null without a body
 */
export async function change(method, path, body) {
  /** @type {Record<string, string>} */
  const sent = { Accept: "application/json" };
  if (method === "POST" || body !== undefined) {
    sent["Content-Type"] = method === "PATCH" ? "application/merge-patch+json" : "application/json";
  }
  const text = body === undefined ? (method === "POST" ? "{}" : undefined) : JSON.stringify(body);
  const what = `${path} ${text}`;
  if (method === "POST") {
    sent["Idempotency-Key"] = unanswered.get(what) ?? crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
    unanswered.set(what, sent["Idempotency-Key"]);
  }
  try {
    const answer = await request(path, { method, headers: sent, body: text });
    const reply = await answer.text().catch(() => { throw new Unreachable(); });
    unanswered.delete(what);
    return reply ? JSON.parse(reply) : null;
  } catch (error) {
    if (error instanceof Problem) unanswered.delete(what);
    throw error;
  }
}

/**
 * Fetch a file with the token, as a Blob. Raises Error if it is too large for the browser's memory.
 * @param {string} path @param {{headers?: Record<string, string>, signal?: AbortSignal}} [options]
 */
export async function download(path, options = {}) {
  const answer = await request(path, options);
  const bytes = Number(answer.headers.get("Ratchet-Size") ?? answer.headers.get("Content-Length"));
  if (bytes > LARGEST) {
    await answer.body?.cancel();
    throw new Error(`${size(bytes)} are too large for this page: use the command line.`);
  }
  return answer.blob();
}

/** Let the browser save a Blob. @param {Blob} blob @param {string} name */
export function save(blob, name) {
  const place = document.createElement("a");
  place.href = URL.createObjectURL(blob);
  place.download = name;
  place.click();
  setTimeout(() => URL.revokeObjectURL(place.href), 60_000);
}

/**
 * Parse what arrives of ``text/event-stream``. Returns complete events, and the rest of the text.
 * @param {string} text
 * @returns {{events: {id: string, type: string, data: string}[], rest: string}}
 */
export function parseEvents(text) {
  const parts = text.replaceAll("\r\n", "\n").split("\n\n");
  const rest = parts.pop() ?? "";
  const events = [];
  for (const part of parts) {
    const event = { id: "", type: "message", data: "" };
    const data = [];
    for (const line of part.split("\n")) {
      const at = line.indexOf(":");
      if (at === 0) continue; // a comment, as a ping is
      const [field, value] = at < 0 ? [line, ""] : [line.slice(0, at), line.slice(at + 1).replace(/^ /, "")];
      if (field === "data") data.push(value);
      else if (field === "id") event.id = value;
      else if (field === "event") event.type = value;
    }
    event.data = data.join("\n");
    if (data.length || event.type !== "message") events.push(event);
  }
  return { events, rest };
}

/**
 * Follow a stream of server-sent events until it ends or ``signal`` aborts it. After a lost connection it goes on behind the last
 * event, so nothing is shown twice or left out. (EventSource cannot send a token.) A report has no stream.
 * @param {string} path
 * @param {{onEvents: (events: {id: string, type: string, data: string}[]) => void, signal: AbortSignal, lastId?: string,
 *          onState?: (state: "open" | "lost" | "ended") => void}} options
 */
export async function follow(path, { onEvents, signal, lastId = "", onState = () => {} }) {
  if (recorded) {
    onState("ended");
    return;
  }
  let pause = 1000;
  while (!signal.aborted) {
    try {
      /** @type {Record<string, string>} */
      const asked = { Accept: "text/event-stream" };
      if (lastId) asked["Last-Event-ID"] = lastId;
      const answer = await request(path, { headers: asked, signal });
      onState("open");
      pause = 1000;
      const reader = /** @type {ReadableStream<Uint8Array>} */ (answer.body).getReader();
      const decoder = new TextDecoder();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        const found = parseEvents(text + decoder.decode(value, { stream: true }));
        text = found.rest;
        const ended = found.events.some((event) => event.type === "end");
        const kept = found.events.filter((event) => event.type !== "end");
        for (const event of kept) lastId = event.id || lastId;
        if (kept.length) onEvents(kept);
        if (ended) {
          onState("ended");
          return;
        }
      }
    } catch (error) {
      if (signal.aborted) return;
      if (isFinal(error)) throw error;
      if (error instanceof Problem) pause = Math.max(pause, 1000 * error.wait);
    }
    onState("lost");
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(2 * pause, 10_000);
  }
}
