// @ts-check
/** The job's history: live, the newest first, filtered by attempt and type in the address. */
import { follow } from "../../api.js";
import { Badge, Command, Empty, Trouble } from "../../components/basics.js";
import { html, useEffect, useMemo, useReducer, useRef, useState } from "../../dom.js";
import { clock, count, moment, plural } from "../../format.js";
import { ENDED, causeTone } from "../../meaning.js";
import { recorded } from "../../recorded.js";
import { link, setQuery } from "../../route.js";
import { yaml } from "../../yaml.js";

const HELD = 20_000;
const SHOWN = 200;

/** @typedef {{id: number, at: string, type: string, attempt: number | null, message: string, data: Record<string, any>}} JobEvent */

/**
 * All events of a job, the oldest first: the newest ``HELD`` of them, and how many were let go.
 * @param {string} id @param {boolean} live - a resume of an ended job begins a new stream
 */
function useEvents(id, live) {
  const kept = useRef({ events: /** @type {JobEvent[]} */ ([]), dropped: 0, last: "", state: "" , error: /** @type {Error | null} */ (null) });
  const [, render] = useReducer((/** @type {number} */ n) => n + 1, 0);
  const [seen, setSeen] = useState(!document.hidden);
  const [signedIn, setSignedIn] = useReducer((/** @type {number} */ n) => n + 1, 0);
  useEffect(() => {
    const changed = () => setSeen(!document.hidden);
    const entered = () => setSignedIn(undefined);
    document.addEventListener("visibilitychange", changed);
    window.addEventListener("signed-in", entered);
    return () => {
      document.removeEventListener("visibilitychange", changed);
      window.removeEventListener("signed-in", entered);
    };
  }, []);
  useEffect(() => {
    if (!seen) return undefined;
    const stop = new AbortController();
    let timer = 0;
    const soon = () => { timer ||= window.setTimeout(() => { timer = 0; render(undefined); }, 100); };
    follow(`v1/jobs/${encodeURIComponent(id)}/events?follow=true`, {
      signal: stop.signal, lastId: kept.current.last,
      onState: (state) => {
        kept.current.state = state;
        if (state === "open") kept.current.error = null;
        soon();
      },
      onEvents: (found) => {
        const now = kept.current;
        now.events = [...now.events, ...found.map((one) => JSON.parse(one.data))];
        now.last = /** @type {{id: string}} */ (found.at(-1)).id;
        const many = now.events.length - HELD;
        if (many > 0) {
          now.events = now.events.slice(many);
          now.dropped += many;
        }
        soon();
      },
    }).catch((error) => {
      Object.assign(kept.current, { error, state: "" });
      soon();
    });
    return () => { stop.abort(); clearTimeout(timer); };
  }, [id, seen, live, signedIn]);
  return kept.current;
}

/** @param {string} type @param {Record<string, any>} data */
export function toneOf(type, data) {
  if (type === "attempt-ended" && data.cause) return causeTone(data.cause);
  const text = `${type} ${data.phase ?? ""} ${data.to ?? ""} ${data.verdict ?? ""}`.toLowerCase();
  if (/fail|damag|quarantin|lost|\bhang|differ|not[_-]exact|error|refused|overflow|killed|stuck/.test(text)) return "bad";
  if (/succeed|finished|(?<!in)complet|commit|verified|exact/.test(text)) return "good";
  if (/suspend|preempt|cancel|fork|pinned|label|priority|requested/.test(text)) return "held";
  if (/queue|wait|backoff|stop|overdue|warn|slow/.test(text)) return "wait";
  if (/start|running|train|launch|resum|begun/.test(text)) return "busy";
  return "quiet";
}

/** What to do, where the event has it. @param {Record<string, any>} data */
const adviceOf = (data) => [data.advice, data.remedy, data.hint, data.next_step].filter((one) => typeof one === "string" && one);

