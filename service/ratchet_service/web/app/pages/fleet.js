// @ts-check
/** What all jobs' time went into, how attempts ended and where, whether resumes were exact, and who holds what. */
import { Card, Choice, Command, Empty, Phase, Table, Trouble } from "../components/basics.js";
import { Holders } from "../components/slots.js";
import { SpentBar, partsOf } from "../components/spent.js";
import { Usage } from "../components/usage.js";
import { classes, html } from "../dom.js";
import { counts, hostsOf, slotsOf } from "../fleet.js";
import { count, duration, number, percent, plural, size } from "../format.js";
import { useLive } from "../live.js";
import { ACTIVE, causeText, causeTone } from "../meaning.js";
import { link, setQuery } from "../route.js";

const PHASES = ["QUEUED", ...ACTIVE, "SUSPENDED", "SUCCEEDED", "FAILED", "CANCELLED"];
const ROWS = 20;
const CAUSES = 5;

/** @param {{route: import("../route.js").Route}} props */
export default function Fleet({ route }) {
  const days = route.query.get("days") === "30" ? "30" : "7";
  const { data, error } = useLive(`v1/fleet?days=${days}`, { every: 10_000 });
  const phases = new Map(Object.entries(data?.jobs ?? {}));
  const ends = data ? counts(data.ends) : [];
  return html`<div class="stack">
    <div class="row spread"><h1>Fleet</h1><${Choice} label="Time" value=${days} options=${[["7", "7 days"], ["30", "30 days"]]} onChange=${(/** @type {string} */ key) => setQuery({ days: key === "30" ? "30" : null })} /></div>
    <${Trouble} error=${error} />
    ${data && html`
      <nav class="phases" aria-label="Jobs by phase">${PHASES.map((phase) => html`<a key=${phase} href=${link(["jobs"], { phase })} class=${phases.get(phase) ? "" : "none"}><strong>${count(phases.get(phase) ?? 0)}</strong><${Phase} phase=${phase} /></a>`)}</nav>
      ${data.attempts_left_out > 0 && html`<p class="notice wait">Goodput, resumes and hours are of the newest ${count(data.attempts)} attempts; ${count(data.attempts_left_out)} older ones are left out.</p>`}
      <div class="main-side"><div class="stack">
          <${Goodput} fleet=${data} days=${days} />
          ${data.owners.length > 0 && html`<${Owners} owners=${data.owners} days=${days} />`}
          <${Usage} query=${route.query} days=${Number(days)} />
          ${(ends.length > 0 || phases.size > 0) && html`<${Ends} ends=${ends} days=${days} /><${Hosts} hosts=${hostsOf(data)} />`}</div>
        <div class="stack"><${Resumes} resumes=${counts(data.resumes)} /><${Holders} slots=${slotsOf(data)} />${data.parked && html`<${Parked} parked=${data.parked} />`}</div></div>`}
  </div>`;
}

/** @param {{parked: NonNullable<Api.Fleet["parked"]>}} props */
function Parked({ parked }) {
  const all = parked.ready + parked.starting;
  return all > 0 && html`<p class="small dim" title="Processes that have made the imports of a start, or still make them, and wait for the next attempt">${plural(all, "parked agent")} (fast start), ${size(parked.memory_bytes)}</p>`;
}

