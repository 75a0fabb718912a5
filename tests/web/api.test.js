import assert from "node:assert/strict";
import test from "node:test";
import { Problem, change, download, isFinal, pages, parseEvents } from "../../service/ratchet_service/web/app/api.js";

test("complete events, and the rest", () => {
  const { events, rest } = parseEvents("id: 1\ndata: a\n\nid: 2\nevent: end\ndata: {}\n\nid: 3\nda");
  assert.deepEqual(events, [{ id: "1", type: "message", data: "a" }, { id: "2", type: "end", data: "{}" }]);
  assert.equal(rest, "id: 3\nda");
});

test("an event that arrives in two pieces", () => {
  const first = parseEvents("id: 1\nda");
  const second = parseEvents(`${first.rest}ta: x\n\n`);
  assert.deepEqual([first.events, second.events[0].data], [[], "x"]);
});

test("comments are no events, several lines of data are one text", () =>
  assert.deepEqual(parseEvents(": ping\n\ndata: a\ndata:  b\n\n").events, [{ id: "", type: "message", data: "a\n b" }]));

test("lines may end with CR LF", () => assert.equal(parseEvents("data: a\r\n\r\n").events[0].data, "a"));

test("a list is read to its end, or to the last page that is allowed", async () => {
  /** @type {Record<string, any>} */
  const answers = { "e?": { items: [1, 2], next_cursor: "a" }, "e?&cursor=a": { items: [3], next_cursor: "b" }, "e?&cursor=b": { items: [4], next_cursor: null } };
  const get = async (/** @type {string} */ path) => ({ data: answers[path], etag: "x" });
  assert.deepEqual(await pages(3, get)("e?"), { data: { items: [1, 2, 3, 4], next_cursor: null }, etag: "" });
  assert.deepEqual((await pages(2, get)("e?")).data, { items: [1, 2, 3], next_cursor: "b" });
  assert.deepEqual(await pages(3, get)("e?&cursor=b"), { data: answers["e?&cursor=b"], etag: "x" });
  assert.deepEqual(await pages(3, async () => ({ data: null, etag: "x" }))("e?"), { data: null, etag: "x" });
});

test("a refusal that ends following", () =>
  assert.deepEqual([401, 404, 429, 503].map((status) => isFinal(new Problem(status, {}))), [true, true, false, false]));

test("a request without an answer is repeated with its key", async () => {
  const keys = /** @type {string[]} */ ([]);
  let broken = true;
  Object.assign(globalThis, { sessionStorage: { getItem: () => "" } });
  globalThis.fetch = async (_path, options) => {
    keys.push(/** @type {any} */ (options).headers["Idempotency-Key"]);
    if (broken) throw new TypeError("no connection");
    return new Response("{}");
  };
  await assert.rejects(change("POST", "v1/jobs/a/preempt"), /does not answer/);
  broken = false;
  await change("POST", "v1/jobs/a/preempt");
  await change("POST", "v1/jobs/a/preempt");
  assert.equal(keys[0], keys[1]);
  assert.notEqual(keys[1], keys[2]);
});

test("a file that is too large for a page is not fetched", async () => {
  globalThis.fetch = async () => new Response("x", { headers: { "Ratchet-Size": "2000000000" } });
  await assert.rejects(download("v1/archive"), /2.0 GB are too large/);
});
