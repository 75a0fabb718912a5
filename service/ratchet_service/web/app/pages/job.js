// @ts-check
/** One job: its head, which every tab has, and the tab that the address names. */
import { ActionButton, jobActions } from "../components/actions.js";
import { Badge, Bar, Facts, Phase, Trouble } from "../components/basics.js";
import { html, useEffect, useState } from "../dom.js";
import { ago, count, duration, number, percent, plural } from "../format.js";
import { useLive, useNow } from "../live.js";
import { ACTIVE, ENDED } from "../meaning.js";
import { link } from "../route.js";

/** @type {[string, string, () => Promise<{default: any}>][]} */
const TABS = [
  ["overview", "Overview", () => import("./job/overview.js")],
  ["metrics", "Metrics", () => import("./job/metrics.js")],
  ["hook", "Hook", () => import("./job/hook.js")],
  ["attempts", "Attempts", () => import("./job/attempts.js")],
  ["checkpoints", "Checkpoints", () => import("./job/checkpoints.js")],
  ["logs", "Logs", () => import("./job/logs.js")],
  ["files", "Files", () => import("./job/files.js")],
  ["events", "Events", () => import("./job/events.js")],
  ["spec", "Spec", () => import("./job/spec.js")],
];

/** @param {{route: import("../route.js").Route, caller: any}} props */
export default function JobPage({ route, caller }) {
  const [, id, tab = "overview"] = route.path;
  const { data: job, error, refresh } = useLive(`v1/jobs/${encodeURIComponent(id)}`);
  const attempts = useLive(`v1/jobs/${encodeURIComponent(id)}/attempts?limit=100`, { every: job && ENDED.includes(job.phase) ? 10_000 : 2000 });
  useEffect(() => {
    if (job) document.title = `${job.name} · ${job.phase.toLowerCase()} · Ratchet`;
    return () => { document.title = "Ratchet"; };
  }, [job?.name, job?.phase]);
  if (!job) return html`<${Trouble} error=${error} />`;
  return html`<div class="stack">
    <${Head} job=${job} attempts=${attempts.data?.items ?? []} refresh=${refresh} caller=${caller} />
    <${Trouble} error=${error} />
    <nav class="tabs" aria-label="Parts of the job">${TABS.map(([key, text]) => html`<a href=${link(["jobs", id, ...(key === "overview" ? [] : [key])])} aria-current=${key === tab ? "page" : undefined}>${text}</a>`)}</nav>
    <${Tab} key=${`${id} ${tab}`} tab=${tab} job=${job} attempts=${attempts.data?.items ?? []} route=${route} refresh=${() => { refresh(); attempts.refresh(); }} caller=${caller} />
  </div>`;
}

/** @param {{tab: string, job: any, attempts: any[], route: any, refresh: () => void, caller: any}} props */
function Tab({ tab, ...props }) {
  const [found, setFound] = useState(/** @type {{part: any} | null} */ (null));
  const [failed, setFailed] = useState(/** @type {Error | null} */ (null));
  useEffect(() => {
    const [, , load] = TABS.find(([key]) => key === tab) ?? TABS[0];
    load().then((module) => setFound({ part: module.default }), setFailed);
  }, [tab]);
  return failed ? html`<${Trouble} error=${failed} />` : found && html`<${found.part} ...${props} />`;
}

/** Whether the caller may act on the job. @param {any} caller @param {any} job */
export const mayAct = (caller, job) =>
  Boolean(caller) && caller.scopes.includes("jobs:write") && (!caller.tokens_required || caller.role === "admin" || caller.owner === job.owner);

/** @param {{job: any, attempts: any[], refresh: () => void, caller: any}} props */
function Head({ job, attempts, refresh, caller }) {
  const now = useNow();
  const { progress, goodput } = job;
  const share = progress.total_steps ? progress.step / progress.total_steps : null;
  const rate = progress.steps_per_second;
  const active = ACTIVE.includes(job.phase);
  const left = rate && progress.total_steps ? (progress.total_steps - progress.step) / rate : null;
  const newest = attempts.find((one) => one.number === job.attempt);
  return html`<div class="stack" style=${{ gap: ".8rem" }}>
    <div class="row spread">
      <div class="row"><h1>${job.name}</h1><${Phase} phase=${job.phase} /><${Badge} tone="quiet">${job.hook}</${Badge}>
        ${newest?.proof && html`<${Badge} tone=${newest.proof.startsWith("not-exact") ? "bad" : newest.proof.startsWith("exact") ? "good" : "quiet"}>${newest.proof}</${Badge}>`}</div>
      ${mayAct(caller, job) && html`<div class="row">${jobActions(job).map((action) => html`<${ActionButton} key=${action.key} action=${action} onDone=${refresh} plain=${["priority", "labels"].includes(action.key)} />`)}</div>`}
    </div>
    <${Bar} share=${share} label="Progress" tone=${job.phase === "SUCCEEDED" ? "good" : job.phase === "FAILED" ? "bad" : ""} />
    <${Facts} items=${[
      ["Step", html`${count(progress.step)}${progress.total_steps ? html`<span class="dim"> of ${count(progress.total_steps)}</span>` : ""}`],
      ...(active ? [["Steps per second", number(rate)], ["Time left", duration(left)]] : []),
      ...(ENDED.includes(job.phase) ? [["Took", duration(goodput?.wall_seconds)]] : [["At risk", plural(progress.steps_at_risk, "step"), "Steps done since the last committed checkpoint: what a kill would cost now."]]),
      ["Last checkpoint", job.last_checkpoint ? html`<a href=${link(["jobs", job.id, "checkpoints"])}>${job.last_checkpoint}</a>` : "none"],
      ["Attempt", html`<a href=${link(["jobs", job.id, "attempts"])}>${job.attempt}</a>`],
      ["Goodput", percent(goodput?.goodput), "Share of its time in attempts that went into steps that count."],
      ["Owner", job.owner],
      ["Created", html`<span title=${job.created_at}>${ago(job.created_at, now)}</span>`],
      ["Id", html`<code>${job.id}</code>`],
    ]} />
  </div>`;
}
