// @ts-check
/** All jobs: what runs, what waits and why, what a kill would cost now. Filters are in the address. */
import { ActionDialog, jobActions } from "../components/actions.js";
import { Bar, Choice, Command, Empty, Phase, Trouble } from "../components/basics.js";
import { notify } from "../components/frame.js";
import { Pages } from "../components/paging.js";
import { Sparkline } from "../components/sparkline.js";
import { classes, html, useState } from "../dom.js";
import { ago, count, number, percent, plural, stepOf } from "../format.js";
import { useLive, useNow } from "../live.js";
import { ACTIVE, ENDED, causeText, causeTone, isUnmanaged, mayAct, ofTotal, shareDone, verdict, verdictText, verdictTone } from "../meaning.js";
import { link, setQuery } from "../route.js";

/** @type {Record<string, string[]>} */
const GROUPS = { all: [], active: ["QUEUED", ...ACTIVE], suspended: ["SUSPENDED"], ended: ENDED, failed: ["FAILED"] };
/** @type {[string, string][]} */
const SORTS = [["-created", "newest first"], ["created", "oldest first"], ["-priority", "highest priority first"], ["name", "by name"]];
const LIMIT = 50;
const LABELS = 3;
const MARKS = 8;

/** @param {{route: import("../route.js").Route, caller: Api.Caller | null}} props */
export default function Jobs({ route, caller }) {
  const { query } = route;
  const [selected, setSelected] = useState(/** @type {string[]} */ ([]));
  const now = useNow();
  const asked = new URLSearchParams([["limit", String(LIMIT)], ["include", "summary"]]);
  for (const name of ["phase", "label", "search", "owner", "sort", "cursor"]) {
    for (const value of query.getAll(name)) if (name !== "sort" || SORTS.some(([key]) => key === value)) asked.append(name, value);
  }
  const { data, error, refresh } = useLive(`v1/jobs?${asked}`);
  const jobs = data?.items ?? [];
  const chosen = jobs.filter((job) => selected.includes(job.id));
  const toggle = (/** @type {string} */ id) => setSelected(selected.includes(id) ? selected.filter((one) => one !== id) : [...selected, id]);
  return html`<div class="stack">
    <div class="row spread"><h1>Jobs</h1><${Bulk} jobs=${chosen} caller=${caller} onDone=${(/** @type {string[]} */ left) => { setSelected(left); refresh(); }} /></div>
    ${(jobs.length > 0 || [...query.keys()].length > 0) && html`<${Filters} query=${query} caller=${caller} />`}
    <${Trouble} error=${error} />
    ${data && (jobs.length
      ? html`<section class="card flush"><div class="scroll" tabindex="0" role="region" aria-label="Jobs"><table class="jobs">
          <caption class="hidden">Jobs</caption>
          <thead><tr><th><span class="hidden">Select</span></th><th>Job</th><th>Phase</th><th>Progress</th><th>Metric</th><th>Hook</th><th>At risk</th><th>Attempts</th><th>Created</th></tr></thead>
          <tbody>${jobs.map((/** @type {any} */ job) => html`<${Row} key=${job.id} job=${job} now=${now} selected=${selected.includes(job.id)} onSelect=${() => toggle(job.id)} />`)}</tbody>
        </table></div></section>
        <p class="small dim quiet" aria-hidden="true">Attempts: <span class="dot"></span> resume proved exact · <span class="dot hollow"></span> not proved · <span class="dot bad square"></span> ended badly · <span class="mark bad">!</span> not exact</p>
        <${Pages} path=${["jobs"]} query=${query} next=${data.next_cursor} />`
      : html`<section class="card"><${NoJobs} filtered=${[...query.keys()].length > 0} /></section>`)}
  </div>`;
}

