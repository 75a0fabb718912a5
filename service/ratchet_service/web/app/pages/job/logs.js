// @ts-check
/** What the ranks printed: of all ranks or some side by side, from the end, a time or a search. What is chosen is in the address. */
import { Choice, Command } from "../../components/basics.js";
import { notify } from "../../components/frame.js";
import { download, save } from "../../api.js";
import { html, useState } from "../../dom.js";
import { moment, plural } from "../../format.js";
import { LogList } from "../../logs/list.js";
import { SEARCH } from "../../logs/reader.js";
import { ENDED } from "../../meaning.js";
import { recorded } from "../../recorded.js";
import { setQuery } from "../../route.js";

/** Lists side by side. */
const PANES = 2;

/** @param {{job: Api.Job, attempts: Api.Attempt[], route: import("../../route.js").Route}} props */
export default function Logs({ job, attempts, route }) {
  const { query } = route;
  const numbers = recorded?.log_attempts ?? Array.from({ length: job.attempt }, (_, n) => n + 1);
  const attempt = Number(query.get("attempt")) || null;
  const ranks = [...new Set(query.getAll("rank").filter((text) => /^\d{1,5}$/.test(text)).map(Number))].slice(0, PANES);
  const search = query.get("search") ?? "";
  const since = query.get("since") ?? "";
  const from = Number.isNaN(Date.parse(since)) ? (query.get("from") === "start" || search ? "start" : "end") : new Date(since).toISOString();
  const world = worldSize(job, attempts);
  const over = ENDED.includes(job.phase);
  const live = !recorded && !over && (attempt === null || attempt === job.attempt);
  const view = (/** @type {number | null} */ rank) => ({ job: job.id, attempt, rank, search, from, attempts: numbers, ranks: world });
  const panes = ranks.length ? ranks : [null];
  return html`<div class="stack logs">
    <${Pickers} job=${job} numbers=${numbers} attempt=${attempt} ranks=${ranks} search=${search} from=${from} world=${world} attempts=${attempts} />
    ${job.attempt > numbers.length && html`<p class="notice wait small">The logs of ${plural(job.attempt - numbers.length, "attempt")} are not in this report.</p>`}
    <div class="panes">${(numbers.length > 0 || !job.attempt) && panes.map((rank) => html`<${LogList} key=${String(rank)} view=${view(rank)} live=${live} over=${over} onView=${setQuery} showRank=${rank === null}
      title=${rank === null ? "All ranks" : `Rank ${rank}`} height="max(20rem, calc(100vh - 15rem))" />`)}</div>
    ${panes.map((rank) => html`<${Command} key=${String(rank)} line=${commandLine(job, { attempt, rank, search, since: from === "start" || from === "end" ? "" : from, live })} />`)}
  </div>`;
}

/** @param {Api.Job} job @param {Api.Attempt[]} attempts */
function worldSize(job, attempts) {
  const found = attempts.map((one) => one.resume_report?.world_size ?? 0);
  const { nodes = 1, ranks_per_node: each } = job.spec.world ?? {};
  return Math.max(1, ...found, Number(each) ? nodes * Number(each) : 1);
}

/** @param {Api.Job} job @param {{attempt: number | null, rank: number | null, search: string, since: string, live: boolean}} chosen */
export function commandLine(job, { attempt, rank, search, since, live }) {
  return ["ratchet logs", job.id, `--attempt ${attempt ?? "all"}`, rank !== null && `--rank ${rank}`, since && `--since ${since}`,
    search && `--grep '${search.replaceAll("'", "'\\''")}'`, live && "--follow"].filter(Boolean).join(" ");
}

