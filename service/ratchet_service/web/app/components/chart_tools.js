// @ts-check
/** Choices that several charts share: the x axis, smoothing, the scale, and the steps that are zoomed in. All are in the address. */
import { classes, html, useRef } from "../dom.js";
import { duration, plural } from "../format.js";
import { setQuery } from "../route.js";
import { smoothingWidths } from "../series.js";
import { Choice } from "./basics.js";

/** @typedef {import("../series.js").Axis} Axis @typedef {import("../series.js").Range} Range
 *  @typedef {{axis: Axis, width: number, scale: "auto" | "linear" | "log", steps: Range | null}} Chosen */

/** @param {URLSearchParams} query @returns {Chosen} */
export function chosen(query) {
  const axis = query.get("x");
  const scale = query.get("y");
  const [from, to] = [Number(query.get("from") ?? NaN), Number(query.get("to") ?? NaN)];
  return {
    axis: axis === "relative" || axis === "wall" ? axis : "step", width: Math.max(0, Number(query.get("smooth")) || 0),
    scale: scale === "linear" || scale === "log" ? scale : "auto", steps: to > from ? [from, to] : null,
  };
}

/** @param {Range | null} steps */
export const setZoom = (steps) => setQuery({ from: steps?.[0] ?? null, to: steps?.[1] ?? null });

/** Parameters of a request for the steps that are zoomed in. @param {Range | null} steps */
export const zoomQuery = (steps) => (steps ? `&from_step=${steps[0]}&to_step=${steps[1]}` : "");

/**
 * ``range``: of the whole x axis; the width of the smoothing is in its unit.
 * @param {{now: Chosen, range: Range | null, axes?: Axis[]}} props
 */
export function ChartTools({ now, range, axes = ["step", "relative", "wall"] }) {
  const words = /** @type {Record<Axis, string>} */ ({ step: "Step", relative: "Relative time", wall: "Time of day" });
  const axis = (/** @type {string} */ key) => setQuery({ x: key === "step" ? null : key, smooth: null });
  return html`<div class="row tools">
    <${Choice} label="Horizontal axis" value=${now.axis} onChange=${axis} options=${axes.map((key) => [key, words[key]])} />
    <${Choice} label="Vertical scale" value=${now.scale} onChange=${(/** @type {string} */ key) => setQuery({ y: key === "auto" ? null : key })}
      options=${[["auto", "Auto"], ["linear", "Linear"], ["log", "Log"]]} />
    <${Smoothing} now=${now} range=${range} />
    <${StepRange} steps=${now.steps} /></div>`;
}

/** The zoomed steps, which can also be typed. @param {{steps: Range | null}} props */
export function StepRange({ steps }) {
  const form = useRef(/** @type {HTMLFormElement | null} */ (null));
  const changed = () => {
    const [from, to] = [...new FormData(/** @type {HTMLFormElement} */ (form.current)).values()].map(String);
    if (!from && !to) setZoom(null);
    else if (from && to && Number(to) > Number(from)) setZoom([Math.max(0, Number(from)), Number(to)]);
  };
  return html`<form ref=${form} class=${classes("row small dim zoomed", steps && "busy")} onSubmit=${(/** @type {Event} */ event) => { event.preventDefault(); changed(); }}>Steps
    <input type="number" min="0" name="from" aria-label="From step" placeholder="first" value=${steps?.[0] ?? ""} onChange=${changed} />to
    <input type="number" min="0" name="to" aria-label="To step" placeholder="last" value=${steps?.[1] ?? ""} onChange=${changed} />
    ${steps && html`<button type="button" class="plain" onClick=${() => setZoom(null)}>Show all</button>`}</form>`;
}

/** @param {{now: Chosen, range: Range | null}} props */
function Smoothing({ now, range }) {
  const widths = smoothingWidths(range);
  const at = widths.reduce((best, width, n) => (Math.abs(width - now.width) < Math.abs(widths[best] - now.width) ? n : best), 0);
  const said = now.width === 0 ? "none" : now.axis === "step" ? plural(now.width, "step") : duration(now.width);
  return html`<label class="row small dim smoothing">Smoothing
    <input type="range" min="0" max=${Math.max(1, widths.length - 1)} step="1" value=${at} disabled=${widths.length < 2} aria-valuetext=${said}
      onInput=${(/** @type {any} */ event) => setQuery({ smooth: widths[Number(event.target.value)] || null })} /><output>${said}</output></label>`;
}
