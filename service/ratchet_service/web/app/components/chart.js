// @ts-check
/** A line chart (uPlot) with a table behind it. */
import uPlot from "../../vendor/uPlot.js";
import { html, useEffect, useRef, useState } from "../dom.js";
import { number } from "../format.js";
import { align, widenGaps } from "../smoothing.js";
import { SPAN_STEPS, clockTick, logSplits, spanTick } from "../ticks.js";

/**
 * ``ys``: null is a gap. ``faint``: drawn behind, as the raw values of a smoothed curve are; not in the table and the tip. ``dots``:
 * single points. ``fillTo``: the area between this curve and the one of that label is filled. ``gaps``: x where the curve is
 * interrupted without having a point.
 * @typedef {{label: string, xs: number[], ys: (number | null)[], color?: string, faint?: boolean, dots?: boolean, dashed?: boolean,
 *            fillTo?: string, gaps?: number[]}} Curve
 * ``to``: a span; without it a line at ``x``. ``tone``: its colour.
 * @typedef {{x: number, to?: number, tone: string, label: string}} Mark
 * A coloured part of the strip below the x axis.
 * @typedef {{x: number, to: number, tone: string, label: string}} Strip
 */

const color = (/** @type {string} */ name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const curveColor = (/** @type {number} */ n) => `--c${n % 8}`;
const TABLE_ROWS = 25;
const FONT = "11px system-ui, sans-serif";
/** Pixels up to which a chart has no label below its x axis. */
const LOW = 200;
/** Pixels from the cursor to the farthest point that the tip shows. */
const NEAR = 24;
/** The chart's class has no type that allows ``new``. @type {any} */
const Plot = uPlot;
/** @type {Strip[]} */
const NONE = [];

/**
 * ``sync``: charts with the same key show one another's cursor. ``extent``: what the x axis shows without a zoom; default: all points.
 * ``showAll``: whether a button ends the zoom.
 * @param {{title: string, curves: Curve[], marks?: Mark[], strips?: Strip[], sync?: string, extent?: [number, number] | null, log?: boolean, height?: number, time?: boolean, xLabel?: string,
 *          zoom?: [number, number] | null, onZoom?: (range: [number, number] | null) => void, showAll?: boolean, note?: any,
 *          format?: (value: number) => string, formatX?: (x: number) => string, formatTick?: (x: number) => string}} props
 */
export function Chart({ title, curves, marks = [], strips = NONE, sync, extent = null, log = false, height = 240, time = false, xLabel = "step", zoom = null, onZoom, showAll = true, note, format = number, formatX, formatTick = time ? clockTick : number }) {
  const place = useRef(/** @type {HTMLDivElement | null} */ (null));
  const plot = useRef(/** @type {any} */ (null));
  const [tip, setTip] = useState(/** @type {Tip | null} */ (null));
  const latest = useRef({ marks, strips, onZoom, zoom, extent, curves, format, formatTick });
  latest.current = { marks, strips, onZoom, zoom, extent, curves, format, formatTick };
  const showX = formatX ?? (time ? clockTick : number);
  const shape = JSON.stringify([curves.map((c) => [c.label, c.color, c.faint, c.dots, c.dashed, c.fillTo]), log, height, time, xLabel, sync, formatTick === spanTick]);

  useEffect(() => {
    const box = place.current;
    if (!box) return undefined;
    const make = () => {
      plot.current?.destroy();
      plot.current = new Plot(options(box.clientWidth), data(latest.current.curves, log), box);
      applyZoom(plot.current, latest.current.zoom ?? latest.current.extent);
    };
    const options = (/** @type {number} */ width) => ({
      width, height,
      legend: { show: false },
      cursor: {
        drag: { x: Boolean(onZoom), y: false, setScale: false }, focus: { prox: 24 }, points: { size: 6 },
        ...(sync && { sync: { key: sync, scales: ["x", null], filters: { pub: (/** @type {string} */ type) => type === "mousemove" || type === "mouseleave" } } }),
      },
      scales: { x: { time }, y: log ? { distr: 3, range: paddedLog } : { range: padded } },
      axes: [
        { ...axis((x) => latest.current.formatTick(x)), size: 23, ...(formatTick === spanTick && { incrs: SPAN_STEPS }), gap: latest.current.strips.length ? 8 : 5, ...(height > LOW && { label: xLabel, labelSize: 18, labelFont: FONT }) },
        { ...axis((y) => latest.current.format(y)), size: (/** @type {any} */ _u, /** @type {string[] | null} */ texts) => 14 + 6.5 * Math.max(3, ...(texts ?? []).map((text) => text.length)), ...(log && { incrs: wholeRange, filter: (/** @type {any} */ _u, /** @type {any[]} */ splits) => splits, splits: (/** @type {any} */ _u, /** @type {number} */ _axis, /** @type {number} */ low, /** @type {number} */ high) => logSplits(low, high) }) },
      ],
      series: [{}, ...curves.map((curve, n) => line(curve, n))],
      bands: areas(curves),
      hooks: {
        drawAxes: [(/** @type {any} */ u) => drawSpans(u, latest.current.marks)],
        draw: [(/** @type {any} */ u) => {
          drawLines(u, latest.current.marks);
          drawStrips(u, latest.current.strips);
        }],
        setCursor: [(/** @type {any} */ u) => {
          const now = latest.current;
          setTip(box.matches(":hover") ? tipOf(u, now.curves, now.format, showX, [...now.marks, ...now.strips]) : null);
        }],
        setSelect: [(/** @type {any} */ u) => {
          if (u.select.width < 4) return;
          latest.current.onZoom?.([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
      },
    });
    make();
    const sized = new ResizeObserver(() => plot.current && box.clientWidth !== plot.current.width && plot.current.setSize({ width: box.clientWidth, height }));
    sized.observe(box);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", make);
    window.addEventListener("theme-changed", make);
    return () => {
      sized.disconnect();
      dark.removeEventListener("change", make);
      window.removeEventListener("theme-changed", make);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    if (!plot.current) return;
    plot.current.setData(data(curves, log), false);
    applyZoom(plot.current, zoom ?? extent);
  }, [curves, log]);
  useEffect(() => {
    if (plot.current) applyZoom(plot.current, zoom ?? extent);
  }, [zoom?.[0], zoom?.[1], extent?.[0], extent?.[1]]);
  useEffect(() => plot.current?.redraw(false), [JSON.stringify([marks, strips])]);

  const shown = curves.filter((curve) => !curve.faint);
  return html`<figure class="chart" role="figure" aria-label=${title}>
    <div class="plot" ref=${place} aria-hidden="true" style=${{ minHeight: `${height}px` }} onDblClick=${() => onZoom?.(null)} onMouseLeave=${() => setTip(null)}>
      ${tip && html`<div class="tip" style=${tip.place}>${tip.text.map((/** @type {string} */ text) => html`<div>${text}</div>`)}</div>`}</div>
    <figcaption>
      ${shown.length > 1 && shown.map((curve) => html`<span class=${`legend ${curve.dashed ? "dashed" : ""}`} style=${{ "--tone": `var(${curve.color ?? curveColor(curves.indexOf(curve))})` }}>${curve.label}</span>`)}
      ${[...new Map(strips.map((strip) => [strip.label, strip])).values()].map((strip) => html`<span class=${`legend box ${strip.tone}`}>${strip.label}</span>`)}
      ${note}${showAll && zoom && onZoom && html`<button class="plain" type="button" onClick=${() => onZoom(null)}>Show all</button>`}
    </figcaption>
    <${Values} title=${title} curves=${shown} xLabel=${xLabel} format=${format} showX=${showX} />
  </figure>`;
}

/** The same values as a table, page by page. @param {{title: string, curves: Curve[], xLabel: string, format: (v: number) => string, showX: (x: number) => string}} props */
function Values({ title, curves, xLabel, format, showX }) {
  const [open, setOpen] = useState(false);
  const [page, setPage] = useState(0);
  const [xs, ...columns] = open ? align(curves) : [[]];
  const last = Math.max(0, Math.ceil(xs.length / TABLE_ROWS) - 1);
  const at = Math.min(page, last);
  const rows = xs.slice(at * TABLE_ROWS, (at + 1) * TABLE_ROWS);
  return html`<details onToggle=${(/** @type {any} */ event) => setOpen(event.target.open)}>
    <summary>Values as a table<span class="hidden"> of ${title}</span></summary>
    ${open && html`<div class="scroll"><table class="tight"><caption class="hidden">${title}</caption>
      <thead><tr><th scope="col">${xLabel}</th>${curves.map((curve) => html`<th scope="col" class="number">${curve.label}</th>`)}</tr></thead>
      <tbody>${rows.map((x, row) => html`<tr><th scope="row">${showX(x)}</th>${columns.map((column) => {
        const value = column[at * TABLE_ROWS + row];
        return html`<td class="number">${value === undefined ? "" : value === null ? "not finite" : format(value)}</td>`;
      })}</tr>`)}</tbody></table></div>
      ${last > 0 && html`<div class="row small"><button type="button" class="plain" disabled=${at === 0} onClick=${() => setPage(at - 1)}>Back</button>
        <span class="dim">page ${at + 1} of ${last + 1}</span>
        <button type="button" class="plain" disabled=${at === last} onClick=${() => setPage(at + 1)}>Next</button></div>`}`}
  </details>`;
}

/** @param {Curve[]} curves @param {boolean} log */
function data(curves, log) {
  const [xs, ...columns] = align(curves.map(({ xs: at, ys, gaps = [] }) => (
    { xs: [...at, ...gaps], ys: [...(log ? ys.map((y) => (y !== null && y > 0 ? y : null)) : ys), ...gaps.map(() => null)] })));
  return [xs, ...columns.map(widenGaps)];
}

/** @param {any} u @param {[number, number] | null} zoom */
function applyZoom(u, zoom) {
  const xs = u.data[0];
  if (!xs.length) return;
  const [min, max] = zoom ?? [xs[0], xs[xs.length - 1] === xs[0] ? xs[0] + 1 : xs[xs.length - 1]];
  u.batch(() => {
    u.setScale("x", { min, max });
    u.setScale("y", {});
  });
}

/** @param {any} _ @param {number | null} low @param {number | null} high */
function padded(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = high === low ? Math.abs(high) * 0.1 || 1 : 0.07 * (high - low);
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

/** @param {any} _ @param {number | null} low @param {number | null} high */
function paddedLog(_, low, high) {
  if (low === null || high === null) return [1, 10];
  const room = high / low < 1.01 ? 2 : Math.max(1.05, (high / low) ** 0.07);
  return [low / room, high * room];
}

/** For a logarithmic axis one distance, the whole range: uPlot draws no axis of a range beyond its own distances, such as 1 to 3e38. */
const wholeRange = (/** @type {any} */ _u, /** @type {number} */ _axis, /** @type {number} */ low, /** @type {number} */ high) => [Math.max(5, high - low)];

/** @param {(value: number) => string} show */
const axis = (show) => ({
  values: (/** @type {any} */ _, /** @type {(number | null)[]} */ values) => values.map((value) => (value === null ? "" : show(value))),
  stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: FONT,
});

/** @param {Curve} curve @param {number} n */
function line(curve, n) {
  const stroke = color(curve.color ?? curveColor(n));
  return {
    label: curve.label, stroke: curve.faint ? `${stroke}40` : stroke, width: curve.faint ? 1 : 1.8, spanGaps: false,
    ...(curve.dashed && { dash: [5, 4] }),
    points: curve.dots ? { show: true, size: 7, fill: stroke } : { show: curve.xs.length === 1 },
    ...(curve.dots && { paths: () => null }),
  };
}

/** uPlot's filled areas. @param {Curve[]} curves */
const areas = (curves) => curves.flatMap((curve, n) => {
  const other = curves.findIndex((one) => curve.fillTo !== undefined && one.label === curve.fillTo);
  return other < 0 ? [] : [{ series: [n + 1, other + 1], fill: `${color(curve.color ?? curveColor(n))}22` }];
});

/** Below the x axis. @param {any} u @param {Strip[]} strips */
function drawStrips(u, strips) {
  const { ctx, bbox } = u;
  ctx.save();
  for (const strip of strips) {
    const left = Math.max(bbox.left, u.valToPos(strip.x, "x", true));
    const right = Math.min(bbox.left + bbox.width, u.valToPos(strip.to, "x", true));
    if (right <= left) continue;
    ctx.fillStyle = color(`--${strip.tone}`);
    ctx.fillRect(left, bbox.top + bbox.height + devicePixelRatio, right - left, 4 * devicePixelRatio);
  }
  ctx.restore();
}

/** @param {any} u @param {Mark[]} marks */
function drawSpans(u, marks) {
  const { ctx, bbox } = u;
  ctx.save();
  for (const mark of marks) {
    if (mark.to === undefined) continue;
    const [left, right] = [u.valToPos(mark.x, "x", true), u.valToPos(mark.to, "x", true)];
    ctx.fillStyle = `${color(`--${mark.tone}`)}26`;
    const begin = Math.max(left, bbox.left);
    ctx.fillRect(begin, bbox.top, Math.max(0, Math.min(right, bbox.left + bbox.width) - begin), bbox.height);
  }
  ctx.restore();
}

/** @param {any} u @param {Mark[]} marks */
function drawLines(u, marks) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.lineWidth = 1.5 * devicePixelRatio;
  const many = marks.filter((mark) => mark.to === undefined).length > 8;
  for (const mark of marks) {
    if (mark.to !== undefined) continue;
    const x = u.valToPos(mark.x, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ctx.fillStyle = color(`--${mark.tone}`);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.globalAlpha = many ? 0.35 : 0.8;
    ctx.stroke();
    ctx.globalAlpha = 1;
    ctx.beginPath();
    ctx.arc(x, bbox.top + 2 * devicePixelRatio, 3.5 * devicePixelRatio, 0, 7);
    ctx.fill();
  }
  ctx.restore();
}

/** @typedef {{place: Record<string, string>, text: string[]}} Tip */

/** @param {any} u @param {Curve[]} curves @param {(v: number) => string} format @param {(x: number) => string} showX @param {Mark[]} marks @returns {Tip | null} */
function tipOf(u, curves, format, showX, marks) {
  const { idx, left, top } = u.cursor;
  if (idx === null || idx === undefined || left < 0) return null;
  const x = u.data[0][idx];
  const text = [showX(x)];
  curves.forEach((curve, n) => {
    // Curves may have points at other x: the nearest one counts.
    const near = u.cursor.idxs?.[n + 1] ?? idx;
    const value = Math.abs(u.valToPos(u.data[0][near], "x") - left) < NEAR ? u.data[n + 1][near] : undefined;
    if (!curve.faint && value !== undefined && value !== null) text.push(`${curve.label}: ${format(value)}`);
  });
  for (const mark of marks) {
    const near = mark.to === undefined ? Math.abs(u.valToPos(mark.x, "x") - left) < 6 : x >= mark.x && x <= mark.to;
    if (near) text.push(mark.label);
  }
  const high = `${Math.max(0, top + u.over.offsetTop - 10)}px`;
  return left > u.over.clientWidth / 2
    ? { place: { right: `${u.width - left - u.over.offsetLeft + 14}px`, top: high }, text }
    : { place: { left: `${left + u.over.offsetLeft + 14}px`, top: high }, text };
}