/** @param {{job: Api.Job, numbers: number[], attempt: number | null, ranks: number[], search: string, from: string, world: number, attempts: Api.Attempt[]}} props */
function Pickers({ job, numbers, attempt, ranks, search, from, world, attempts }) {
  const place = from === "end" || from === "start" ? from : "time";
  const local = place === "time" ? new Date(Date.parse(from) - 60_000 * new Date(from).getTimezoneOffset()).toISOString().slice(0, 19) : "";
  const causes = Object.fromEntries(attempts.map((one) => [one.number, one.cause]));
  const setRank = (/** @type {number} */ at, /** @type {string} */ text) => {
    const next = [...ranks];
    if (text === "") next.splice(at, 1);
    else next[at] = Number(text);
    setQuery({ rank: [...new Set(next)] });
  };
  const rankPicker = (/** @type {number} */ at, /** @type {string} */ label, /** @type {string} */ none) => html`<label class="field">${label}
    ${world <= 256
      ? html`<select value=${ranks[at] ?? ""} onChange=${(/** @type {any} */ event) => setRank(at, event.target.value)}><option value="">${none}</option>
          ${Array.from({ length: Math.max(world, ...ranks.map((one) => one + 1)) }, (_, n) => html`<option value=${n}>rank ${n}</option>`)}</select>`
      : html`<input type="number" min="0" max=${world - 1} placeholder=${none} value=${ranks[at] ?? ""} onChange=${(/** @type {any} */ event) => setRank(at, event.target.value)} />`}</label>`;
  return html`<div class="row pickers" role="search" aria-label="Choose lines">
    <label class="field">Attempt<select value=${attempt ?? ""} onChange=${(/** @type {any} */ event) => setQuery({ attempt: event.target.value })}>
      <option value="">all attempts</option>${[...numbers].reverse().slice(0, 500).map((n) => html`<option value=${n}>${n}${causes[n] ? ` · ${causes[n]}` : ""}</option>`)}</select></label>
    ${rankPicker(0, "Rank", "all ranks")}
    ${ranks.length > 0 && world > 1 && html`<span class="beside">${rankPicker(1, "Beside it", "no other")}</span>`}
    <label class="field grow find">Lines that contain
      <input type="search" placeholder="text, as it was written" value=${search} onChange=${(/** @type {any} */ event) => setQuery({ search: event.target.value, from: null })} /></label>
    <span class="field">Begin<${Choice} label="Where to begin" value=${search && place === "start" ? "start" : place} onChange=${(/** @type {string} */ key) => setQuery(key === "time"
      ? { from: null, since: job.started_at ?? job.created_at } : { since: null, from: key === "start" ? "start" : null, ...(key === "end" && { search: null }) })}
      options=${[["end", "End"], ["start", "Start"], ["time", "Time"]]} /></span>
    ${place === "time" && html`<label class="field">Since<input type="datetime-local" step="1" value=${local} title=${moment(from)}
      onChange=${(/** @type {any} */ event) => event.target.value && setQuery({ since: new Date(event.target.value).toISOString() })} /></label>`}
    ${!recorded && html`<${Save} job=${job} attempt=${attempt} ranks=${ranks} search=${search} />`}
  </div>`;
}

/** All chosen lines as a file for each chosen rank. @param {{job: Api.Job, attempt: number | null, ranks: number[], search: string}} props */
function Save({ job, attempt, ranks, search }) {
  const [busy, setBusy] = useState(false);
  const fetchAll = async () => {
    setBusy(true);
    try {
      for (const rank of ranks.length ? ranks : [null]) {
        const asked = new URLSearchParams({ attempt: String(attempt ?? "all"), ...(rank !== null && { rank: String(rank) }), ...(search && { [SEARCH]: search }) });
        const blob = await download(`v1/jobs/${job.id}/logs?${asked}`, { headers: { Accept: "text/plain" } });
        save(blob, `${job.name}${attempt ? `-attempt-${attempt}` : ""}${rank === null ? "" : `-rank-${rank}`}.log`);
      }
    } catch (error) {
      notify(/** @type {Error} */ (error).message, "bad");
    }
    setBusy(false);
  };
  return html`<button type="button" disabled=${busy} onClick=${fetchAll} title="All lines of the chosen attempts and ranks, as text">${busy ? "Fetching …" : "Download"}</button>`;
}
