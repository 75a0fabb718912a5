// @ts-check
/** Smoothing and thinning of curves: pure functions. */

/**
 * Exponential moving average for points at unequal distances. A point's weight falls to 1/e at the distance ``width``. Weights are
 * normalised, so the beginning is not drawn towards 0. It begins again after a value that is not finite.
 * @param {ArrayLike<number>} xs @param {ArrayLike<number | null>} ys @param {number} width - in units of x; 0: none
 * @returns {(number | null)[]}
 */
export function smooth(xs, ys, width) {
  const out = [];
  let sum = 0;
  let weight = 0;
  let last = NaN;
  for (let i = 0; i < xs.length; i += 1) {
    const y = ys[i];
    if (y === null || !Number.isFinite(y)) {
      out.push(null);
      sum = weight = 0;
      last = NaN;
      continue;
    }
    const kept = width > 0 && Number.isFinite(last) ? Math.exp(-Math.max(0, xs[i] - last) / width) : 0;
    sum = sum * kept + y;
    weight = weight * kept + 1;
    last = xs[i];
    out.push(sum / weight);
  }
  return out;
}

/**
 * Where a curve has a gap, make it reach from its point before the gap to its point behind it, whatever points other curves have between.
 * @param {(number | null | undefined)[]} column - as of ``align``; changed in place
 */
export function widenGaps(column) {
  let from = 0;
  for (let i = 0; i <= column.length; i += 1) {
    if (i < column.length && (column[i] === undefined || column[i] === null)) continue;
    if (column.slice(from, i).includes(null)) column.fill(null, from, i);
    from = i + 1;
  }
  return column;
}

/**
 * Merge curves to one ascending list of x, as the chart wants it: null where a curve has no point.
 * @param {{xs: ArrayLike<number>, ys: ArrayLike<number | null>}[]} curves
 * @returns {[number[], ...(number | null)[][]]}
 */
export function align(curves) {
  const all = new Set(/** @type {number[]} */ ([]));
  for (const curve of curves) for (let i = 0; i < curve.xs.length; i += 1) all.add(curve.xs[i]);
  const xs = [...all].sort((a, b) => a - b);
  const place = new Map(xs.map((x, at) => [x, at]));
  const columns = curves.map((curve) => {
    const column = /** @type {(number | null)[]} */ (new Array(xs.length).fill(undefined));
    for (let i = 0; i < curve.xs.length; i += 1) column[/** @type {number} */ (place.get(curve.xs[i]))] = curve.ys[i];
    return column;
  });
  return [xs, ...columns];
}