/** @param {{query: URLSearchParams, caller: Api.Caller | null}} props */
function Filters({ query, caller }) {
  const phases = query.getAll("phase");
  const group = Object.entries(GROUPS).find(([, of]) => of.length === phases.length && of.every((one) => phases.includes(one)))?.[0] ?? "";
  const set = (/** @type {Record<string, any>} */ values) => setQuery({ cursor: null, ...values });
  const changed = (/** @type {string} */ name) => (/** @type {any} */ event) => set({ [name]: event.target.value.trim() });
  return html`<div class="row" role="search" aria-label="Filter jobs">
    <${Choice} label="Phases" value=${group} onChange=${(/** @type {string} */ key) => set({ phase: GROUPS[key] })}
      options=${[["all", "All"], ["active", "Active"], ["suspended", "Suspended"], ["ended", "Ended"], ["failed", "Failed"]]} />
    <input type="search" aria-label="Name or id begins with" placeholder="name or id begins with" value=${query.get("search") ?? ""} onChange=${changed("search")} />
    <input type="text" aria-label="Label" placeholder="label, like team=vision" value=${query.get("label") ?? ""} onChange=${changed("label")} />
    ${caller?.tokens_required && html`<${Choice} label="Owner" value=${query.get("owner") ? "mine" : "all"}
      options=${[["all", "Everybody's"], ["mine", "Mine"]]} onChange=${(/** @type {string} */ key) => set({ owner: key === "mine" ? caller.owner : null })} />`}
    <label class="row small dim">Sort <select value=${query.get("sort") ?? "-created"} onChange=${changed("sort")}>
      ${SORTS.map(([key, text]) => html`<option value=${key}>${text}</option>`)}</select></label>
  </div>`;
}

/** @param {{job: Api.Job, now: number, selected: boolean, onSelect: () => void}} props */
function Row({ job, now, selected, onSelect }) {
  const { progress } = job;
  const more = job.summary ?? /** @type {Partial<Api.Job["summary"]> & {attempts: []}} */ ({ attempts: [] });
  const labels = Object.entries(job.labels);
  const share = shareDone(job);
  return html`<tr class=${selected ? "selected" : ""}>
    <td><input type="checkbox" checked=${selected} onChange=${onSelect} aria-label=${`Select ${job.name}`} /></td>
    <td class="name"><a href=${link(["jobs", job.id])}><strong>${job.name}</strong></a>
      <div class="small dim labels one-line">${labels.slice(0, LABELS).map(([key, value]) => html`<a class="dim" href=${link(["jobs"], { label: `${key}=${value}` })}>${key}=${String(value)}</a>`)}
        ${labels.length > LABELS && html`<span title=${labels.map((pair) => pair.join("=")).join(", ")}>+${labels.length - LABELS}</span>`}</div></td>
    <td><${Phase} phase=${job.phase} />${!ACTIVE.includes(job.phase) && job.reason && html`<div class="small dim" title=${job.message}>${job.reason}</div>`}</td>
    <td style=${{ minWidth: "8rem" }}><div class="small nowrap">${count(progress.step)}<span class="dim">${ofTotal(job)}</span>
        ${progress.steps_per_second ? html`<span class="dim"> · ${number(progress.steps_per_second)}/s</span>` : ""}</div>
      ${share !== null && html`<${Bar} share=${share} label=${`Progress of ${job.name}`} tone=${job.phase === "SUCCEEDED" ? "good" : job.phase === "FAILED" ? "bad" : ""} />`}</td>
    <td>${more.metric ? html`<${Sparkline} points=${more.metric.points} label=${`${more.metric.name} over steps`} /><div class="small dim">${more.metric.name} ${number(lastValue(more.metric.points))}</div>` : html`<span class="dim">–</span>`}</td>
    <td class="small nowrap">${job.hook}${more.hook?.phase && html`<div class="dim">${more.hook.phase}${(more.hook.compression_rate ?? 0) > 1 ? ` · ${number(more.hook.compression_rate)}×` : ""}</div>`}</td>
    <td class="small">${ENDED.includes(job.phase) || isUnmanaged(job) ? html`<span class="dim">–</span>` : html`<span class=${progress.steps_at_risk ? "" : "dim"}>${plural(progress.steps_at_risk, "step")}${job.phase === "QUEUED" && progress.steps_at_risk > 0 ? " will be done again" : ""}<span class="phone"> at risk</span></span>
      <div class="dim nowrap">${more.last_checkpoint_at ? `saved ${ago(more.last_checkpoint_at, now)}` : job.last_checkpoint ? stepOf(job.last_checkpoint) : "no checkpoint"}</div>`}</td>
    <td class="small"><${Dots} job=${job} attempts=${more.attempts} />${job.attempt > 0 && html`<div class="dim nowrap">goodput ${percent(more.goodput)}</div>`}</td>
    <td class="small dim late"><span class="nowrap">${ago(job.created_at, now)}</span><div class="one-line" title=${job.owner}>${job.owner}</div></td></tr>`;
}

