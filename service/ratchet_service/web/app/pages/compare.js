// @ts-check
/** Up to eight jobs side by side: what differs in their specs, their curves, their figures, and for two jobs their bits. */
import { read } from "../api.js";
import { Card, Choice, Empty, Phase, Trouble } from "../components/basics.js";
import { ChartTools, chosen, setZoom, zoomQuery } from "../components/chart_tools.js";
import { Chart, curveColor } from "../components/chart.js";
import { classes, html, useEffect, useRef, useState } from "../dom.js";
import { count, duration, number, percent, plural, size } from "../format.js";
import { bytesSent } from "../hook_series.js";
import { useLive } from "../live.js";
import { ACTIVE, ENDED } from "../meaning.js";
import { link, setQuery } from "../route.js";
import { better, curveOf, extentOf, extremes, leftOut, originOf, prefersLog, rangeOfSteps, stepsOfRange } from "../series.js";
import { differences } from "../spec_diff.js";
import { spanTick } from "../ticks.js";
import { Bits } from "./compare_bits.js";

const MOST = 8;
const POINTS = 500;
const CHARTS = 12;
const FIGURES = 30;
const ROWS = 10;
const EVERY = 5000;

/** A job as it is compared. @typedef {{id: string, letter: string, color: string, job: Api.Job, names: string[], metrics: Api.Series[], attempts: Api.Attempt[], sent: number | null, error: Error | null}} Side */

/** @param {{route: import("../route.js").Route}} props */
export default function Compare({ route }) {
  const asked = [...new Set(route.query.getAll("job"))];
  const ids = asked.slice(0, MOST);
  const now = chosen(route.query);
  const [more, setMore] = useState(0);
  const sides = useSides(ids, now.steps, Math.max(FIGURES, CHARTS + more));
  const found = sides.filter((side) => side.job);
  const set = (/** @type {string[]} */ next) => setQuery({ job: next });
  return html`<div class="stack">
    <div class="row spread"><h1>Compare jobs</h1>${ids.length < MOST && html`<${Add} taken=${ids} onAdd=${(/** @type {string} */ id) => set([...ids, id])} />`}</div>
    ${asked.length > MOST && html`<p class="notice wait">Up to ${MOST} jobs are compared; ${asked.length - MOST} are left out.</p>`}
    ${!ids.length && html`<${Card}><${Empty}><p>Add jobs above, or select them in the list of jobs.</p><a class="button" href="#/jobs">All jobs</a></${Empty}></${Card}>`}
    ${ids.length > 0 && html`<div class="sides">${sides.map((side) => html`<${Name} key=${side.id} side=${side} onRemove=${() => set(ids.filter((id) => id !== side.id))} />`)}</div>`}
    ${ids.length === 1 && html`<p class="dim">Add another job to compare with.</p>`}
    ${found.length > 1 && html`<${SpecDifferences} sides=${found} /><${Curves} sides=${found} now=${now} limit=${CHARTS + more} onMore=${() => setMore(more + CHARTS)} /><${Figures} sides=${found} zoomed=${now.steps !== null} />`}
    ${found.length === 2 && ids.length === 2 && html`<${Bits} key=${ids.join()} sides=${found} />`}
  </div>`;
}

/**
 * What is shown of each job, again every few seconds while one of them trains and the page is visible.
 * ``most``: common metrics whose values are read. An ended job's values are read once.
 * @param {string[]} ids @param {[number, number] | null} steps @param {number} most @returns {Side[]}
 */
function useSides(ids, steps, most) {
  const [known, setRead] = useState(/** @type {Record<string, any>} */ ({}));
  const before = useRef(/** @type {Record<string, any>} */ ({}));
  const key = ids.join(" ");
  const zoom = zoomQuery(steps);
  useEffect(() => {
    const stop = new AbortController();
    let timer = 0;
    const poll = async () => {
      clearTimeout(timer);
      if (document.hidden) return;
      const heads = await Promise.all(ids.map((id) => readHead(id, before.current[id], stop.signal)));
      const asked = `${zoom}${common(heads).slice(0, most).map((name) => `&name=${encodeURIComponent(name)}`).join("")}`;
      const all = await Promise.all(heads.map((head, n) => readValues(ids[n], head, before.current[ids[n]], asked, stop.signal)));
      if (stop.signal.aborted) return;
      const old = before.current;
      before.current = Object.fromEntries(ids.map((id, n) => [id, all[n].error && old[id]?.job ? { ...old[id], error: all[n].error } : all[n]]));
      setRead(before.current);
      timer = window.setTimeout(poll, all.some((one) => one.job && ACTIVE.includes(one.job.phase)) ? EVERY : 6 * EVERY);
    };
    document.addEventListener("visibilitychange", poll);
    if (ids.length) poll();
    return () => {
      stop.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", poll);
    };
  }, [key, zoom, most]);
  return ids.map((id, n) => ({ names: [], metrics: [], attempts: [], sent: null, job: null, error: null, ...known[id], id, letter: "ABCDEFGH"[n], color: curveColor(n) }));
}

