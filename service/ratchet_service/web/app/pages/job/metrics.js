// @ts-check
/** All metrics of a job: a chart per series, linked in x. What is chosen is in the address. */
import { read, save } from "../../api.js";
import { Card, Command, Empty, Trouble } from "../../components/basics.js";
import { ChartTools, chosen, setZoom, zoomQuery } from "../../components/chart_tools.js";
import { Chart } from "../../components/chart.js";
import { notify } from "../../components/frame.js";
import { classes, html, useEffect, useMemo, useRef } from "../../dom.js";
import { count, duration, number, plural } from "../../format.js";
import { useKept, useLive } from "../../live.js";
import { ACTIVE, causeText, causeTone, verdict } from "../../meaning.js";
import { link, setQuery } from "../../route.js";
import {
  attemptMarks, csvOf, curveOf, extentOf, extremes, leftOut, nameFilter, nanMarks, notPositive, originOf, prefersLog, rangeOfSteps, stepsOfRange,
} from "../../series.js";
import { spanTick } from "../../ticks.js";

/** Charts that are read and drawn at first, and with each click on the button below them. */
const PAGE = 12;
const POINTS = 600;
const LARGE_POINTS = 2000;
const CSV_POINTS = 10_000;
const NAN_MARKS = 50;

/** @param {{job: Api.Job, attempts: Api.Attempt[], route: import("../../route.js").Route}} props */
export default function Metrics({ job, attempts, route }) {
  const { query } = route;
  const every = ACTIVE.includes(job.phase) ? 3000 : 30_000;
  const index = useLive(`v1/jobs/${job.id}/metrics?max_points=2`, { every: 2 * every });
  const text = query.get("name") ?? "";
  const large = query.get("chart");
  const all = index.data?.series ?? [];
  const matches = nameFilter(text);
  const names = all.map((one) => one.name).filter(matches).sort(byUse);
  const limit = Number(query.get("show")) || PAGE;
  const now = chosen(query);
  const found = useKept(useLive(names.length ? metricsPath(job, names.slice(0, limit), POINTS, now.steps) : null, { every }));
  const series = names.slice(0, limit).flatMap((name) => found.data?.series.filter((one) => one.name === name) ?? []);
  const origin = originOf(job, attempts);
  const whole = now.steps ? null : extentOf(series, now.axis, origin);
  const known = useRef(/** @type {any} */ ({}));
  if (whole) known.current[now.axis] = whole;
  const shared = { job, attempts, now, origin, list: series, whole };
  if (!index.data) return html`<${Trouble} error=${index.error} />`;
  if (!all.length) return html`<${Card}><${NoMetrics} job=${job} /></${Card}>`;
  return html`<div class="stack">
    <div class="row spread">
      <div class="row" role="search"><input type="search" aria-label="Filter metrics by text, several with | between" placeholder="like loss|accuracy" value=${text}
          onInput=${(/** @type {any} */ event) => setQuery({ name: event.target.value, show: null })} />
        <span class="small dim" role="status">${names.length === all.length ? plural(all.length, "metric") : `${count(names.length)} of ${plural(all.length, "metric")}`}</span></div>
      <${ChartTools} now=${now} range=${whole ?? known.current[now.axis] ?? extentOf(all, now.axis, origin)} />
    </div>
    <${Trouble} error=${index.error ?? found.error} />
    <${Ends} job=${job} attempts=${attempts} />
    ${!names.length && html`<${Card}><${Empty}><p>No metric has a name like <code>${text}</code>.</p></${Empty}></${Card}>`}
    <div class="grid-charts">
      ${large && names.includes(large) && html`<${Large} key=${`large ${large}`} name=${large} every=${every} ...${shared} />`}
      ${series.filter((one) => one.name !== large).map((one) => html`<${Series} key=${one.name} series=${one} height=${190} ...${shared} />`)}
      ${!found.data && names.slice(0, limit).map((name) => html`<${Card} key=${name} title=${name}><div style=${{ height: "14rem" }}></div></${Card}>`)}
    </div>
    ${names.length > limit && html`<div class="row"><button type="button" onClick=${() => setQuery({ show: limit + PAGE })}>Show ${count(Math.min(PAGE, names.length - limit))} more</button>
      <span class="small dim">${count(names.length - limit)} of ${plural(names.length, "chart")} left out; the filter finds them by name</span></div>`}
    <p class="small dim">Dragging over a chart zooms all of them; a double click shows all steps.</p>
  </div>`;
}

