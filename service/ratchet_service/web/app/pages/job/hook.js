// @ts-check
/** The communication hook: what it does now, how it went over steps, and which rank's residual stands out. */
import { pages } from "../../api.js";
import { Badge, Card, Command, Empty, Facts, Trouble } from "../../components/basics.js";
import { chosen, StepRange, setZoom, zoomQuery } from "../../components/chart_tools.js";
import { Chart } from "../../components/chart.js";
import { classes, html, useEffect, useMemo, useState } from "../../dom.js";
import { ago, count, number, plural, size } from "../../format.js";
import { useKept, useLive, useNow } from "../../live.js";
import { OUTLIER, OWN_CURVES, byNorm, byRank, counted, figure, norms, normText, phaseOf, pointsFor, sends, strips } from "../../hook_series.js";
import { ACTIVE } from "../../meaning.js";
import { link } from "../../route.js";
import { attemptMarks } from "../../series.js";

const PAGE = 1000;
/** Requests for one history. Of more ranks or steps only the first samples are shown, and the page says so. */
const PAGES = 6;
const ROWS = 16;

/** @param {{job: Api.Job, attempts: Api.Attempt[], route: import("../../route.js").Route}} props */
export default function Hook({ job, attempts, route }) {
  const active = ACTIVE.includes(job.phase);
  const { data: hook, error } = useLive(`v1/jobs/${job.id}/hook`, { every: active ? 2000 : 30_000 });
  const { steps } = chosen(route.query);
  const load = useMemo(() => pages(PAGES), []);
  const history = useKept(useLive(hook?.source ? `v1/jobs/${job.id}/hook/history?limit=${PAGE}&max_points=${pointsFor(hook.ranks.length)}${zoomQuery(steps)}` : null, { every: active ? 10_000 : 60_000, load }));
  if (!hook) return html`<${Trouble} error=${error} />`;
  return html`<div class="stack">
    <${Trouble} error=${error ?? history.error} />
    <${Now} job=${job} hook=${hook} />
    ${hook.source && html`<${Curves} job=${job} attempts=${attempts} hook=${hook} steps=${steps} history=${history.data} />`}
    <div class=${hook.stateful ? "main-side" : "stack"}>
      ${hook.ranks.length > 0 ? html`<${Ranks} hook=${hook} />` : html`<${Card} title="Ranks"><${Empty}><p>No rank has reported yet. Each rank has a row here after its first step.</p></${Empty}></${Card}>`}
      ${(hook.stateful || Object.keys(hook.parameters).length > 0) && html`<div class="stack"><${Stored} job=${job} hook=${hook} /><${Parameters} hook=${hook} /></div>`}
    </div></div>`;
}

/** @param {{job: Api.Job, hook: Api.Hook}} props */
function Now({ job, hook }) {
  const now = useNow();
  const [tone, word] = hook.phase ? phaseOf(hook.phase) : ["quiet", "no figures yet"];
  const behind = hook.iteration !== null && hook.checkpoint_iteration !== null ? hook.iteration - hook.checkpoint_iteration : null;
  const rate = typeof hook.compression_rate === "number" ? `${number(Number(hook.compression_rate.toPrecision(3)))}×` : hook.compression_rate ?? "not known";
  const where = hook.source === "live" ? `live, ${ago(hook.updated_at, now)}` : hook.source === "checkpoint" ? `as in ${hook.checkpoint_id}` : "";
  return html`<${Card} tone=${tone} title=${html`<span class="row">${hook.name}${hook.wrapper ? ` in ${hook.wrapper}` : ""} <${Badge} tone=${tone}>${word}</${Badge}></span>`} aside=${where}>
    <p class="hook-now">${sends(hook)}</p>
    ${hook.source
      ? html`<${Facts} items=${[
        ["Iteration", html`${count(hook.iteration)}${behind !== null && html`<span class="dim"> · ${behind > 0 ? `${count(behind)} after the checkpoint's ${count(hook.checkpoint_iteration)}` : "as in the checkpoint"}</span>`}`, "Backward passes that synchronised gradients, in all attempts together."],
        ["Bytes per step", html`${size(hook.bytes_before)} → ${hook.bytes_after === null ? "not known" : size(hook.bytes_after)}`, "Of gradients on one rank, in the last iteration: before and after the hook."],
        ["Compression rate", rate, "Elements before and after, since compression began."],
        ["Memory per rank", hook.memory_bytes ? size(hook.memory_bytes) : "none"],
        ...(hook.next_averaging !== null ? [["Next averaging", `after step ${count(hook.next_averaging)}`], ["Averager's steps", count(hook.averager_step)]] : []),
        ["Ranks that reported", count(hook.ranks.length)],
      ]} />`
      : html`<p class="dim">Figures appear when the first rank has done a step. ${job.phase === "QUEUED" ? "The job is queued." : ""}</p>`}
    ${!hook.stateful && html`<div class="stack" style=${{ gap: ".4rem", marginTop: ".8rem" }}><p class="small dim">It keeps no state. A hook that sends less, in a fork of this job:</p>
      <${Command} line=${`ratchet fork ${job.id} --hook powerSGD --set hook.start_powerSGD_iter=500`} /></div>`}</${Card}>`;
}

