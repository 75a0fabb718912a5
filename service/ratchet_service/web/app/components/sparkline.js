// @ts-check
/** A small curve (SVG). */
import { html } from "../dom.js";

/**
 * A small curve without axes. @param {{points: [number, number | null][], label: string}} props
 */
export function Sparkline({ points, label }) {
  const finite = /** @type {[number, number][]} */ (points.filter(([, y]) => y !== null && Number.isFinite(y)));
  if (finite.length < 2) return html`<span class="dim">–</span>`;
  const xs = finite.map(([x]) => x);
  const ys = finite.map(([, y]) => y);
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const at = finite.map(([x, y]) => `${((100 * (x - x0)) / (x1 - x0 || 1)).toFixed(1)} ${(19 - (18 * (y - y0)) / (y1 - y0 || 1)).toFixed(1)}`);
  return html`<svg class="spark" viewBox="0 0 100 20" preserveAspectRatio="none" role="img" aria-label=${label}><path d=${`M${at.join(" L")}`} /></svg>`;
}
