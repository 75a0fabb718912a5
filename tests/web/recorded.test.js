import assert from "node:assert/strict";
import test from "node:test";
import { NotRecorded } from "../../service/ratchet_service/web/app/recorded.js";
import { answerFrom } from "../../service/ratchet_service/web/app/recorded_answers.js";

const at = (/** @type {number} */ second) => new Date(1000 * second).toISOString();
const line = (/** @type {number} */ attempt, /** @type {number} */ rank, /** @type {number} */ n, left_out = /** @type {number | null} */ (null)) => (
  { id: `${attempt}.${rank}.${n}`, attempt, rank, text: `line ${n}`, at: at(n), left_out });
/** @type {import("../../service/ratchet_service/web/app/recorded.js").Recorded} */
const FROM = {
  made_at: at(0), service: "http://host:8000", ratchet: "1", left_out: [], job: { id: "j", attempt: 3 }, hook: { name: "powerSGD" },
  hook_history: [10, 20, 30].map((step) => ({ summary: { step } })),
  attempts: [{ number: 3, environment: null }, { number: 2 }, { number: 1 }],
  checkpoints: [{ id: "b", state: "committed", manifest: {} }, { id: "a", state: "deleted" }],
  metrics: [
    { name: "whole", total: 4, every: 1, superseded: [{ step: 2 }], points: [1, 2, 3, 4].map((step) => ({ step })) },
    { name: "thinned", total: 300, every: 2, superseded: [], points: Array.from({ length: 100 }, (_, n) => ({ step: 3 * n })) },
  ],
  trackers: [{ tracker: "mlflow", run: "j" }],
  events: [{ id: 1, attempt: null, type: "queued" }, { id: 2, attempt: 3, type: "checkpoint" }, { id: 3, attempt: 3, type: "ended" }],
  files: [{ path: "runs", kind: "directory" }, { path: "runs/a", kind: "file" }, { path: "b", kind: "file" }],
  logs: [line(2, 0, 1, 99), line(2, 0, 2), line(2, 0, 3), line(2, 1, 5), line(3, 0, 9)], log_attempts: [2, 3],
};
const ask = (/** @type {string} */ path) => answerFrom(FROM, `v1/jobs/j${path}`);
const ids = (/** @type {string} */ path) => ask(path).items.map((/** @type {any} */ one) => one.id ?? one.path ?? one.number ?? one.summary.step);

test("a list has pages of the length that is asked for", () => {
  assert.deepEqual(ask("/attempts?limit=2").next_cursor, "2");
  assert.deepEqual(ids("/attempts?limit=2&cursor=2"), [1]);
  assert.deepEqual(ask("/attempts?limit=2&cursor=2").next_cursor, null);
});

test("lists are filtered as the service does it", () => {
  assert.deepEqual([ids("/checkpoints?limit=50"), ids("/checkpoints?state=committed&state=deleted")], [["b"], ["b", "a"]]);
  assert.deepEqual([ids("/events?attempt=3"), ids("/events?type=queued")], [[2, 3], [1]]);
  assert.deepEqual(ids("/hook/history?from_step=15&to_step=20"), [20]);
  assert.deepEqual([ids("/files?recursive=false"), ids("/files?path=runs"), ids("/files?path=runs%2Fa&all=true")], [["runs", "b"], ["runs/a"], ["runs/a"]]);
});

test("metrics have the asked names, steps and points, and a thinned one says in every zoom that it is", () => {
  const of = (/** @type {string} */ query) => ask(`/metrics?${query}`).series.map((/** @type {any} */ one) => [one.name, one.points.length, one.total, one.every]);
  assert.deepEqual(of("max_points=2"), [["whole", 2, 4, 1], ["thinned", 2, 300, 2]]);
  assert.deepEqual(of("max_points=600&name=thinned"), [["thinned", 100, 300, 2]]);
  assert.deepEqual(of("max_points=600&from_step=3&to_step=30"), [["whole", 2, 2, 1], ["thinned", 10, 10, 6]]);
  assert.deepEqual(ask("/metrics?max_points=3&name=whole").series[0].points.map((/** @type {any} */ one) => one.step), [1, 3, 4]);
});

test("lines of logs by attempt, rank, end, text and time", () => {
  assert.deepEqual(ids("/logs?limit=9"), ["3.0.9"]);
  assert.deepEqual(ids("/logs?attempt=2&tail=1"), ["2.0.3", "2.1.5"]);
  assert.deepEqual(ids("/logs?attempt=all&rank=0&grep=line+3"), ["2.0.1", "2.0.3"]); // and what is left out
  assert.deepEqual(ids(`/logs?attempt=all&since=${at(5)}`), ["2.1.5", "3.0.9"]);
  assert.deepEqual([ask("/logs?attempt=2&limit=3").next_cursor, ids("/logs?attempt=2&limit=3&cursor=3")], ["3", ["2.1.5"]]);
});

test("what is not in a report is refused, with the place that has it", () => {
  assert.deepEqual([ask("/attempts/3"), ask("/attempts/2")], FROM.attempts.slice(0, 2)); // also without its software
  assert.equal(ask(""), FROM.job);
  assert.deepEqual(ask("/trackers"), { items: FROM.trackers, next_cursor: null });
  for (const path of ["/attempts/9", "/checkpoints/a", "/logs?attempt=1", "/files?all=true", "/files/content?path=b", "/other"]) {
    assert.throws(() => ask(path), NotRecorded, path);
  }
  assert.throws(() => answerFrom(FROM, "v1/jobs/k?x=1"), new NotRecorded(FROM, "v1/jobs/k"));
  assert.match(new NotRecorded(FROM, "v1/jobs/k").message, /http:\/\/host:8000\/#\/jobs\/k/);
});