/** Whether nothing changed since an ended job was read. @param {Api.Job} job @param {any} before - what was read of it, if anything */
const isSettled = (job, before) => ENDED.includes(job.phase) && before?.job && before.job.updated_at === job.updated_at;

/** @param {unknown} error */
function nothing(error) {
  if (/** @type {any} */ (error).status === 401) window.dispatchEvent(new CustomEvent("token-needed", { detail: error }));
  return { job: null, names: [], metrics: [], attempts: [], sent: null, error: /** @type {Error} */ (error) };
}

/** The job, and the names of its metrics. @param {string} id @param {any} before @param {AbortSignal} signal @returns {Promise<any>} */
async function readHead(id, before, signal) {
  const path = /** @type {const} */ (`v1/jobs/${encodeURIComponent(id)}`);
  try {
    const { data: job } = await read(path, { signal });
    if (isSettled(job, before)) return { job, names: before.names };
    const index = await read(`${path}/metrics?max_points=2`, { signal });
    return { job, names: index.data.series.map((one) => one.name) };
  } catch (error) {
    return nothing(error);
  }
}

/** @param {string} id @param {any} head @param {any} before @param {string} asked - names and steps of the metrics @param {AbortSignal} signal */
async function readValues(id, head, before, asked, signal) {
  if (!head.job) return head;
  if (isSettled(head.job, before) && before.asked === asked && !before.error) return { ...before, job: head.job };
  const path = /** @type {const} */ (`v1/jobs/${encodeURIComponent(id)}`);
  try {
    const [metrics, attempts, { data: hook }] = await Promise.all([
      asked.includes("&name=") ? read(`${path}/metrics?max_points=${POINTS}${asked}`, { signal }) : { data: { series: [] } }, read(`${path}/attempts?exclude=components&exclude=nodes&limit=100`, { signal }),
      read(`${path}/hook/history?rank=0&limit=100&max_points=100`, { signal }).catch(() => ({ data: null })),
    ]);
    const sent = !hook || hook.next_cursor ? null : bytesSent(hook.items);
    return { ...head, metrics: metrics.data.series, attempts: attempts.data.items, sent, asked, error: null };
  } catch (error) {
    return nothing(error);
  }
}

/** @param {{side: {letter: string, color: string}}} props */
const Letter = ({ side }) => html`<span class="letter" style=${{ "--tone": `var(${side.color})` }}>${side.letter}</span>`;

/** @param {{side: Side, onRemove: () => void}} props */
const Name = ({ side, onRemove }) => html`<div class="card side" style=${{ "--tone": `var(${side.color})` }}>
  <div class="row" style=${{ gap: ".5rem", flexWrap: "nowrap" }}><${Letter} side=${side} />
      ${side.job ? html`<a class="one-line grow" title=${side.job.name} href=${link(["jobs", side.id])}><strong>${side.job.name}</strong></a>` : html`<code class="grow">${side.id}</code>`}
    <button type="button" class="plain" onClick=${onRemove} aria-label=${`Remove ${side.job?.name ?? side.id}`}>✕</button></div>
  ${side.job && html`<p class="row small dim" style=${{ gap: ".5rem" }}><${Phase} phase=${side.job.phase} /><span>step ${count(side.job.progress.step)} · ${side.job.hook}</span><code>${side.id}</code></p>`}
  <${Trouble} error=${side.error} /></div>`;

/** Finds jobs by the beginning of their name or id. @param {{taken: string[], onAdd: (id: string) => void}} props */
function Add({ taken, onAdd }) {
  const [text, setText] = useState("");
  const [asked, setAsked] = useState("");
  useEffect(() => {
    const timer = setTimeout(() => setAsked(text.trim()), 250);
    return () => clearTimeout(timer);
  }, [text]);
  const { data, error } = useLive(asked ? `v1/jobs?limit=8&search=${encodeURIComponent(asked)}` : null, { every: null });
  const jobs = (data?.items ?? []).filter((job) => !taken.includes(job.id));
  const add = (/** @type {string} */ id) => {
    onAdd(id);
    setText("");
    setAsked("");
  };
  return html`<form class="adder" role="search" onSubmit=${(/** @type {Event} */ event) => { event.preventDefault(); if (jobs.length) add(jobs[0].id); }}>
    <input type="search" aria-label="Add a job: name or id begins with" placeholder="add a job: name or id" value=${text} onInput=${(/** @type {any} */ event) => setText(event.target.value)} />
    ${asked && (data || error) && html`<div class="found card">
      <${Trouble} error=${error} />
      ${data && !jobs.length && html`<p class="small dim">No other job has such a name or id.</p>`}
      ${jobs.map((job) => html`<button type="button" key=${job.id} class="plain" onClick=${() => add(job.id)}><strong>${job.name}</strong> <span class="dim small">${job.phase.toLowerCase()} · ${job.id}</span></button>`)}
      ${data?.next_cursor && html`<p class="small dim">More jobs match: type more of the name.</p>`}</div>`}</form>`;
}

