import assert from "node:assert/strict";
import test from "node:test";
import { align, smooth, widenGaps } from "../../service/ratchet_service/web/app/smoothing.js";
import { clockTick, logSplits, spanTick } from "../../service/ratchet_service/web/app/ticks.js";

test("a smoothed curve begins at its first value and follows a constant", () => {
  assert.deepEqual(smooth([1, 2, 3], [4, 4, 4], 10), [4, 4, 4]);
  assert.equal(smooth([0, 1], [8, 0], 5)[0], 8);
});

test("width 0 does not smooth", () => assert.deepEqual(smooth([0, 1, 2], [3, 1, 2], 0), [3, 1, 2]));

test("a point's weight depends on its distance, not on the number of points", () => {
  const near = /** @type {number} */ (smooth([0, 1], [0, 1], 10)[1]);
  const far = /** @type {number} */ (smooth([0, 100], [0, 1], 10)[1]);
  assert.ok(near < 0.6 && far > 0.99);
  const weight = Math.exp(-0.1);
  assert.ok(Math.abs(near - 1 / (1 + weight)) < 1e-12);
});

test("smoothing begins again after a value that is not finite", () =>
  assert.deepEqual(smooth([0, 1, 2, 3, 4], [1, NaN, 5, null, 7], 100), [1, null, 5, null, 7]));

test("points at the same x, and x that goes back, give no weight above 1", () => {
  const found = smooth([0, 0, -5], [2, 4, 6], 1);
  assert.deepEqual(found, [2, 3, 4]);
});

test("align merges the x values; a curve without a point there is undefined, a gap is null", () =>
  assert.deepEqual(align([{ xs: [1, 3], ys: [10, null] }, { xs: [2, 3], ys: [20, 30] }]),
    [[1, 2, 3], [10, undefined, null], [undefined, 20, 30]]));

test("a gap reaches over the points of other curves", () => {
  assert.deepEqual(widenGaps([1, undefined, null, undefined, 2, undefined, 3]), [1, null, null, null, 2, undefined, 3]);
  assert.deepEqual(widenGaps([undefined, 1, null, undefined]), [undefined, 1, null, null]);
});

test("align of nothing", () => assert.deepEqual(align([]), [[]]));

test("splits of a logarithmic axis", () => {
  assert.deepEqual(logSplits(0.0005, 20), [0.001, 0.01, 0.1, 1, 10]);
  assert.deepEqual(logSplits(1, 10), [1, 2, 5, 10]);
  assert.deepEqual(logSplits(1, 90), [1, 3, 10, 30]);
  assert.ok(logSplits(1e-30, 1e30).length <= 9);
});

test("seconds since the beginning", () =>
  assert.deepEqual([0, 0.5, 75, 3600, 3725.5, -5].map(spanTick), ["0:00", "0:00.5", "1:15", "1:00:00", "1:02:05.5", "-0:05"]));

test("parts of a second in the time of a day", () => {
  const at = new Date(2026, 0, 2, 3, 4, 5).getTime() / 1000;
  assert.equal(clockTick(at + 0.25), `${clockTick(at)}.25`);
});
