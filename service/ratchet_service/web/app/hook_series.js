// @ts-check
/** From a hook's stored summaries to curves, phases and outliers: pure functions. */
import { count } from "./format.js";
import { finite } from "./series.js";

/** @typedef {import("./components/chart.js").Curve} Curve @typedef {import("./components/chart.js").Strip} Strip
 *  @typedef {Api.HookSample} Sample */

/** Largest number of ranks that have a curve each. */
export const OWN_CURVES = 8;
/** A rank's residual norm is an outlier from this multiple of the median on. */
export const OUTLIER = 1.3;
const NAMED = 3;

/** Samples of one history, of all ranks together, and the limits of its steps. */
const SAMPLES = 1000;
const STEPS = [5, 300];

/** Number of steps of which a history is read, so that a few requests are enough. @param {number} ranks */
export const pointsFor = (ranks) => Math.max(STEPS[0], Math.min(STEPS[1], Math.floor(SAMPLES / Math.max(1, ranks))));

/** @param {number[]} values */
export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** @param {Sample[]} samples @returns {Map<number, Sample[]>} by rank, in order of steps */
export function byRank(samples) {
  /** @type {Map<number, Sample[]>} */
  const found = new Map();
  for (const one of samples) {
    const list = found.get(one.summary.rank);
    if (list) list.push(one);
    else found.set(one.summary.rank, [one]);
  }
  return new Map([...found].sort(([a], [b]) => a - b).map(([rank, list]) => [rank, list.sort((a, b) => a.summary.step - b.summary.step)]));
}

/** The first sample of an attempt has no bytes yet. @param {Sample} sample */
export const counted = (sample) => sample.summary.bytes_before > 0;

/** One figure of one rank over steps. @param {Sample[]} samples - of the rank @param {keyof Api.Summary} field @param {string} label @param {string} color @returns {Curve} */
export const figure = (samples, field, label, color) => (
  { label, xs: samples.map((one) => one.summary.step), ys: samples.map((one) => finite(one.summary[field])), color });

/**
 * Phases of the hook over steps: a part lasts until the next begins.
 * @param {Sample[]} samples - of one rank @returns {{phase: string, from: number, to: number}[]}
 */
export function phases(samples) {
  /** @type {{phase: string, from: number, to: number}[]} */
  const found = [];
  for (const { summary } of samples) {
    const last = found.at(-1);
    if (last) last.to = summary.step;
    if (last?.phase !== summary.phase) found.push({ phase: summary.phase, from: summary.step, to: summary.step });
  }
  return found;
}

/** @type {Record<string, [string, string]>} */
const TONES = { "warm-up": ["wait", "warm-up"], compressing: ["busy", "compressing"], local: ["held", "local, with averaging"], steady: ["quiet", "steady"] };

/** @param {string} phase */
export const phaseOf = (phase) => TONES[phase] ?? ["quiet", phase];

/** The phases as a strip below the x axis. @param {Sample[]} samples @returns {Strip[]} */
export const strips = (samples) => phases(samples).map(({ phase, from, to }) => ({ x: from, to, tone: phaseOf(phase)[0], label: phaseOf(phase)[1] }));

/**
 * Residual norms: a curve per rank, or with many ranks their range, their median and the outliers at the newest step.
 * @param {Map<number, Sample[]>} ranks @param {number[]} outliers - ranks @returns {Curve[]}
 */
export function norms(ranks, outliers) {
  const own = (/** @type {number} */ rank, /** @type {number} */ n) => figure(ranks.get(rank) ?? [], "residual_norm", `rank ${rank}`, `--c${n % 8}`);
  if (ranks.size <= OWN_CURVES) return [...ranks.keys()].map(own);
  /** @type {Map<number, number[]>} */
  const at = new Map();
  for (const samples of ranks.values()) {
    for (const { summary } of samples) {
      const value = finite(summary.residual_norm);
      if (value === null) continue;
      const list = at.get(summary.step);
      if (list) list.push(value);
      else at.set(summary.step, [value]);
    }
  }
  const xs = [...at.keys()].sort((a, b) => a - b);
  const ys = (/** @type {(values: number[]) => number | null} */ of) => xs.map((x) => of(at.get(x) ?? []));
  return [
    { label: "largest", xs, ys: ys((values) => values.reduce((a, b) => Math.max(a, b), -Infinity)), color: "--c0", fillTo: "smallest", dashed: true },
    { label: "smallest", xs, ys: ys((values) => values.reduce((a, b) => Math.min(a, b), Infinity)), color: "--c0", dashed: true },
    { label: "median", xs, ys: ys(median), color: "--c0" },
    ...outliers.slice(0, NAMED).map((rank, n) => ({ ...own(rank, [1, 3, 5][n]) })),
  ];
}

