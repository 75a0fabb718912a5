// @ts-check
/** From the API's metric series and attempts to curves and marks of a chart: pure functions. */
import { count } from "./format.js";
import { causeText, causeTone } from "./meaning.js";
import { smooth } from "./smoothing.js";

/** @typedef {import("./components/chart.js").Curve} Curve @typedef {import("./components/chart.js").Mark} Mark */

/** How x is counted: steps, seconds since training began, or the time of day. @typedef {"step" | "relative" | "wall"} Axis */

/** @param {{step: number, at: string}} point @param {Axis} axis @param {number} origin - milliseconds */
export const xOf = (point, axis, origin) =>
  axis === "step" ? point.step : axis === "wall" ? Date.parse(point.at) / 1000 : (Date.parse(point.at) - origin) / 1000;

/** When the job began to train, in milliseconds: the zero of the relative axis. @param {Api.Job} job @param {Api.Attempt[]} attempts */
export function originOf(job, attempts) {
  // Earlier attempts may be left out: then the newest ones do not tell when training began.
  const begun = attempts.length < job.attempt ? null : attempts.map((one) => one.training_at).filter(Boolean).sort()[0];
  return Date.parse(begun ?? job.started_at ?? job.created_at);
}

/** @param {any} value - NaN and infinities come as texts */
export const finite = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);

/**
 * Curves of one series: smoothed above its raw values, and as dots the earlier values of steps that came out otherwise when they
 * were done again, which should not be. Over time the curve has a gap where one attempt ended and the next began.
 * @param {Api.Series} series @param {number} width - of the smoothing, in units of x; 0: none
 * @param {{axis?: Axis, origin?: number, color?: string, label?: string}} [options] @returns {Curve[]}
 */
export function curveOf(series, width, { axis = "step", origin = 0, color = "--c0", label = series.name } = {}) {
  const parts = /** @type {{xs: number[], ys: (number | null)[]}[]} */ ([]);
  /** @type {number[]} */
  const gaps = [];
  let before = /** @type {Api.Point | null} */ (null);
  for (const point of series.points) {
    const x = xOf(point, axis, origin);
    if (!before || (axis !== "step" && before.attempt !== point.attempt)) {
      if (before) gaps.push((xOf(before, axis, origin) + x) / 2);
      parts.push({ xs: [], ys: [] });
    }
    const part = parts[parts.length - 1];
    part.xs.push(x);
    part.ys.push(finite(point.value));
    before = point;
  }
  const xs = parts.flatMap((part) => part.xs);
  const ys = parts.flatMap((part) => part.ys);
  const more = { color, ...(gaps.length && { gaps }) };
  /** @type {Curve[]} */
  const curves = width > 0
    ? [{ label: `${label} (raw)`, xs, ys, faint: true, ...more }, { label, xs, ys: parts.flatMap((part) => smooth(part.xs, part.ys, width)), ...more }]
    : [{ label, xs, ys, ...more }];
  const old = (series.superseded ?? []).filter((point) => finite(point.value) !== null);
  if (old.length) {
    curves.push({
      label: "first value of a redone step that differs", xs: old.map((point) => xOf(point, axis, origin)),
      ys: old.map((point) => point.value), color: "--bad", dots: true,
    });
  }
  return curves;
}

/** Steps whose value is not a number, or infinite. @param {Api.Series} series @param {Axis} axis @param {number} origin @returns {Mark[]} */
export const nanMarks = (series, axis = "step", origin = 0) =>
  series.points.filter((point) => finite(point.value) === null).map((point) => (
    { x: xOf(point, axis, origin), tone: "bad", label: `${series.name} is ${point.value ?? "not a number"} at step ${point.step}` }));

/**
 * The ends of attempts as lines, and the steps that they lost as spans.
 * @param {Api.Attempt[]} attempts @param {Axis} [axis] @param {number} [origin] @returns {Mark[]}
 */
export function attemptMarks(attempts, axis = "step", origin = 0) {
  /** @type {Mark[]} */
  const marks = [];
  for (const one of attempts) {
    if (!one.cause || one.cause === "completed") continue;
    const [from, last, end] = axis === "step" ? [one.last_step - (one.steps_lost ?? 0), one.last_step, one.last_step] : endOf(one, axis, origin);
    if (one.steps_lost && last > from) marks.push({ x: from, to: last, tone: "bad", label: `attempt ${one.number} lost ${one.steps_lost} steps` });
    if (Number.isFinite(end)) marks.push({ x: end, tone: causeTone(one.cause), label: `attempt ${one.number} ended: ${causeText(one.cause)}` });
  }
  return marks;
}

/** Begin of its lost steps, its last step, and its end, over time. @param {Api.Attempt} one @param {Axis} axis @param {number} origin */
function endOf(one, axis, origin) {
  const end = one.ended_at ? xOf({ step: 0, at: one.ended_at }, axis, origin) : NaN;
  const last = end - (one.goodput?.stopping_seconds ?? 0);
  return [last - (one.goodput?.lost_seconds ?? 0), last, end];
}