/** @param {{job: any, attempts: any[], route: import("../../route.js").Route}} props */
export default function Events({ job, route }) {
  const live = !recorded && !ENDED.includes(job.phase);
  const found = useEvents(job.id, live);
  const { query } = route;
  const attempt = query.get("attempt") ?? "";
  const types = query.getAll("type");
  const [many, setMany] = useState(SHOWN);
  /** @type {JobEvent[]} */
  const ofAttempt = useMemo(() => found.events.filter((/** @type {JobEvent} */ one) => !attempt || String(one.attempt ?? "none") === attempt), [found.events, attempt]);
  /** @type {[string, number][]} */
  const counts = useMemo(() => {
    /** @type {Map<string, number>} */
    const out = new Map();
    for (const one of ofAttempt) out.set(one.type, (out.get(one.type) ?? 0) + 1);
    return [...out].sort(([a], [b]) => a.localeCompare(b));
  }, [ofAttempt]);
  /** @type {JobEvent[]} */
  const chosen = useMemo(() => (types.length ? ofAttempt.filter((one) => types.includes(one.type)) : ofAttempt), [ofAttempt, types.join(" ")]);
  const shown = chosen.slice(-many).reverse();
  const toggle = (/** @type {string} */ type) => setQuery({ type: types.includes(type) ? types.filter((one) => one !== type) : [...types, type] });
  return html`<div class="stack">
    <div class="row pickers" role="search" aria-label="Filter events">
      <label class="field">Attempt<select value=${attempt} onChange=${(/** @type {any} */ event) => setQuery({ attempt: event.target.value })}>
        <option value="">all attempts</option><option value="none">no attempt</option>
        ${Array.from({ length: Math.min(500, job.attempt) }, (_, n) => html`<option value=${job.attempt - n}>${job.attempt - n}</option>`)}</select></label>
      <div class="field grow">Types<div class="row" style=${{ gap: ".35rem" }} role="group" aria-label="Types">
        ${counts.map(([type, of]) => html`<button type="button" class="pick" key=${type} aria-pressed=${String(types.includes(type))} onClick=${() => toggle(type)}>${type} <span class="dim">${count(of)}</span></button>`)}
        ${types.length > 0 && html`<button type="button" class="plain" onClick=${() => setQuery({ type: [] })}>all types</button>`}</div></div>
    </div>
    <${Trouble} error=${found.error} />
    ${found.dropped > 0 && html`<p class="dim small">The oldest ${plural(found.dropped, "event")} are not shown: this page holds ${count(HELD)}. All of them: <code>ratchet events ${job.id} --all</code></p>`}
    <section class="card flush"><header style=${{ paddingBottom: ".6rem" }}><h2>${chosen.length === found.events.length ? plural(chosen.length, "event") : `${count(chosen.length)} of ${plural(found.events.length, "event")}`}</h2>
        <small>${found.state === "lost" ? html`<span class="word wait"><span class="dot"></span> connection lost, trying again</span>` : live && found.state === "open" ? html`<span class="word good"><span class="dot"></span> live</span>` : ""} newest first</small></header>
      ${shown.length
        ? html`<div class="scroll" tabindex="0" role="region" aria-label="Events"><table role="table" class="tight events"><caption class="hidden">Events, the newest first</caption>
            <thead><tr><th scope="col">Time</th><th scope="col" class="number">Attempt</th><th scope="col">Type</th><th scope="col">Message</th><th scope="col"><span class="hidden">Data and logs</span></th></tr></thead>
            <tbody>${shown.map((one, n) => html`<${Row} key=${one.id} job=${job} event=${one} day=${dayOf(one.at) !== dayOf(shown[n - 1]?.at)} />`)}</tbody></table></div>`
        : html`<${Empty}><p>${found.events.length ? "No event has the chosen attempt and type." : "No event yet. Each change of phase, attempt and checkpoint becomes one."}</p><${Command} line=${`ratchet events ${job.id} --follow`} /></${Empty}>`}
      ${chosen.length > many && html`<p class="edge"><button type="button" onClick=${() => setMany(many + 5 * SHOWN)}>${count(Math.min(5 * SHOWN, chosen.length - many))} earlier events</button> ${count(chosen.length - many)} are left.</p>`}
    </section>
    <${Command} line=${`ratchet events ${job.id} --all${live ? " --follow" : ""}`} />
  </div>`;
}

/** @param {string | undefined} at */
const dayOf = (at) => (at ? new Date(at).toDateString() : "");

/** @param {{job: any, event: JobEvent, day: boolean}} props */
function Row({ job, event, day }) {
  const [open, setOpen] = useState(false);
  const { data } = event;
  const rank = typeof data.rank === "number" ? data.rank : null;
  const since = new Date(Date.parse(event.at) - 10_000).toISOString();
  return html`<tr role="row">
    <td role="cell" class="nowrap top"><time dateTime=${event.at} title=${moment(event.at)}>${day && html`<span class="dim">${new Date(event.at).toLocaleDateString(undefined, { month: "short", day: "numeric" })} </span>`}${clock(event.at)}</time></td>
    <td role="cell" class="top number">${event.attempt ? html`<a href=${link(["jobs", job.id, "attempts"], { attempt: event.attempt })}><span class="of">attempt </span>${event.attempt}</a>` : html`<span class="dim">–</span>`}</td>
    <td role="cell" class="nowrap top"><${Badge} tone=${toneOf(event.type, data)}>${event.type}</${Badge}></td>
    <td role="cell" class="message">${event.message}
      ${adviceOf(data).map((text) => html`<p class="notice wait small">${text}</p>`)}
      ${open && html`<pre class="data">${yaml(data)}</pre>`}</td>
    <td role="cell" class="nowrap top links">${Object.keys(data).length > 0 && html`<button type="button" class="plain" aria-expanded=${String(open)} aria-label=${`Data of ${event.type}`} onClick=${() => setOpen(!open)}>data ${open ? "▴" : "▾"}</button>`}
      ${event.attempt && html`<a href=${link(["jobs", job.id, "logs"], { attempt: event.attempt, rank, since })} title="The logs from ten seconds before this event">logs at that time</a>`}</td></tr>`;
}