/**
 * Ranks by their residual norm, the largest first, each with its multiple of the median. Ranks without a norm come last.
 * @param {Api.Summary[]} summaries @returns {{rank: number, norm: number | null, share: number | null, summary: Api.Summary}[]}
 */
export function byNorm(summaries) {
  const middle = median(/** @type {number[]} */ (summaries.map((one) => finite(one.residual_norm)).filter((value) => value !== null)));
  return summaries.map((summary) => {
    const norm = finite(summary.residual_norm);
    return { rank: summary.rank, norm, share: norm !== null && middle ? norm / middle : null, summary };
  }).sort((a, b) => (b.norm ?? -1) - (a.norm ?? -1) || a.rank - b.rank);
}

/** What the norms say, in a sentence. @param {ReturnType<typeof byNorm>} rows */
export function normText(rows) {
  const first = rows.find((row) => row.norm !== null);
  if (!first || rows.length < 2) return "";
  if (!first.share) return "No rank has a residual yet.";
  const outliers = rows.filter((row) => (row.share ?? 0) > OUTLIER);
  const text = `Rank ${first.rank} has the largest residual: ${first.share.toFixed(first.share < 1.05 ? 2 : 1)} times the median.`;
  if (!outliers.length) return `${text} No rank stands out.`;
  return outliers.length === 1 ? text : `${text} ${count(outliers.length)} ranks are above ${OUTLIER} times the median.`;
}

/** About how many bytes of gradients one rank sent, from its samples; null: the hook does not tell. @param {Sample[]} samples - of one rank */
export function bytesSent(samples) {
  let sum = 0;
  let before = 0;
  for (const { summary } of samples.filter(counted)) {
    if (summary.bytes_after === null) return null;
    sum += summary.bytes_after * Math.max(0, summary.iteration - before);
    before = Math.max(before, summary.iteration);
  }
  return samples.length ? sum : null;
}

/** What hooks without a state send. @type {Record<string, string>} */
const SENDS = {
  allreduce: "It sends every gradient unchanged, in one all-reduce per bucket.",
  fp16_compress: "It sends every gradient as float16: half the bytes of float32. A gradient of 65520 or more becomes infinite.",
  bf16_compress: "It sends every gradient as bfloat16: half the bytes of float32, the same range, about three decimal digits.",
  quantization_pertensor: "It sends every gradient in 8 bits, from each rank to all others; each bucket has one scale.",
  quantization_perchannel: "It sends every gradient in 8 bits, from each rank to all others; each block of a bucket has its own scale.",
  noop: "It sends nothing. Each rank trains by itself, and the result is wrong: this hook only measures what communication costs.",
  custom: "It is the job's own function. Ratchet does not know what it sends.",
};

/** @param {Api.Hook} hook */
export function sends(hook) {
  const { parameters, phase } = hook;
  const rank = parameters.matrix_approximation_rank;
  if (!hook.stateful) return SENDS[hook.name] ?? "It keeps nothing from one step to the next.";
  if (phase === "warm-up") {
    const start = parameters.start_powerSGD_iter ?? parameters.start_localSGD_iter;
    const left = start !== undefined && hook.iteration !== null ? start - hook.iteration : null;
    const then = hook.name === "post_localSGD" ? "Ranks train by themselves" : "Compression begins";
    return `Warm-up: it sends every gradient uncompressed. ${then} at iteration ${count(start)}${left !== null && left > 0 ? `, ${count(left)} from now` : ""}.`;
  }
  if (phase === "compressing") {
    const what = hook.name === "batched_powerSGD" ? "Each bucket" : "Each large weight matrix";
    const kept = parameters.use_error_feedback === false ? "The error is dropped." : "What the product misses stays on the rank as its residual, and is added to the next gradient.";
    return `It compresses: ${what.toLowerCase()} is sent as two thin matrices of rank ${rank}. ${kept}`;
  }
  if (phase === "local") {
    const period = parameters.model_averaging_period;
    return `Ranks train by themselves or in subgroups. All parameters are averaged ${period ? `every ${count(period)} steps` : "periodically"}${hook.next_averaging !== null ? `, next after step ${count(hook.next_averaging)}` : ""}.`;
  }
  return hook.name === "custom" ? "It is the job's own function, with a state that every checkpoint has." : "It has not done a step yet.";
}
