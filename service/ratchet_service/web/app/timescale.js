// @ts-check
/** A time axis that folds long pauses: pure functions. Times are milliseconds, places are 0 to 1. */

const SECOND = 1000;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
const STEPS = [1, 2, 5, 10, 15, 30].map((n) => n * SECOND)
  .concat([1, 2, 5, 10, 15, 30].map((n) => n * MINUTE), [1, 2, 3, 6, 12].map((n) => n * HOUR), [1, 2, 7, 14, 28, 91, 182, 364].map((n) => n * DAY));

/** The width of a folded pause. */
const FOLD = 0.035;

/** @typedef {{from: number, to: number, at: number, wide: number, folded: boolean}} Piece */

/**
 * The pieces of an axis on which ``spans`` are drawn: those with something in them to scale, and long pauses folded.
 * @param {[number, number][]} spans - from, to
 * @returns {Piece[]}
 */
export function pieces(spans) {
  const sorted = spans.map(([from, to]) => /** @type {[number, number]} */ ([from, Math.max(to, from + 1)])).sort((a, b) => a[0] - b[0]);
  if (!sorted.length) return [];
  const busy = sorted.reduce((sum, [from, to]) => sum + to - from, 0);
  /** @type {[number, number][]} */
  const parts = [];
  for (const [from, to] of sorted) {
    const last = parts.at(-1);
    if (last && from - last[1] <= Math.max(0.15 * busy, 5 * SECOND)) last[1] = Math.max(last[1], to);
    else parts.push([from, to]);
  }
  const folds = parts.length - 1;
  const fold = Math.min(FOLD, 0.4 / Math.max(1, folds));
  const shown = parts.reduce((sum, [from, to]) => sum + to - from, 0);
  const scale = (1 - folds * fold) / shown;
  let at = 0;
  return parts.flatMap(([from, to], n) => {
    /** @type {Piece[]} */
    const found = [];
    if (n) {
      found.push({ from: parts[n - 1][1], to: from, at, wide: fold, folded: true });
      at += fold;
    }
    found.push({ from, to, at, wide: (to - from) * scale, folded: false });
    at += (to - from) * scale;
    return found;
  });
}

/** The place of a time. @param {Piece[]} axis @param {number} time */
export function place(axis, time) {
  const piece = axis.find((one) => time <= one.to) ?? axis.at(-1);
  if (!piece) return 0;
  return piece.at + piece.wide * Math.min(1, Math.max(0, (time - piece.from) / (piece.to - piece.from)));
}

/**
 * Ticks at round times after the axis's beginning, about ``wanted`` of them, none in or close to a folded pause.
 * @param {Piece[]} axis @param {number} [wanted]
 * @returns {{at: number, after: number}[]} ``after``: seconds since the beginning
 */
export function ticks(axis, wanted = 6) {
  const shown = axis.filter((piece) => !piece.folded);
  const length = shown.reduce((sum, piece) => sum + piece.to - piece.from, 0);
  const step = STEPS.find((one) => length / one <= wanted) ?? length;
  const begin = axis[0]?.from ?? 0;
  /** @type {{at: number, after: number}[]} */
  const found = [];
  for (const piece of shown) {
    for (let n = Math.ceil((piece.from - begin) / step); begin + n * step <= piece.to; n += 1) {
      const at = place(axis, begin + n * step);
      if (at <= 0.97 && at - (found.at(-1)?.at ?? -1) > 0.5 / wanted) found.push({ at, after: (n * step) / SECOND });
    }
  }
  return found;
}
