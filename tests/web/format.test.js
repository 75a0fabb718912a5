import assert from "node:assert/strict";
import test from "node:test";
import { ago, between, count, duration, number, percent, plural, size, stepOf } from "../../service/ratchet_service/web/app/format.js";

test("durations", () => {
  assert.deepEqual([0.0034, 0.5, 12.4, 61, 120, 3600, 5400, 7190, 200_000].map(duration), ["3.4 ms", "0.5 s", "12 s", "1 min 1 s", "2 min", "1 h", "1 h 30 min", "2 h", "2 d 7 h"]);
  assert.deepEqual([duration(null), duration(NaN), duration(undefined), duration(-61)], ["–", "–", "–", "-1 min 1 s"]);
});

test("sizes", () => assert.deepEqual([0, 999, 1000, 20_416, 5_300_000, 2e12, null].map(size), ["0 B", "999 B", "1.0 kB", "20 kB", "5.3 MB", "2.0 TB", "–"]));

test("numbers in about four digits", () => {
  assert.deepEqual([0, 0.123456, 12, 1e-7, 12345.678, 2.5e9].map(number), ["0", "0.1235", "12", "1e-7", "12350", "2.5e+9"]);
  assert.deepEqual([number(NaN), number(Infinity), number(null)], ["NaN", "Infinity", "–"]);
});

test("counts", () => assert.deepEqual([count(1234567), count(999), plural(1, "step"), plural(2, "step")], ["1\u202f234\u202f567", "999", "1 step", "2 steps"]));

test("a share below 1 is never shown as 100 %", () => assert.deepEqual([percent(1), percent(0.9999), percent(0.5), percent(null)], ["100 %", "99.9 %", "50 %", "–"]));

test("the step of a checkpoint's id", () => assert.equal(stepOf("step-000000089500.a0026"), "step 89\u202f500"));

test("ages and spans of time", () => {
  const now = Date.parse("2026-01-01T01:00:00Z");
  assert.equal(ago("2026-01-01T00:59:58Z", now), "just now");
  assert.equal(ago("2026-01-01T00:59:54Z", now), "6 s ago");
  assert.equal(ago("2026-01-01T00:00:00Z", now), "1 h ago");
  assert.equal(ago(null, now), "–");
  assert.equal(between("2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"), 60);
  assert.equal(between(null, "2026-01-01T00:01:00Z"), null);
});