/** Losses first, then the others by name. @param {string} a @param {string} b */
const byUse = (a, b) => Number(/loss/i.test(b)) - Number(/loss/i.test(a)) || a.localeCompare(b);

/** @param {Api.Job} job @param {string[]} names @param {number} points @param {[number, number] | null} steps
 *  @returns {`v1/jobs/${string}/metrics?${string}`} */
const metricsPath = (job, names, points, steps) =>
  `v1/jobs/${job.id}/metrics?max_points=${points}${names.map((name) => `&name=${encodeURIComponent(name)}`).join("")}${zoomQuery(steps)}`;

/** @param {{job: Api.Job}} props */
const NoMetrics = ({ job }) => html`<${Empty}><p>No metric yet. A script sends a value per step with</p>
  <${Command} line=${'session.log({"loss": loss})'} /><p>The command line shows the same curves:</p><${Command} line=${`ratchet metrics ${job.id}`} /></${Empty}>`;

/** What the lines and spans in the charts are. @param {{job: Api.Job, attempts: Api.Attempt[]}} props */
function Ends({ job, attempts }) {
  const ended = attempts.filter((one) => one.cause && one.cause !== "completed").sort((a, b) => a.number - b.number);
  if (!ended.length) return null;
  const lost = ended.reduce((sum, one) => sum + (one.steps_lost ?? 0), 0);
  return html`<div class="row small ends"><span class="dim">Lines: ends of ${attempts.length < job.attempt ? `the newest ${count(attempts.length)} attempts` : "attempts"}.${lost > 0 ? " Shaded: steps that were lost and done again." : ""}</span>
    ${ended.slice(-6).map((one) => html`<a class=${classes("badge", causeTone(one.cause))} key=${one.number} href=${link(["jobs", job.id, "attempts"], { attempt: one.number })}
      title=${causeText(one.cause)}>${one.number}: ${one.cause} at step ${count(one.last_step)}${one.steps_lost ? `, ${count(one.steps_lost)} lost` : ""}</a>`)}
    ${ended.length > 6 && html`<a href=${link(["jobs", job.id, "attempts"])}>${count(ended.length - 6)} earlier ones</a>`}</div>`;
}

/**
 * @typedef {{job: Api.Job, attempts: Api.Attempt[], now: import("../../components/chart_tools.js").Chosen, origin: number, list: Api.Series[],
 *            whole: [number, number] | null}} Shared
 */

/** One chart over the whole width, with more points. @param {Shared & {name: string, every: number}} props */
function Large({ name, every, ...shared }) {
  const { data } = useKept(useLive(metricsPath(shared.job, [name], LARGE_POINTS, shared.now.steps), { every }));
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => place.current?.scrollIntoView({ block: "nearest" }), []);
  const series = data?.series[0] ?? shared.list.find((one) => one.name === name);
  return html`<div class="wide" ref=${place}>${series ? html`<${Series} series=${series} height=${420} large ...${shared} />` : html`<${Card} title=${name}><div style=${{ height: "30rem" }}></div></${Card}>`}</div>`;
}

