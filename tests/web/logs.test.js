import assert from "node:assert/strict";
import test from "node:test";
import { LogReader } from "../../service/ratchet_service/web/app/logs/reader.js";

const START = Date.parse("2026-01-01T00:00:00Z");

/**
 * A service that has logs: ``logs[attempt][rank]`` is a number of lines. Answers of ``fetch``, and what was asked.
 * @param {number[][]} logs - of attempt 1, 2, ... @param {number} [most] - lines of one page
 */
function serve(logs, most = 1000) {
  /** @type {URLSearchParams[]} */
  const asked = [];
  /** @param {string} path @param {any} options */
  const answer = async (path, options) => {
    const query = new URL(path, "http://service").searchParams;
    asked.push(query);
    if (query.has("follow")) {
      asked[asked.length - 1].set("mark", options.headers["Last-Event-ID"] ?? "");
      return new Response("event: end\ndata: {}\n\n");
    }
    const [attempt, rank, tail] = ["attempt", "rank", "tail"].map((name) => query.get(name));
    const lines = (logs[Number(attempt) - 1] ?? []).flatMap((many, one) => {
      if (rank !== null && Number(rank) !== one) return [];
      const all = Array.from({ length: many }, (_, n) => ({ id: `${attempt}.${one}.${10 * (n + 1)}`, attempt: Number(attempt), rank: one, text: `line ${n}`, at: new Date(START + 1e6 * Number(attempt) + 1000 * n).toISOString(), left_out: null }));
      return all.slice(tail === null ? 0 : -Number(tail));
    });
    return Response.json({ items: lines.slice(0, Math.min(most, Number(query.get("limit")))), next_cursor: lines.length > most ? "more" : null });
  };
  globalThis.fetch = /** @type {any} */ (answer);
  globalThis.sessionStorage = /** @type {any} */ ({ getItem: () => null });
  return asked;
}

/** @param {number} attempts @param {number} ranks @param {Record<string, any>} [more] */
const reader = (attempts, ranks, more = {}) => new LogReader({
  job: "j", attempt: null, rank: null, search: "", from: "end", attempts: Array.from({ length: attempts }, (_, n) => n + 1), ranks, ...more }, () => {});

test("earlier lines of many attempts of few ranks are all read", async () => {
  serve([[500, 500], ...Array.from({ length: 19 }, () => [5, 5])]);
  const one = reader(20, 2);
  await one.begin();
  while (!one.atStart) await one.older();
  assert.equal(one.lines.length, 1000 + 190);
  for (const rank of [0, 1]) {
    const found = one.lines.filter((line) => line.rank === rank && line.attempt === 1).map(({ offset }) => offset);
    assert.deepEqual(found, Array.from({ length: 500 }, (_, n) => 10 * (n + 1)));
  }
});

test("attempts without a line: a few are asked at one time, and the beginning is found later", async () => {
  const asked = serve([[5], ...Array.from({ length: 50 }, () => [0])]);
  const one = reader(51, 1);
  await one.begin();
  assert.equal(asked.length, 20);
  assert.deepEqual([one.lines.length, one.atStart], [0, false]);
  await one.older();
  assert.deepEqual([asked.length, one.atStart], [40, false]);
  await one.older();
  assert.deepEqual([one.lines.length, asked.length], [5, 51]);
  await one.older();
  assert.equal(one.atStart, true);
});

test("a stream begins where the view begins, also without a line", async () => {
  const asked = serve([[0]]);
  const from = "2026-01-02T00:00:00.000Z";
  await reader(1, 1, { from }).follow(new AbortController().signal);
  assert.deepEqual([asked[0].get("since"), asked[0].get("mark")], [from, ""]);
  await reader(1, 1).follow(new AbortController().signal);
  assert.equal(asked[1].has("since"), false);
});

test("more ranks than are read at one time are not followed", async () => {
  serve([[1, 1], Array.from({ length: 10 }, () => 10)], 50);
  const one = reader(2, 10);
  globalThis.fetch = /** @type {any} */ (async () => Response.json({ items: Array.from({ length: 1000 }, (_, n) => ({ id: `2.${n}.10`, attempt: 2, rank: n, text: "", at: null, left_out: null })), next_cursor: "more" }));
  await one.begin();
  assert.equal(one.partial, true);
});
