import assert from "node:assert/strict";
import test from "node:test";
import {
  attemptMarks, better, csvOf, curveOf, extentOf, extremes, leftOut, nameFilter, nanMarks, notPositive, originOf, prefersLog, rangeOfSteps,
  smoothingWidths, stepsOfRange, wide, xOf,
} from "../../service/ratchet_service/web/app/series.js";

const T0 = Date.parse("2026-01-01T00:00:00Z");
/** @param {number} step @param {any} value @param {number} [attempt] @param {number} [seconds] */
const point = (step, value, attempt = 1, seconds = step) => ({ step, value, attempt, at: new Date(T0 + 1000 * seconds).toISOString() });
/** @param {any[]} points @param {any} [more] */
const series = (points, more = {}) => ({ name: "loss", superseded: [], every: 1, points, ...more });

test("x by axis", () => {
  const one = point(7, 1, 1, 90);
  assert.deepEqual([xOf(one, "step", T0), xOf(one, "relative", T0), xOf(one, "wall", T0)], [7, 90, T0 / 1000 + 90]);
});

test("relative time begins with the first training", () => {
  const job = { created_at: "2026-01-01T00:00:00Z", started_at: "2026-01-01T00:01:00Z" };
  assert.equal(originOf(job, [{ training_at: "2026-01-01T00:05:00Z" }, { training_at: "2026-01-01T00:02:00Z" }, { training_at: null }]), T0 + 120_000);
  assert.equal(originOf(job, []), T0 + 60_000);
  assert.equal(originOf({ ...job, attempt: 2 }, [{ training_at: "2026-01-01T00:05:00Z" }]), T0 + 60_000);
});

test("NaN and infinities, which come as texts, are gaps and marks", () => {
  const one = series([point(1, 2), point(2, "NaN"), point(3, "Infinity"), point(4, 0)]);
  assert.deepEqual(curveOf(one, 0)[0].ys, [2, null, null, 0]);
  assert.deepEqual(nanMarks(one).map(({ x, label }) => [x, label]), [[2, "loss is NaN at step 2"], [3, "loss is Infinity at step 3"]]);
});

test("smoothing keeps the raw curve behind it", () => {
  const [raw, smoothed] = curveOf(series([point(1, 2), point(2, 4)]), 5);
  assert.equal(raw.faint, true);
  assert.deepEqual(raw.ys, [2, 4]);
  assert.ok(/** @type {number} */ (smoothed.ys[1]) < 4);
});

test("over time the curve has a gap between two attempts, over steps it has none", () => {
  const one = series([point(1, 5, 1, 1), point(2, 4, 1, 2), point(3, 3, 2, 60)]);
  assert.deepEqual(curveOf(one, 0, { axis: "relative", origin: T0 })[0], { label: "loss", xs: [1, 2, 60], ys: [5, 4, 3], color: "--c0", gaps: [31] });
  assert.deepEqual(curveOf(one, 0)[0].ys, [5, 4, 3]);
});

test("first values of redone steps that differ are dots", () => {
  const found = curveOf(series([point(1, 5, 2)], { superseded: [point(1, 6), point(2, "NaN")] }), 0);
  assert.equal(found.length, 2);
  assert.deepEqual([found[1].dots, found[1].xs, found[1].ys], [true, [1], [6]]);
});

const killed = { number: 1, cause: "rank-killed", last_step: 50, steps_lost: 10, ended_at: new Date(T0 + 100_000).toISOString(), goodput: { lost_seconds: 8, stopping_seconds: 2 } };

test("ends of attempts are lines in their tone, lost steps are spans", () => {
  const preempted = { ...killed, number: 2, cause: "api-preempt", steps_lost: 0, last_step: 70 };
  const running = { ...killed, number: 3, cause: null };
  const done = { ...killed, number: 4, cause: "completed" };
  const marks = attemptMarks([killed, preempted, running, done]);
  assert.deepEqual(marks.map(({ x, to, tone }) => [x, to, tone]), [[40, 50, "bad"], [50, undefined, "bad"], [70, undefined, "held"]]);
});

