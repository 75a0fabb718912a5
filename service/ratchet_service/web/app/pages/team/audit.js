// @ts-check
/** The audit log, the newest change first. Filters are in the address. */
import { Command, Empty, Trouble } from "../../components/basics.js";
import { Pages } from "../../components/paging.js";
import { html } from "../../dom.js";
import { midnight, moment, quoted } from "../../format.js";
import { useKept, useLive } from "../../live.js";
import { link, setQuery } from "../../route.js";

/** @type {Api.Audit["action"][]} */
const ACTIONS = [
  "submit", "adopt", "fork", "patch", "suspend", "resume", "cancel", "preempt", "checkpoint", "delete", "delete-outputs", "verify", "pin", "unpin", "prune", "upload",
  "create-token", "revoke-token", "set-quota", "delete-quota", "create-webhook", "change-webhook", "rotate-webhook", "delete-webhook",
];
/** @type {[string, string, string][]} */
const TEXTS = [["actor", "Who", "an owner, or local"], ["subject", "Subject", "id of a job, token …"], ["owner", "Owner of the subject", ""]];
const DAYS = [["since", "Since"], ["until", "Before"]];

/** @param {{query: URLSearchParams, caller: Api.Caller | null}} props */
export default function Audit({ query, caller }) {
  const chosen = ["actor", "subject", "owner", "action", "since", "until"].flatMap((name) => (query.get(name) ? [[name, String(query.get(name))]] : []))
    .map(([name, value]) => [name, DAYS.some(([day]) => day === name) ? midnight(value) : value]);
  const cursor = query.get("cursor");
  const path = /** @type {const} */ (`v1/audit?${new URLSearchParams([...chosen, ...(cursor ? [["cursor", cursor]] : [])])}`);
  const { data, error } = useKept(useLive(path, { every: 10_000 }));
  const set = (/** @type {string} */ name) => (/** @type {any} */ event) => setQuery({ cursor: null, [name]: event.target.value.trim() });
  return html`<div class="row" style=${{ alignItems: "end" }} role="search" aria-label="Filter changes">
      ${TEXTS.map(([name, text, hint]) => html`<label class="field" key=${name}>${text}<input type="text" placeholder=${hint} value=${query.get(name) ?? ""} onChange=${set(name)} /></label>`)}
      <label class="field">Action<select value=${query.get("action") ?? ""} onChange=${set("action")}><option value="">all</option>${ACTIONS.map((one) => html`<option value=${one}>${one}</option>`)}</select></label>
      ${DAYS.map(([name, text]) => html`<label class="field" key=${name}>${text}<input type="date" value=${query.get(name) ?? ""} onChange=${set(name)} /></label>`)}
      ${chosen.length > 0 && html`<a class="button" href=${link(["team"])}>All changes</a>`}</div>
    <${Trouble} error=${error} />
    ${data && (data.items.length
      ? html`<section class="card flush"><div class="scroll" tabindex="0" role="region" aria-label="Changes"><table role="table" class="tight queue"><caption class="hidden">Changes, the newest first</caption>
          <thead><tr><th scope="col">Time</th><th scope="col">Who</th><th scope="col">Action</th><th scope="col">Subject</th><th scope="col" class="late">Owner</th><th scope="col">What changed</th></tr></thead>
          <tbody>${data.items.map((one) => html`<${Row} key=${one.id} entry=${one} alone=${Boolean(query.get("subject"))} />`)}</tbody></table></div></section>`
      : html`<section class="card"><${Empty}><p>No such change.${caller?.role === "admin" ? "" : " Shown are changes to the own jobs, tokens and quota, and the own actions."}</p></${Empty}></section>`)}
    <div class="row spread small"><${Command} line=${`ratchet audit${chosen.map(([name, value]) => ` --${name} ${quoted(value)}`).join("")}`} /><${Pages} path=${["team"]} query=${query} next=${data?.next_cursor ?? null} /></div>`;
}

/** @param {{entry: Api.Audit, alone: boolean}} props - alone: all entries have the same subject */
const Row = ({ entry, alone }) => html`<tr><td class="small nowrap" title=${entry.at}>${moment(entry.at)}</td>
  <td><strong>${entry.actor ?? "the service"}</strong>${entry.role && html` <span class="small dim">${entry.role}${entry.token_name ? `, ${entry.token_name}` : ""}</span>`}</td>
  <td>${entry.action}</td>
  <td class="value">${entry.subject_kind === "job" ? html`<a href=${link(["jobs", entry.subject])}><code>${entry.subject}</code></a>` : html`<span class="dim">${entry.subject_kind}</span> <code>${entry.subject}</code>`}
    ${!alone && html` <a class="small" href=${link(["team"], { subject: entry.subject })} aria-label=${`only this: ${entry.subject}`}>only this</a>`}</td>
  <td class="late">${entry.owner}</td><td class="small value why">${changesText(entry.data)}</td></tr>`;

/** @param {any} value @returns {string} */
const text = (value) => (typeof value === "string" ? value : value === null ? "none" : Array.isArray(value) ? JSON.stringify(value) : typeof value === "object" ? changesText(value) : String(value));

/** What changed, such as ``priority 0 → 5``. @param {Record<string, any>} data */
export const changesText = (data) => Object.entries(data).map(([key, value]) => {
  const change = value && typeof value === "object" && Object.keys(value).sort().join() === "new,old";
  return `${key} ${change ? `${text(value.old)} → ${text(value.new)}` : text(value)}`;
}).join(", ");