/** @param {Shared & {series: Api.Series, height: number, large?: boolean}} props */
function Series({ job, attempts, now, origin, list, whole, series, height, large = false }) {
  const { axis, width, scale, steps } = now;
  const curves = useMemo(() => curveOf(series, width, { axis, origin }), [series, width, axis, origin]);
  const bad = nanMarks(series, axis, origin);
  const marks = [...attemptMarks(attempts, axis, origin), ...bad.slice(0, NAN_MARKS)];
  const log = scale === "log" || (scale === "auto" && prefersLog(series.name, series.points));
  const hidden = log ? notPositive(series.points) : 0;
  const { lowest, highest, last } = extremes(series.points);
  const zoom = rangeOfSteps(list, steps, axis, origin) ;
  const onZoom = (/** @type {[number, number] | null} */ range) => setZoom(range && (stepsOfRange(list, range, axis, origin) ?? steps));
  const shown = series.total > series.points.length ? " of the points shown" : "";
  const notes = [
    log && scale === "auto" && "logarithmic", bad.length > 0 && `${plural(bad.length, "value")}${shown} not finite, marked`,
    hidden > 0 && `${plural(hidden, "value")} of 0 or less${shown} left out on this scale`, leftOut(series),
  ].filter(Boolean);
  const tools = html`<span class="row" style=${{ gap: ".1rem" }}>
    <button type="button" class="plain" aria-label=${`Download ${series.name} as CSV`} onClick=${() => saveCsv(job, series)}>CSV</button>
    <button type="button" class="plain" aria-label=${large ? `Make the chart of ${series.name} small` : `Enlarge the chart of ${series.name}`}
      onClick=${() => setQuery({ chart: large ? null : series.name })}>${large ? "Make small" : "Enlarge"}</button></span>`;
  return html`<${Card} title=${series.name} aside=${tools}>
    <p class="lead row spread"><span class="nowrap"><strong>${showValue(last?.value)}</strong> <span class="small dim">${last && `at step ${count(last.step)}`}</span></span>
      ${lowest && lowest !== highest && html`<span class="small dim nowrap" title=${`Lowest at step ${count(lowest.step)}, highest at step ${count(highest.step)}${shown}`}>${number(lowest.value)} to ${number(highest.value)}</span>`}</p>
    <${Differs} job=${job} series=${series} attempts=${attempts} />
    <${Chart} title=${`${series.name} over ${axis === "step" ? "steps" : "time"}`} curves=${curves} marks=${marks} log=${log} height=${height} sync=${job.id}
      time=${axis === "wall"} xLabel=${{ step: "step", relative: "since training began", wall: "time of day" }[axis]}
      formatX=${axis === "relative" ? duration : axis === "step" ? (/** @type {number} */ x) => `step ${count(x)}` : undefined} formatTick=${axis === "relative" ? spanTick : axis === "step" ? count : undefined}
      zoom=${zoom} extent=${whole} onZoom=${onZoom} showAll=${false} note=${notes.join(" · ")} /></${Card}>`;
}

/** @param {any} value */
const showValue = (value) => (typeof value === "number" ? number(value) : String(value ?? "–"));

/** An alarm: values of steps that were done again and differ. @param {{job: Api.Job, series: Api.Series, attempts: Api.Attempt[]}} props */
function Differs({ job, series, attempts }) {
  const old = series.superseded ?? [];
  if (!old.length) return null;
  const inexact = attempts.some((one) => ["differs", "not-exact"].includes(verdict(one)));
  const harmless = !inexact && attempts.some((one) => one.metrics_differ.includes(series.name));
  const first = old[0];
  const redone = series.points.find((point) => point.step === first.step);
  return html`<div class=${classes("notice small", inexact ? "bad" : "wait")} style=${{ marginBottom: ".6rem" }}>
    <strong>${plural(old.length, "redone value")} ${old.length === 1 ? "differs" : "differ"}.</strong> Step ${count(first.step)} gave ${showValue(first.value)} in attempt ${first.attempt}${redone ? `, then ${showValue(redone.value)} in attempt ${redone.attempt}` : ""}.
    ${inexact
      ? html` The resume was not exact: <a href=${link(["jobs", job.id, "attempts"])}>what differs</a>.`
      : harmless ? " The state of the ranks was identical in these steps: this metric is probably a measured time." : " Whether the state differed is not known."}</div>`;
}

/** Reads the series whole, as far as one answer goes, and hands it to the browser as a file. @param {Api.Job} job @param {Api.Series} shown */
async function saveCsv(job, shown) {
  try {
    const { data } = await read(metricsPath(job, [shown.name], CSV_POINTS, null));
    const series = data.series[0] ?? shown;
    save(new Blob([csvOf(series)], { type: "text/csv" }), `${`${job.name}-${shown.name}`.replace(/[^\w.-]+/g, "_").slice(0, 120)}.csv`);
    const total = series.total ?? series.points.length;
    notify(`${total > series.points.length ? `${count(series.points.length)} of ${count(total)} points` : plural(series.points.length, "point")} of ${shown.name} saved.`);
  } catch (error) {
    notify(/** @type {Error} */ (error).message, "bad");
  }
}