/** @param {{sides: Side[]}} props */
function SpecDifferences({ sides }) {
  const [all, setAll] = useState(false);
  const found = differences(sides.map((side) => side.job.spec), ["name"]);
  const rows = all || found.length <= ROWS + 3 ? found : found.slice(0, ROWS);
  return html`<${Card} title="Differences of the specs" aside=${rows.length ? `${plural(found.length, "key")}` : ""} flush>
    ${rows.length ? html`<div class="scroll" tabindex="0" role="region" aria-label="Differences of the specs"><table class="tight sides-table">
      <caption class="hidden">Differences of the specs</caption><thead><tr><th scope="col">Key</th>${sides.map((side) => html`<th scope="col"><${Letter} side=${side} /> ${side.job.name}</th>`)}</tr></thead>
      <tbody>${rows.map(({ key, values }) => html`<tr key=${key}><th scope="row"><code>${key}</code></th>${values.map((value) => html`<td><code class=${classes("value", value === "null" && "dim")}>${cut(value)}</code></td>`)}</tr>`)}</tbody></table></div>
        ${found.length > rows.length && html`<p class="small lead-in"><button type="button" class="plain" onClick=${() => setAll(true)}>Show all ${count(found.length)} keys</button></p>`}`
      : html`<p class="lead-in dim">The specs are equal, apart from the names.</p>`}</${Card}>`;
}

/** @param {string} text */
const cut = (text) => (text.length > 300 ? `${text.slice(0, 300)} … (${count(text.length)} characters)` : text);

/** Names of metrics that at least two jobs have. @param {{names: string[]}[]} sides */
function common(sides) {
  const names = [...new Set(sides.flatMap((side) => side.names))];
  return names.filter((name) => sides.filter((side) => side.names.includes(name)).length > 1)
    .sort((a, b) => Number(/loss/i.test(b)) - Number(/loss/i.test(a)) || a.localeCompare(b));
}

/** @param {{sides: Side[], now: import("../components/chart_tools.js").Chosen, limit: number, onMore: () => void}} props */
function Curves({ sides, now, limit, onMore }) {
  const names = common(sides);
  const axis = now.axis === "relative" ? "relative" : "step";
  const ends = sides.flatMap((side) => { const found = extentOf(side.metrics, axis, originOf(side.job, side.attempts)); return found ? [found] : []; });
  const whole = /** @type {[number, number] | null} */ (ends.length && !now.steps ? [Math.min(...ends.map(([low]) => low)), Math.max(...ends.map(([, high]) => high))] : null);
  const known = useRef(whole);
  if (whole) known.current = whole;
  if (!names.length) return html`<${Card} title="Metrics"><${Empty}><p>No metric that two of these jobs have.</p></${Empty}></${Card}>`;
  return html`<div class="row spread"><h2>Common metrics</h2><${ChartTools} now=${{ ...now, axis }} range=${known.current} axes=${["step", "relative"]} /></div>
    <div class="grid-charts">${names.slice(0, limit).map((name) => html`<${Overlay} key=${name} name=${name} sides=${sides} now=${{ ...now, axis }} whole=${whole} />`)}</div>
    ${names.length > limit && html`<div class="row"><button type="button" onClick=${onMore}>Show more</button><span class="small dim">${count(names.length - limit)} of ${count(names.length)} charts left out</span></div>`}`;
}