/** @param {{job: Api.Job, attempts: Api.Attempt[], hook: Api.Hook, steps: [number, number] | null, history: {items: Api.HookSample[], next_cursor: string | null} | null}} props */
function Curves({ job, attempts, hook, steps, history }) {
  const ranks = useMemo(() => byRank(history?.items ?? []), [history]);
  const first = ranks.get(0) ?? [...ranks.values()][0] ?? [];
  const rows = byNorm(hook.ranks);
  const outliers = rows.filter((row) => (row.share ?? 0) > OUTLIER).map((row) => row.rank);
  const charts = useMemo(() => ({
    rate: [figure(first, "compression_rate", "compression rate", "--c0")],
    bytes: [figure(first.filter(counted), "bytes_before", "before the hook", "--c1"), figure(first.filter(counted), "bytes_after", "sent", "--c0")],
    norm: norms(ranks, outliers),
  }), [history, outliers.join()]);
  if (!history) return html`<${Card} title="Over steps"><div style=${{ height: "14rem" }}></div></${Card}>`;
  if (first.length < 2) return steps && html`<${StepRange} steps=${steps} />`;
  const band = strips(first);
  const known = (/** @type {import("../../components/chart.js").Curve[]} */ curves) => curves.some((curve) => curve.ys.some((y) => y !== null));
  const extent = /** @type {[number, number]} */ ([first[0].summary.step, first[first.length - 1].summary.step]);
  const onZoom = (/** @type {[number, number] | null} */ range) => setZoom(range && (Math.floor(range[1]) > Math.ceil(range[0]) ? [Math.ceil(range[0]), Math.floor(range[1])] : steps));
  const shared = { marks: attemptMarks(attempts), strips: band, sync: `hook ${job.id}`, extent, zoom: steps, onZoom, showAll: false, height: 200, formatX: (/** @type {number} */ x) => `step ${count(x)}`, formatTick: count };
  const changes = hook.compression_rate !== null && charts.rate[0].ys.some((/** @type {number | null} */ y) => y !== null && y > 1);
  return html`<div class="row spread"><p class="small dim">The strip below each axis is the phase. Dragging over a chart zooms all of them.</p><${StepRange} steps=${steps} /></div>
    ${known(charts.norm) && html`<${Card} title="Residual norm" aside=${ranks.size <= OWN_CURVES ? "per rank" : `${count(ranks.size)} ranks: range, median and outliers`}>
        <p class="small dim" style=${{ marginBottom: ".4rem" }}>If the norm keeps growing, the matrix rank is too small or the learning rate is too large.</p>
        <${Chart} ...${shared} title="Residual norm over steps" curves=${charts.norm} height=${260} /></${Card}>`}
    <div class="columns">
      ${changes && html`<${Card} title="Compression rate" aside="elements before / after"><${Chart} ...${shared} title="Compression rate over steps" curves=${charts.rate} log note="logarithmic" /></${Card}>`}
      ${known(charts.bytes) && html`<${Card} title="Bytes per step" aside="on one rank"><${Chart} ...${shared} title="Bytes per step" curves=${charts.bytes} format=${size} log=${changes} note=${changes ? "logarithmic" : ""} /></${Card}>`}
    </div>
    <p class="small dim">Samples of ${plural(ranks.size, "rank")}, ${plural(first.length, "step")} each${history.next_cursor ? "; later samples are left out, a zoom into fewer steps shows them" : ""}.</p>`;
}