test("over time lost steps end before the attempt stops", () =>
  assert.deepEqual(attemptMarks([killed], "relative", T0).map(({ x, to }) => [x, to]), [[90, 98], [100, undefined]]));

test("zoomed steps to a range of time and back", () => {
  const list = [series([1, 2, 3, 4, 5].map((step) => point(step, step, 1, 10 * step)))];
  assert.deepEqual(rangeOfSteps(list, [2, 4], "relative", T0), [20, 40]);
  assert.deepEqual(stepsOfRange(list, [15, 45], "relative", T0), [2, 4]);
  assert.deepEqual(stepsOfRange(list, [1.2, 3.9], "step", T0), [2, 3]);
  assert.equal(stepsOfRange(list, [1.2, 1.9], "step", T0), null);
  assert.equal(stepsOfRange(list, [41, 49], "relative", T0), null);
  assert.deepEqual(rangeOfSteps(list, [2, 4], "step", T0), [2, 4]);
  assert.equal(rangeOfSteps(list, null, "wall", T0), null);
  assert.deepEqual(extentOf(list, "step", T0), [1, 5]);
  assert.equal(extentOf([series([])], "step", T0), null);
});

test("what was left out", () => {
  assert.equal(leftOut(series([point(1, 1)])), "");
  assert.equal(leftOut(series([point(1, 1)], { total: 250_000, every: 8 })), "1 of 250\u202f000 points shown · about 1 of 8 points stored");
  assert.equal(leftOut(series([point(1, 1)], { total: 250_000 })), "1 of 250\u202f000 points shown");
});

test("a logarithmic axis for values over decades, but not for shares", () => {
  assert.equal(wide([point(1, 100), point(2, 1)]), true);
  assert.equal(wide([point(1, 100), point(2, 0)]), false);
  assert.equal(wide([point(1, 100), point(2, "NaN")]), false);
  assert.equal(wide([]), false);
  assert.equal(prefersLog("accuracy", [point(1, 0.01), point(2, 1)]), false);
  assert.equal(notPositive([point(1, 0), point(2, -1), point(3, "NaN"), point(4, 1)]), 2);
});

test("lowest, highest and last value", () => {
  const found = extremes([point(1, 3), point(2, "NaN"), point(3, 1), point(4, 2)]);
  assert.deepEqual([found.lowest.step, found.highest.step, found.last.step], [3, 1, 4]);
  assert.deepEqual(extremes([]), { lowest: null, highest: null, last: null });
});

test("which values are better, by the name", () => {
  assert.deepEqual(["test_loss", "val/accuracy", "samples_per_second", "lr"].map(better), ["lowest", "highest", "highest", null]);
});

test("names by text, or by several", () => {
  assert.deepEqual(["loss", "Accuracy", "lr"].filter(nameFilter("loss|acc")), ["loss", "Accuracy"]);
  assert.deepEqual(["f(x", "fx"].filter(nameFilter("f(x")), ["f(x"]);
  assert.equal(nameFilter("")("anything"), true);
  assert.equal(nameFilter("(a+)+$")("a".repeat(50)), false);
});

test("widths of smoothing fit the range", () => {
  assert.deepEqual(smoothingWidths([0, 100]), [0, 1, 2, 5, 10, 20]);
  assert.deepEqual(smoothingWidths(null), [0]);
});

test("a series as comma-separated values", () => {
  const text = csvOf(series([point(1, 0.5), point(2, "NaN")], { superseded: [point(1, 0.75)] }));
  const lines = text.split("\n");
  assert.equal(lines[0], "step,value,attempt,at,note");
  assert.equal(lines[1], "1,0.5,1,2026-01-01T00:00:01.000Z,");
  assert.match(lines[3], /^1,0.75,.*superseded/);
  assert.equal(lines.length, 5);
});