/** One mark per attempt, in the colour of its end: filled is proved, hollow is not, a square ended badly, ! was not exact. @param {{job: Api.Job, attempts: Api.AttemptSummary[]}} props */
function Dots({ job, attempts }) {
  const shown = attempts.slice(-MARKS);
  const earlier = Math.max(0, job.attempt - shown.length);
  return html`<a class="row" style=${{ gap: ".25rem", flexWrap: "nowrap" }} href=${link(["jobs", job.id, "attempts"])} aria-label=${`${plural(job.attempt, "attempt")} of ${job.name}`}>
    ${earlier > 0 && html`<span class="small dim">+${earlier}</span>`}
    ${shown.map((one) => {
      const found = verdict(one);
      const ends = one.cause ? causeText(one.cause) : "It runs.";
      const hollow = found === "exact" || found === "fresh" || found === "unknown";
      const inexact = verdictTone(found) === "bad";
      return html`<span class=${classes(inexact ? "mark bad" : "dot", causeTone(one.cause), hollow && "hollow", causeTone(one.cause) === "bad" && "square")} title=${`Attempt ${one.number}: ${verdictText(found)}. ${ends}`}>${inexact && "!"}</span>`;
    })}</a>`;
}

/** @param {Api.MetricSummary["points"]} points */
const lastValue = (points) => points.at(-1)?.[1];

/** @param {{filtered: boolean}} props */
const NoJobs = ({ filtered }) => html`<${Empty}>${filtered
  ? html`<p>No job matches.</p><p><a href="#/jobs">Show all jobs</a></p>`
  : html`<h2>No job yet</h2><p>Submit a spec, and follow the job here:</p><${Command} line="ratchet init python train.py" /><${Command} line="ratchet submit train.yaml" />`}</${Empty}>`;

/** Actions on all selected jobs. ``onDone`` gets the ids of those that it failed for. @param {{jobs: Api.Job[], caller: Api.Caller | null, onDone: (left: string[]) => void}} props */
function Bulk({ jobs, caller, onDone }) {
  const [open, setOpen] = useState(/** @type {import("../components/actions.js").Action | null} */ (null));
  if (!jobs.length) return null;
  const kinds = ["checkpoint", "preempt", "suspend", "cancel"];
  const able = (/** @type {string} */ key) => jobs.filter((job) => mayAct(caller, job)).flatMap((job) => jobActions(job).filter((action) => action.key === key).map((action) => ({ job, action })));
  /** @type {(key: string) => import("../components/actions.js").Action} */
  const all = (key) => {
    const found = able(key);
    const first = found[0].action;
    return {
      ...first, title: `${first.title} (${found.length})`, explain: `${first.explain} Jobs: ${found.map(({ job }) => job.name).join(", ")}.`,
      line: () => `for job in ${found.map(({ job }) => job.id).join(" ")}; do ratchet ${key} "$job"; done`,
      send: async () => {
        const results = await Promise.allSettled(found.map(({ action }) => action.send({})));
        const failed = results.flatMap((result, n) => (result.status === "rejected" ? [`${found[n].job.name}: ${result.reason.message}`] : []));
        failed.forEach((text) => notify(text, "bad"));
        const text = `${first.title}: ${found.length - failed.length} of ${found.length} done.`;
        if (failed.length) notify(text, "bad");
        onDone(found.filter((_, n) => results[n].status === "rejected").map(({ job }) => job.id));
        return failed.length ? "" : text;
      },
    };
  };
  return html`<div class="row small" role="group" aria-label="Actions on the selected jobs"><span class="dim">${plural(jobs.length, "job")} selected</span>
    ${jobs.length > 1 && jobs.length <= 8 && html`<a class="button" href=${link(["compare"], { job: jobs.map((job) => job.id) })}>Compare</a>`}
    ${kinds.filter((key) => able(key).length).map((key) => html`<button type="button" class=${key === "cancel" ? "danger" : ""} onClick=${() => setOpen(all(key))}>${all(key).title}</button>`)}
    ${open && html`<${ActionDialog} action=${open} onClose=${() => setOpen(null)} />`}</div>`;
}
