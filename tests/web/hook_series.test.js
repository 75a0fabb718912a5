import assert from "node:assert/strict";
import test from "node:test";
import { byNorm, byRank, bytesSent, median, norms, normText, phases, sends, strips } from "../../service/ratchet_service/web/app/hook_series.js";
import { differences, leaves } from "../../service/ratchet_service/web/app/spec_diff.js";

/** @param {number} rank @param {number} step @param {any} [more] */
const sample = (rank, step, more = {}) => ({ attempt: 1, at: "", summary: { rank, step, iteration: step, phase: "compressing", residual_norm: 1, bytes_before: 100, bytes_after: 10, ...more } });

test("median", () => assert.deepEqual([median([3, 1, 2]), median([4, 1]), median([])], [2, 2.5, null]));

test("samples by rank, in order of steps", () => {
  const found = byRank([sample(1, 5), sample(0, 9), sample(0, 2)]);
  assert.deepEqual([...found.keys()], [0, 1]);
  assert.deepEqual((found.get(0) ?? []).map((one) => one.summary.step), [2, 9]);
});

test("phases join: each lasts until the next begins", () => {
  const list = [sample(0, 0, { phase: "warm-up" }), sample(0, 10, { phase: "warm-up" }), sample(0, 20), sample(0, 30)];
  assert.deepEqual(phases(list), [{ phase: "warm-up", from: 0, to: 20 }, { phase: "compressing", from: 20, to: 30 }]);
  assert.deepEqual(strips(list).map(({ tone }) => tone), ["wait", "busy"]);
});

test("few ranks have a curve each, many have range, median and outliers", () => {
  const many = Array.from({ length: 12 }, (_, rank) => [sample(rank, 1, { residual_norm: rank === 3 ? 5 : 1 + rank / 100 }), sample(rank, 2, { residual_norm: rank === 3 ? "Infinity" : 2 })]).flat();
  assert.equal(norms(byRank(many.filter((one) => one.summary.rank < 8)), []).length, 8);
  const found = norms(byRank(many), [3]);
  assert.deepEqual(found.map(({ label }) => label), ["largest", "smallest", "median", "rank 3"]);
  assert.deepEqual(found[0].ys, [5, 2]);
  assert.deepEqual(found[1].ys, [1, 2]);
  assert.equal(found[0].fillTo, "smallest");
  assert.deepEqual(found[3].ys, [5, null]);
});

test("the largest residual comes first and is named", () => {
  const rows = byNorm([1, 1.02, 1.3, 1.4].map((residual_norm, rank) => ({ rank, residual_norm })));
  assert.equal(rows[0].rank, 3);
  assert.equal(normText(rows), "Rank 3 has the largest residual: 1.2 times the median. No rank stands out.");
  const one = byNorm([1, 1, 1, 1.31].map((residual_norm, rank) => ({ rank, residual_norm })));
  assert.equal(normText(one), "Rank 3 has the largest residual: 1.3 times the median.");
  assert.equal(normText(byNorm([{ rank: 0, residual_norm: 0 }, { rank: 1, residual_norm: 0 }])), "No rank has a residual yet.");
  assert.equal(normText(byNorm([{ rank: 0, residual_norm: null }, { rank: 1, residual_norm: null }])), "");
});

test("bytes sent: between two samples each iteration sends what the later one tells", () => {
  assert.equal(bytesSent([sample(0, 0, { bytes_before: 0, bytes_after: 0 }), sample(0, 10, { bytes_after: 100 }), sample(0, 20)]), 1100);
  assert.equal(bytesSent([sample(0, 5, { bytes_after: null })]), null);
  assert.equal(bytesSent([]), null);
});

test("what the hook does, in words", () => {
  const hook = { name: "powerSGD", stateful: true, phase: "warm-up", iteration: 40, next_averaging: null, parameters: { start_powerSGD_iter: 60, matrix_approximation_rank: 2 } };
  assert.match(sends(hook), /Compression begins at iteration 60, 20 from now/);
  assert.match(sends({ ...hook, phase: "compressing" }), /rank 2/);
  assert.match(sends({ ...hook, name: "allreduce", stateful: false, parameters: {} }), /unchanged/);
  assert.match(sends({ ...hook, name: "post_localSGD", phase: "local", next_averaging: 12, parameters: { model_averaging_period: 4 } }), /every 4 steps, next after step 12/);
});

test("leaves of a spec", () =>
  assert.deepEqual(leaves({ a: { b: 1, c: [1, 2] }, d: [{ e: null }], f: {} }), [["a.b", 1], ["a.c", [1, 2]], ["d.0.e", null]]));

test("only keys that differ, null where one is missing", () => {
  const found = differences([{ name: "x", a: 1, b: { c: 2 } }, { name: "y", a: 1, b: { c: 3, d: "t" } }], ["name"]);
  assert.deepEqual(found, [{ key: "b.c", values: ["2", "3"] }, { key: "b.d", values: ["null", '"t"'] }]);
  assert.deepEqual(differences([{ a: [1] }, { a: [1] }]), []);
});
