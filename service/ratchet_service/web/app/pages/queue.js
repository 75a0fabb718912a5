// @ts-check
/** The queue in order, why each job waits, what holds the slots, and the owners' quotas. */
import { Badge, Bar, Card, Command, Empty, Trouble } from "../components/basics.js";
import { Holders } from "../components/slots.js";
import { classes, html } from "../dom.js";
import { slotsOf } from "../fleet.js";
import { ago, count, plural } from "../format.js";
import { useLive, useNow } from "../live.js";
import { link } from "../route.js";

const PAGE = 50;
const OWNERS = 20;

/** Why a job waits, in words. @type {Record<string, [string, string]>} */
const REASONS = {
  "no-slot": ["wait", "waits for slots"], quota: ["held", "its owner's quota is used up"], "no-launcher": ["bad", "no service runs its launcher"],
  "engine-queue": ["wait", "waits in the engine's queue"], "engine-unreachable": ["bad", "the engine does not answer"], "reconcile-error": ["bad", "cannot be supervised"],
  "attempt-ending": ["wait", "its last attempt ends"], backoff: ["quiet", "pauses after a failure"], "disk-full": ["bad", "the disk is full"],
};

/** @param {{route: import("../route.js").Route, caller: Api.Caller | null}} props */
export default function Queue({ route, caller }) {
  const cursor = route.query.get("cursor");
  const asked = new URLSearchParams({ limit: String(PAGE), ...(cursor && { cursor }) });
  const { data, error } = useLive(`v1/queue?${asked}`);
  const fleet = useLive("v1/fleet?days=7", { every: 30_000 });
  const quotas = useLive("v1/quotas", { every: 5000 });
  return html`<div class="stack">
    <div class="row spread"><div class="row"><h1>Queue</h1>${data && html`<span class="dim">${data.waiting ? `${plural(data.waiting, "job")} waiting` : "nothing waits"}</span>`}</div></div>
    <${Trouble} error=${error} />
    <div class="main-side"><div class="stack">
        ${data && html`<${Waiting} data=${data} cursor=${cursor} />`}</div>
      <div class="stack">${fleet.data ? html`<${Holders} slots=${slotsOf(fleet.data)} />` : fleet.error && html`<${Trouble} error=${fleet.error} />`}
        ${quotas.data && html`<${Quotas} data=${quotas.data} caller=${caller} />`}</div></div></div>`;
}

/** @param {{data: Api.Queue, cursor: string | null}} props */
function Waiting({ data, cursor }) {
  const now = useNow();
  const items = data.items;
  const gpus = items.some((one) => one.gpus > 0);
  if (!items.length) {
    return html`<${Card}><${Empty}><p>${cursor ? "No further job waits." : "No job waits. A submitted job appears here until its attempt starts:"}</p>
      ${cursor ? html`<a href="#/queue">The beginning of the queue</a>` : html`<${Command} line="ratchet submit train.yaml" />`}</${Empty}></${Card}>`;
  }
  return html`<section class="card flush"><div class="scroll" tabindex="0" role="region" aria-label="Waiting jobs"><table class="queue">
      <caption class="hidden">Waiting jobs, in the order in which they start</caption>
      <thead><tr><th scope="col" class="number">Place</th><th scope="col">Job</th><th scope="col">Why it waits</th><th scope="col" class="number">Priority</th><th scope="col" class="number">Ranks</th>
        ${gpus && html`<th scope="col" class="number">GPUs</th>`}<th scope="col">Owner</th><th scope="col">Age</th></tr></thead>
      <tbody>${items.map((one) => html`<tr key=${one.job_id}>
        <td class="number">${one.position ? html`<strong>${count(one.position)}</strong>` : one.ahead_at_least ? html`<span class="dim nowrap" title="Too far back for a place">after ${count(one.ahead_at_least)}</span>` : html`<span class="dim" title="A job in a back-off has no place">–</span>`}</td>
        <td class="name"><a href=${link(["jobs", one.job_id])}><strong>${one.name}</strong></a></td>
        <td class="why"><${Why} reason=${one.reason} message=${one.message} /></td>
        <td class=${classes("number late", one.priority === 0 && "dim")}>${one.priority}</td><td class="number late">${one.ranks ? count(one.ranks) : html`<span class="word bad">spec unreadable</span>`}</td>
        ${gpus && html`<td class="number late">${count(one.gpus)}</td>`}<td class="small">${one.owner}</td><td class="small dim nowrap" title=${one.created_at}>${ago(one.created_at, now)}</td></tr>`)}</tbody></table></div></section>
    <div class="row spread small"><${Command} line="ratchet queue" /><span class="row">${cursor && html`<a class="button" href="#/queue">Beginning</a>`}${data.next_cursor && html`<a class="button" href=${link(["queue"], { cursor: data.next_cursor })}>Further back</a>`}
      ${(cursor || data.next_cursor) && html`<span class="dim">${items.length} of ${count(data.waiting)} shown. Places shift as jobs start.</span>`}</span></div>`;
}