/** @typedef {[number, number]} Range */

/** The part of the x axis that shows these steps. @param {Api.Series[]} list @param {Range | null} steps @param {Axis} axis @param {number} origin @returns {Range | null} */
export function rangeOfSteps(list, steps, axis, origin) {
  if (!steps || axis === "step") return steps;
  const xs = list.flatMap((series) => series.points).filter((point) => point.step >= steps[0] && point.step <= steps[1]).map((point) => xOf(point, axis, origin));
  return xs.length ? span(xs) : null;
}

/** The steps in a part of the x axis. @param {Api.Series[]} list @param {Range} range @param {Axis} axis @param {number} origin @returns {Range | null} */
export function stepsOfRange(list, [from, to], axis, origin) {
  if (axis === "step") return Math.floor(to) > Math.ceil(from) ? [Math.max(0, Math.ceil(from)), Math.floor(to)] : null;
  const steps = list.flatMap((series) => series.points).filter((point) => xOf(point, axis, origin) >= from && xOf(point, axis, origin) <= to).map((point) => point.step);
  const found = steps.length ? span(steps) : null;
  return found && found[1] > found[0] ? found : null;
}

/** @param {number[]} values @returns {Range} */
function span(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/** First and last x of several series. @param {Api.Series[]} list @param {Axis} axis @param {number} origin @returns {Range | null} */
export function extentOf(list, axis, origin) {
  const ends = list.filter((series) => series.points.length).flatMap((series) => [series.points[0], series.points[series.points.length - 1]]);
  return ends.length ? span(ends.map((point) => xOf(point, axis, origin))) : null;
}

/** What was left out of a series, in words; empty: nothing. ``total`` counts the steps that were asked for. @param {Api.Series} series */
export function leftOut(series) {
  const parts = [];
  if (series.total > series.points.length) parts.push(`${count(series.points.length)} of ${count(series.total)} points shown`);
  if (series.every > 1) parts.push(`about 1 of ${count(series.every)} points stored`);
  return parts.join(" · ");
}

/** Whether ``auto`` means a logarithmic axis. Shares, as an accuracy is, stay linear. @param {string} name @param {{value: any}[]} points */
export const prefersLog = (name, points) => better(name) !== "highest" && wide(points);

/** Values over more than a decade, all positive. @param {{value: any}[]} points */
export function wide(points) {
  const values = /** @type {number[]} */ (points.map((point) => finite(point.value)).filter((value) => value !== null));
  const [low, high] = span(values);
  return values.length > 1 && low > 0 && high / low > 20;
}

/** How many values a logarithmic axis cannot show. @param {{value: any}[]} points */
export const notPositive = (points) => points.filter((point) => typeof point.value === "number" && point.value <= 0).length;

/**
 * Lowest and highest value, each with its point, and the newest point.
 * @param {{value: any, step: number}[]} points
 */
export function extremes(points) {
  let [lowest, highest] = /** @type {[any, any]} */ ([null, null]);
  for (const point of points) {
    if (finite(point.value) === null) continue;
    if (!lowest || point.value < lowest.value) lowest = point;
    if (!highest || point.value > highest.value) highest = point;
  }
  return { lowest, highest, last: points.at(-1) ?? null };
}

/** Whether lower or higher values of a metric are better, by its name; null: the name does not tell. @param {string} name @returns {"lowest" | "highest" | null} */
export function better(name) {
  if (/loss|err|perplexity|ppl|nll|mse|mae|rmse|seconds|latency/i.test(name)) return "lowest";
  return /acc|f1|auc|bleu|rouge|score|reward|precision|recall|map|iou|per_second/i.test(name) ? "highest" : null;
}

/**
 * A test of names by a text, or several of them with ``|`` between, in any case of letters.
 * @param {string} text @returns {(name: string) => boolean}
 */
export function nameFilter(text) {
  const parts = text.toLowerCase().split("|").map((part) => part.trim()).filter(Boolean);
  return (name) => !parts.length || parts.some((part) => name.toLowerCase().includes(part));
}

/** Widths of smoothing that a slider offers for a range of x: 0, then 1, 2, 5, 10, 20 ... to a third of the range. @param {Range | null} range */
export function smoothingWidths(range) {
  const whole = range ? range[1] - range[0] : 0;
  const widths = [0];
  for (let power = 1; power <= whole / 3; power *= 10) for (const digit of [1, 2, 5]) if (digit * power <= whole / 3) widths.push(digit * power);
  return widths;
}

/** A series as comma-separated values. The first values of redone steps that differ are marked. @param {Api.Series} series */
export function csvOf(series) {
  const line = (/** @type {Api.Point} */ point, /** @type {string} */ note) => [point.step, point.value, point.attempt, point.at, note].join(",");
  return ["step,value,attempt,at,note", ...series.points.map((point) => line(point, "")),
    ...(series.superseded ?? []).map((point) => line(point, "superseded: the step was done again and differs")), ""].join("\n");
}
