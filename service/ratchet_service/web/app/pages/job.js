// @ts-check
/** One job: its head, which every tab has, and the tab that the address names. */
import { ActionButton, jobActions } from "../components/actions.js";
import { Badge, Bar, Broken, Facts, Phase, Trouble } from "../components/basics.js";
import { html, useEffect, useErrorBoundary, useRef, useState } from "../dom.js";
import { ago, count, duration, number, percent, plural, stepOf } from "../format.js";
import { EVERY, useLive, useNow } from "../live.js";
import { ACTIVE, ENDED, isUnmanaged, mayAct, ofTotal, proofTone, shareDone } from "../meaning.js";
import { elsewhere, link } from "../route.js";

/** Attempts that are read: tabs whose charts mark the ends of attempts show more of them. */
const ATTEMPTS = 20;
const MARKED_ATTEMPTS = 100;

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

/** @param {{route: import("../route.js").Route, caller: Api.Caller | null}} props */
export default function JobPage({ route, caller }) {
  const [, id, tab = "overview"] = route.path;
  const [ended, setEnded] = useState(false);
  const { data: job, error, refresh } = useLive(`v1/jobs/${encodeURIComponent(id)}`, { every: ended ? 10_000 : EVERY });
  const limit = ["metrics", "hook"].includes(tab) ? MARKED_ATTEMPTS : ATTEMPTS;
  const attempts = useLive(`v1/jobs/${encodeURIComponent(id)}/attempts?exclude=components&exclude=nodes&limit=${limit}`, { every: ended ? 30_000 : job?.phase === "RUNNING" ? 5000 : EVERY });
  const kept = useRef({ id: "", items: /** @type {Api.Attempt[]} */ ([]) });
  if (attempts.data) kept.current = { id, items: attempts.data.items };
  const known = kept.current.id === id ? kept.current.items : []; // also while another number of them is read
  useEffect(() => setEnded(ENDED.includes(job?.phase ?? "")), [job?.phase]);
  useEffect(() => { if (job) attempts.refresh(); }, [job?.attempt, job?.phase]);
  useEffect(() => {
    if (job) document.title = `${job.name} · ${job.phase.toLowerCase()} · Ratchet`;
    return () => { document.title = "Ratchet"; };
  }, [job?.name, job?.phase]);
  const tabs = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => tabs.current?.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }), [tab, !job]);
  if (!job) return html`<${Trouble} error=${error} />`;
  return html`<div class="stack">
    <${Head} job=${job} attempts=${known} refresh=${refresh} caller=${caller} />
    <${Trouble} error=${error} />
    <nav class="tabs" aria-label="Parts of the job" ref=${tabs}>${TABS.map(([key, text]) => html`<a href=${link(["jobs", id, ...(key === "overview" ? [] : [key])])} aria-current=${key === tab ? "page" : undefined}>${text}</a>`)}</nav>
    <${Tab} key=${`${id} ${tab}`} tab=${tab} job=${job} attempts=${known} route=${route} refresh=${() => { refresh(); attempts.refresh(); }} caller=${caller} />
  </div>`;
}

/** @param {{tab: string, job: Api.Job, attempts: Api.Attempt[], route: any, refresh: () => void, caller: Api.Caller | null}} props */
function Tab({ tab, ...props }) {
  const [found, setFound] = useState(/** @type {{part: any} | null} */ (null));
  const [failed, setFailed] = useState(/** @type {Error | null} */ (null));
  const [error] = useErrorBoundary((/** @type {any} */ wrong) => console.error(wrong));
  useEffect(() => {
    const [, , load] = TABS.find(([key]) => key === tab) ?? TABS[0];
    load().then((module) => setFound({ part: module.default }), setFailed);
  }, [tab]);
  return error || failed ? html`<${Broken} error=${/** @type {Error} */ (error ?? failed)} />` : found && html`<${found.part} ...${props} />`;
}

/** @param {{job: Api.Job, attempts: Api.Attempt[], refresh: () => void, caller: Api.Caller | null}} props */
function Head({ job, attempts, refresh, caller }) {
  const now = useNow();
  const { progress, goodput } = job;
  const rate = progress.steps_per_second;
  const active = ACTIVE.includes(job.phase);
  const left = rate && progress.total_steps ? (progress.total_steps - progress.step) / rate : null;
  const newest = attempts.find((one) => one.number === job.attempt);
  const [parent, start] = job.forked_from?.split("/") ?? [];
  return html`<div class="stack" style=${{ gap: ".8rem" }}>
    <div class="row spread">
      <div class="row"><h1>${job.name}</h1><${Phase} phase=${job.phase} /><${Badge} tone="quiet">${job.hook}</${Badge}>
        ${newest?.proof && html`<${Badge} tone=${proofTone(newest.proof)} title=${`Attempt ${newest.number}: ${newest.proof}`}>${newest.proof.replace(/ \(.*?\)/, "")}</${Badge}>`}</div>
      ${mayAct(caller, job) && html`<div class="row actions">${jobActions(job).map((action) => html`<${ActionButton} key=${action.key} action=${action} onDone=${refresh} plain=${["priority", "labels"].includes(action.key)} />`)}</div>`}
    </div>
    <${Bar} share=${shareDone(job)} label="Progress" tone=${job.phase === "SUCCEEDED" ? "good" : job.phase === "FAILED" ? "bad" : ""} />
    <${Facts} items=${[
      ["Step", html`${count(progress.step)}<span class="dim">${ofTotal(job)}</span>`],
      ...(active ? [["Steps/s", number(rate)], ["Time left", duration(left)]] : []),
      ...(ENDED.includes(job.phase) ? [["Took", duration(goodput?.wall_seconds)]] : [atRisk(job)]),
      ["Last checkpoint", job.last_checkpoint ? html`<a title=${job.last_checkpoint} href=${link(["jobs", job.id, "checkpoints"])}>${stepOf(job.last_checkpoint)}</a>` : "none"],
      ...(parent ? [["Forked from", html`<a title=${job.forked_from} href=${elsewhere(["jobs", parent, "checkpoints"], { checkpoint: start })}>${stepOf(start)}</a>`]] : []),
      ["Attempt", html`<a href=${link(["jobs", job.id, "attempts"])}>${job.attempt}</a>`],
      ["Goodput", percent(goodput?.goodput), "Share of the time since its submission, waiting in the queue included, that went into steps that count."],
      ["Owner", job.owner],
      ["Created", html`<span title=${job.created_at}>${ago(job.created_at, now)}</span>`],
      ["Id", html`<code>${job.id}</code>`],
    ]} />
  </div>`;
}

/** Steps since the last committed checkpoint. @param {Api.Job} job @returns {[string, any, string]} */
function atRisk(job) {
  const steps = job.progress.steps_at_risk;
  if (isUnmanaged(job)) return ["At risk", "–", "The script has no Session: its steps are not known."];
  if (job.phase === "QUEUED" && steps > 0) return ["To be done again", plural(steps, "step"), "Steps after the last committed checkpoint: the next attempt does them again."];
  return ["At risk", plural(steps, "step"), "Steps done since the last committed checkpoint: what a kill would cost now."];
}