/** @param {{reason: string | null, message: string | null}} props */
function Why({ reason, message }) {
  if (!reason) return html`<span class="dim">The scheduler has not looked at it yet.</span>`;
  const [tone, words] = REASONS[reason] ?? ["wait", reason];
  return html`<${Badge} tone=${tone} title=${reason}>${words}</${Badge}>${message && html`<div class="small dim">${message}</div>`}`;
}

/** Use against limit, by owner. @param {{data: {items: Api.Quota[], next_cursor: string | null}, caller: Api.Caller | null}} props */
function Quotas({ data, caller }) {
  const own = (/** @type {Api.Quota} */ one) => Number(one.owner === caller?.owner);
  const items = [...data.items].sort((a, b) => own(b) - own(a));
  const admin = caller?.scopes.includes("quotas:write");
  const kinds = /** @type {["queued" | "jobs" | "ranks" | "gpus", string][]} */ ([["queued", "unfinished jobs"], ["jobs", "running jobs"], ["ranks", "ranks"], ["gpus", "GPUs"]]);
  if (!items.length) {
    return html`<${Card} title="Quotas"><${Empty}><p>No quota: every owner may use all slots.${admin ? " Limit each owner:" : ""}</p>
      ${admin && html`<${Command} line="ratchet quota set '*' --jobs 8" />`}</${Empty}></${Card}>`;
  }
  return html`<${Card} title="Quotas" aside=${items.length > OWNERS || data.next_cursor ? own(items[0]) ? `${OWNERS} owners, the own one first` : `the first ${Math.min(items.length, OWNERS)} owners` : ""}>
    <div class="stack" style=${{ gap: "1rem" }}>${items.slice(0, OWNERS).map((one) => html`<div key=${one.owner} class="stack" style=${{ gap: ".35rem" }}>
      <div class="row spread"><h3>${one.owner === "*" ? "each other owner, separately" : html`<a href=${link(["jobs"], { owner: one.owner })}>${one.owner}</a>`}</h3></div>
      ${kinds.filter(([key]) => one[key] !== null).map(([key, words]) => {
        const used = one.in_use?.[key] ?? null;
        const share = used === null ? null : one[key] ? used / one[key] : 1;
        const full = share !== null && share >= 1;
        return html`<div class="quota small"><span>${words}</span>${used === null ? html`<span></span>` : html`<${Bar} share=${share} label=${`${words} of ${one.owner}`} tone=${full ? "bad" : share !== null && share > 0.8 ? "wait" : "busy"} />`}
          <span class="nowrap">${used === null ? "" : html`<strong class=${full ? "word bad" : ""}>${count(used)}</strong> of `}${count(one[key])}${full ? " · full" : ""}</span></div>`;
      })}
      ${kinds.every(([key]) => one[key] === null) && html`<p class="small dim">no limit</p>`}</div>`)}
    ${(items.length > OWNERS || data.next_cursor) && html`<p class="small dim">Others are left out: <code>ratchet quota list</code> has all.</p>`}
    ${admin && html`<${Command} line="ratchet quota set OWNER --jobs 8 --ranks 16" />`}</div></${Card}>`;
}