/** @param {{fleet: Api.Fleet, days: string}} props */
function Goodput({ fleet, days }) {
  const spent = fleet.goodput;
  const parts = partsOf(spent);
  const whole = parts.reduce((sum, part) => sum + part.seconds, 0);
  return html`<${Card} title=${`Goodput of the last ${days} days`} aside=${whole ? `${duration(whole)} of all jobs' time` : ""}>
    ${whole
      ? html`<div class="stack"><p><span class="huge">${percent(spent.goodput)}</span> <span class="dim">of the time went into steps that count</span></p><${SpentBar} spent=${spent} label="All jobs" /></div>`
      : html`<${Empty}><p>No job ran in these ${days} days. The first one fills this page:</p><${Command} line="ratchet submit train.yaml" /></${Empty}>`}</${Card}>`;
}

/** @param {{ends: [string, number][], days: string}} props */
function Ends({ ends, days }) {
  const all = ends.reduce((sum, [, of]) => sum + of, 0);
  const most = Math.max(1, ...ends.map(([, of]) => of));
  const bad = ends.filter(([cause]) => causeTone(cause) === "bad").reduce((sum, [, of]) => sum + of, 0);
  return html`<${Card} title="Ends of attempts, by cause" aside=${all ? `${plural(all, "end")}, ${plural(bad, "failure")}` : ""}>
    ${all
      ? html`<table class="tight bars"><caption class="hidden">Ends of attempts in ${days} days, by cause</caption><thead class="hidden"><tr><th scope="col">Cause</th><th scope="col">Share</th><th scope="col">Ends</th></tr></thead>
          <tbody>${ends.map(([cause, of]) => html`<tr key=${cause} class=${causeTone(cause)}><th scope="row"><span class="word">${cause}</span></th>
            <td><div class="bar-row"><span class="bar-fill" style=${{ width: `${(100 * of) / most}%` }}></span></div><div class="small dim">${causeText(cause)}</div></td><td class="number">${count(of)}</td></tr>`)}</tbody></table>`
      : html`<${Empty}><p>No attempt ended in these ${days} days.</p></${Empty}>`}</${Card}>`;
}

/** @param {{hosts: import("../fleet.js").Host[]}} props */
function Hosts({ hosts }) {
  const most = Math.max(1, ...hosts.map((one) => one.all));
  return html`<${Card} title="Ends by node" aside=${hosts.length > ROWS ? `${ROWS} of ${hosts.length} nodes, most failures first` : hosts.length ? "most failures first" : ""}>
    ${hosts.length
      ? html`<div class="stack" style=${{ gap: ".5rem" }}><table class="tight bars"><caption class="hidden">Ends of attempts by node and cause</caption><thead class="hidden"><tr><th scope="col">Node</th><th scope="col">Causes</th><th scope="col">Ends</th></tr></thead>
          <tbody>${hosts.slice(0, ROWS).map((one) => html`<tr key=${one.host}><th scope="row"><span>${one.host}</span></th>
            <td><div class="bar-row" aria-hidden="true">${[...one.causes].sort(([a], [b]) => causeTone(a).localeCompare(causeTone(b))).map(([cause, of]) => html`<span class=${classes("bar-fill", causeTone(cause))} style=${{ width: `${(100 * of) / most}%` }} title=${`${cause}: ${of}`}></span>`)}</div>
              <div class="small dim">${one.causes.slice(0, CAUSES).map(([cause, of]) => `${cause} ${of}`).join(", ")}${one.causes.length > CAUSES && `, ${plural(one.causes.length - CAUSES, "other cause")}`}</div>
              ${one.faults.length > 0 && html`<div class="small"><span class="word bad">Perhaps its hardware:</span> ${one.faults.map(([kind, of]) => `${kind} ${of}`).join(", ")}</div>`}
              ${one.avoiding.length > 0 && html`<div class="small">Avoided by ${one.avoiding.slice(0, CAUSES).map((id, n) => html`${n > 0 && ", "}<a href=${link(["jobs", id])}>${id}</a>`)}${one.avoiding.length > CAUSES && `, ${plural(one.avoiding.length - CAUSES, "other job")}`}</div>`}</td><td class="number">${count(one.all)}</td></tr>`)}</tbody></table>
        <p class="small dim">A node with far more failures than the others may be faulty.</p></div>`
      : html`<${Empty}><p>No attempt ended on a node in this time.</p></${Empty}>`}</${Card}>`;
}

/** @type {Record<string, [string, string]>} */
const VERDICTS = {
  "exact-proved": ["good", "exact, proved"], exact: ["good", "exact, no step compared"], "not-exact": ["bad", "not exact"], differs: ["bad", "a redone step differs"],
};

/** @param {{resumes: [string, number][]}} props */
function Resumes({ resumes }) {
  const of = (/** @type {string} */ key) => resumes.find(([name]) => name === key)?.[1] ?? 0;
  const all = resumes.reduce((sum, [, found]) => sum + found, 0);
  const good = of("exact-proved") + of("exact");
  return html`<${Card} tone=${all === 0 ? "quiet" : good === all ? "good" : "bad"} title="Were the resumes exact?">
    ${all
      ? html`<div class="stack" style=${{ gap: ".6rem" }}><p><span class="huge">${percent(good / all)}</span> <span class="dim">of ${plural(all, "resume")} ${good === 1 ? "was" : "were"} exact</span></p>
          <div class="spent" role="img" aria-label=${resumes.map(([key, found]) => `${VERDICTS[key]?.[1] ?? key} ${found}`).join(", ")}>${resumes.map(([key, found]) => html`<span class=${classes("tone-fill", VERDICTS[key]?.[0], key === "exact" && "pale")} style=${{ width: `${(100 * found) / all}%` }}></span>`)}</div>
          <dl class="parts two">${resumes.map(([key, found]) => html`<div><dt><span class=${classes("swatch tone-fill", VERDICTS[key]?.[0] ?? "quiet", key === "exact" && "pale")}></span>${VERDICTS[key]?.[1] ?? key}</dt><dd>${count(found)}</dd></div>`)}</dl></div>`
      : html`<p class="dim">No attempt was resumed in this time.</p>`}</${Card}>`;
}

/** @param {{owners: Api.Owner[], days: string}} props */
const Owners = ({ owners, days }) => html`<${Card} title="Owners" aside=${owners.length > ROWS ? `${ROWS} of ${owners.length}` : `GPU-hours of ${days} days`} flush>
  ${owners.length
    ? html`<${Table} caption="Owners: what runs now, and GPU-hours" tight numbers=${[1, 2, 3, 4]} head=${["Owner", "Jobs", "Ranks", "GPUs", "GPU-hours"]}
        rows=${[...owners].sort((a, b) => b.gpu_hours - a.gpu_hours || b.rank_hours - a.rank_hours).slice(0, ROWS).map((one) => [html`<a href=${link(["jobs"], { owner: one.owner })}>${one.owner}</a>`, count(one.running), count(one.ranks), count(one.gpus), number(one.gpu_hours)])} />`
    : html`<${Empty}><p>Nobody ran a job in this time.</p></${Empty}>`}</${Card}>`;