/** One metric of all jobs. @param {{name: string, sides: Side[], now: any, whole: [number, number] | null}} props */
function Overlay({ name, sides, now, whole }) {
  const { axis, width, scale, steps } = now;
  const having = sides.flatMap((side) => side.metrics.filter((one) => one.name === name).map((series) => ({ side, series, origin: originOf(side.job, side.attempts) })));
  const curves = having.flatMap(({ side, series, origin }) => curveOf({ ...series, superseded: [] }, width, { axis, origin, color: side.color, label: `${side.letter} ${side.job.name}` }));
  const points = having.flatMap(({ series }) => series.points);
  const log = scale === "log" || (scale === "auto" && prefersLog(name, points));
  const ranges = having.flatMap(({ series, origin }) => { const found = rangeOfSteps([series], steps, axis, origin); return found ? [found] : []; });
  const zoom = /** @type {[number, number] | null} */ (steps && ranges.length ? [Math.min(...ranges.map(([low]) => low)), Math.max(...ranges.map(([, high]) => high))] : null);
  const onZoom = (/** @type {[number, number] | null} */ range) => {
    if (!range) return setZoom(null);
    const found = having.flatMap(({ series, origin }) => { const part = stepsOfRange([series], range, axis, origin); return part ? [part] : []; });
    return setZoom(found.length ? [Math.min(...found.map(([low]) => low)), Math.max(...found.map(([, high]) => high))] : steps);
  };
  const left = having.map(({ side, series }) => ({ letter: side.letter, text: leftOut(series) })).filter(({ text }) => text);
  const same = left.length === having.length && left.every(({ text }) => text === left[0].text);
  const thinned = same && left.length ? `each: ${left[0].text}` : left.map(({ letter, text }) => `${letter}: ${text}`).join(" · ");
  return html`<${Card} title=${name} aside=${log && scale === "auto" ? "logarithmic" : ""}>
    <${Chart} title=${`${name} of ${having.length} jobs`} curves=${curves} log=${log} height=${230} sync="compare" zoom=${zoom} extent=${whole} onZoom=${onZoom} showAll=${false}
      xLabel=${axis === "step" ? "step" : "since training began"} formatX=${axis === "step" ? (/** @type {number} */ x) => `step ${count(x)}` : duration}
      formatTick=${axis === "step" ? count : spanTick} note=${thinned} /></${Card}>`;
}

/** @param {{sides: Side[], zoomed: boolean}} props */
function Figures({ sides, zoomed }) {
  const [all, setAll] = useState("best");
  const names = common(sides).slice(0, FIGURES);
  /** @type {[string, (side: Side) => any][]} */
  const rows = [
    ["Step", ({ job }) => `${count(job.progress.step)}${job.progress.total_steps ? ` of ${count(job.progress.total_steps)}` : ""}`],
    ["Time since the submission, with the queue", ({ job }) => duration(job.goodput?.wall_seconds)],
    ["Goodput", ({ job }) => percent(job.goodput?.goodput)],
    ["Attempts", ({ job }) => count(job.attempt)],
    ["Steps lost", ({ job, attempts }) => `${count(attempts.reduce((sum, one) => sum + (one.steps_lost ?? 0), 0))}${attempts.length < job.attempt ? ` in the newest ${count(attempts.length)} attempts` : ""}`],
    ["Gradients sent per rank, about", ({ sent }) => size(sent)],
  ];
  return html`<${Card} title="Figures" aside=${html`<${Choice} label="Values of metrics" value=${all} onChange=${setAll} options=${[["best", "Best"], ["last", "Last"]]} />`} flush>
    <div class="scroll" tabindex="0" role="region" aria-label="Figures of the jobs"><table class="tight sides-table"><caption class="hidden">Figures of the jobs</caption>
      <thead><tr><th scope="col"><span class="hidden">Figure</span></th>${sides.map((side) => html`<th scope="col" class="number"><${Letter} side=${side} /> ${side.job.name}</th>`)}</tr></thead>
      <tbody>${rows.map(([title, of]) => html`<tr key=${title}><th scope="row">${title}</th>${sides.map((side) => html`<td class="number">${of(side)}</td>`)}</tr>`)}
        ${names.flatMap((name) => valueRows(name, sides, all))}</tbody></table></div>
    <p class="small dim lead-in">${zoomed && "Best and last values are those of the zoomed steps. "}Best values are those of the points that were read: up to ${count(POINTS)} per series.</p></${Card}>`;
}

/** Last values of a metric, or its best ones: the lowest, the highest, or both if its name does not tell. @param {string} name @param {Side[]} sides @param {string} kind */
function valueRows(name, sides, kind) {
  const points = sides.map((side) => extremes(side.metrics.find((one) => one.name === name)?.points ?? []));
  const kept = sides.map((side) => side.job.spec.checkpoint?.keep_best).find((one) => one?.metric === name);
  const direction = kept ? (kept.mode === "max" ? "highest" : "lowest") : better(name);
  const kinds = /** @type {("last" | "lowest" | "highest")[]} */ (kind === "last" ? ["last"] : direction ? [direction] : ["lowest", "highest"]);
  return kinds.map((which) => {
    const values = points.map((one) => one[which]);
    const finite = values.map((point) => point?.value).filter((value) => typeof value === "number");
    const best = direction && new Set(finite).size > 1 ? (direction === "lowest" ? Math.min(...finite) : Math.max(...finite)) : NaN;
    return html`<tr key=${`${name} ${which}`}><th scope="row">${which} <code>${name}</code></th>${values.map((point) => html`<td class="number" title=${point ? `step ${count(point.step)}` : ""}>
      ${point?.value === best ? html`<span class="badge good">best</span> <strong>${number(point.value)}</strong>` : point ? (typeof point.value === "number" ? number(point.value) : point.value) : "–"}</td>`)}</tr>`;
  });
}