/** @param {{hook: Api.Hook}} props */
function Ranks({ hook }) {
  const [all, setAll] = useState(false);
  const rows = byNorm(hook.ranks);
  const shown = all ? rows : rows.slice(0, ROWS);
  const most = Math.max(...rows.map((row) => row.share ?? 0), 1);
  const residuals = rows.some((row) => row.norm !== null);
  const text = normText(rows);
  return html`<${Card} title="Ranks" aside=${residuals ? "largest residual first" : "this hook keeps no residual"} flush>
    ${text && html`<p class="small lead-in">${text}</p>`}
    <div class="scroll" tabindex="0" role="region" aria-label="Ranks"><table class="tight"><caption class="hidden">Ranks of the hook</caption>
      <thead><tr><th scope="col">Rank</th>${residuals && html`<th scope="col" class="number">Residual</th><th scope="col">Times the median</th>`}<th scope="col">Phase</th><th scope="col" class="number">Iteration</th><th scope="col" class="number">Sent</th><th scope="col" class="number">Memory</th><th scope="col" class="number">Step</th></tr></thead>
      <tbody>${shown.map(({ rank, norm, share, summary }) => {
        const out = (share ?? 0) > OUTLIER;
        return html`<tr key=${rank}><th scope="row">${rank}</th>
          ${residuals && html`<td class="number">${norm === null ? String(summary.residual_norm ?? "–") : number(norm)}</td>
          <td class="nowrap"><span class="row" style=${{ flexWrap: "nowrap", gap: ".5rem" }}><span class=${classes("bar", out ? "bad" : "quiet")} style=${{ width: "clamp(3rem, 8vw, 7rem)" }} aria-hidden="true"><span style=${{ width: `${(100 * (share ?? 0)) / most}%` }}></span></span>
            ${share === null ? "–" : share.toFixed(2)}${out && html` <${Badge} tone="bad">stands out</${Badge}>`}</span></td>`}
          <td>${phaseOf(summary.phase)[1]}</td><td class="number">${count(summary.iteration)}</td><td class="number">${size(summary.bytes_after)}</td><td class="number">${summary.memory_bytes ? size(summary.memory_bytes) : "none"}</td><td class="number">${count(summary.step)}</td></tr>`;
      })}</tbody></table></div>
    ${rows.length > shown.length && html`<p class="small lead-in"><button type="button" class="plain" onClick=${() => setAll(true)}>Show all ${count(rows.length)} ranks</button> <span class="dim">${count(rows.length - shown.length)} with smaller residuals left out</span></p>`}</${Card}>`;
}

/** What the newest checkpoint has of the hook. @param {{job: Api.Job, hook: Api.Hook}} props */
function Stored({ job, hook }) {
  // A manifest may be large, so it is not read again for every checkpoint.
  const [id, setId] = useState(/** @type {string | null} */ (null));
  const shown = id ?? hook.checkpoint_id;
  useEffect(() => setId(shown), [shown]);
  const { data, error } = useLive(shown ? `v1/jobs/${job.id}/checkpoints/${encodeURIComponent(shown)}` : null, { every: null });
  if (!hook.stateful) return null;
  if (!hook.checkpoint_id) return html`<${Card} title="Saved state"><p class="small">No checkpoint yet. After a kill the hook would begin again, at iteration 0.</p></${Card}>`;
  const manifest = data?.manifest;
  const layout = manifest?.bucket_layout;
  return html`<${Card} title="Saved state" aside=${html`<a href=${link(["jobs", job.id, "checkpoints"])}>checkpoints</a>`}>
    <dl class="terms"><dt>Checkpoint</dt><dd><code>${hook.checkpoint_id}</code></dd>
      <dt>Iteration</dt><dd>${count(hook.checkpoint_iteration)}</dd></dl>
    ${shown !== hook.checkpoint_id && html`<p class="small dim">The following is from <code>${shown}</code>. <button type="button" class="plain" onClick=${() => setId(hook.checkpoint_id)}>Read the newest</button></p>`}
    <${Trouble} error=${error} />
    <dl class="terms"><dt>State version</dt><dd>${manifest?.hook?.state_version ?? "–"}</dd>
      <dt>Ranks saved</dt><dd>${count(manifest?.world_size)}</dd>
      <dt>Bucket layout</dt><dd>${layout ? `${plural(layout.length, "bucket")}, ${plural(layout.reduce((/** @type {number} */ sum, /** @type {any[]} */ one) => sum + one.length, 0), "parameter")}` : "not recorded"}</dd></dl>
    ${layout && html`<details class="small"><summary class="dim">Parameters of each bucket</summary>${layout.slice(0, 50).map((/** @type {string[]} */ names, /** @type {number} */ n) => html`<p><strong>${n}</strong> <code>${names.slice(0, 30).join(", ")}${names.length > 30 ? ` and ${names.length - 30} more` : ""}</code></p>`)}
      ${layout.length > 50 && html`<p class="dim">and ${layout.length - 50} more buckets</p>`}</details>`}
    <div style=${{ marginTop: ".7rem" }}><${Command} line=${`ratchet hook ${job.id}`} /></div></${Card}>`;
}

/** @param {{hook: Api.Hook}} props */
function Parameters({ hook }) {
  const entries = Object.entries(hook.parameters ?? {});
  if (!entries.length) return null;
  return html`<${Card} title="Parameters"><dl class="terms">${entries.map(([key, value]) => html`<dt key=${key}><code>${key}</code></dt><dd>${typeof value === "number" ? String(value) : JSON.stringify(value)}</dd>`)}</dl></${Card}>`;
}
