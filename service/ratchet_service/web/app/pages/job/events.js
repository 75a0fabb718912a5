// @ts-check
/** The job's history, the newest first and live, filtered by attempt and type in the address. Earlier events are read on request. */
import { follow, read } from "../../api.js";
import { Badge, Command, Empty, Trouble } from "../../components/basics.js";
import { html, useCallback, useEffect, useMemo, useReducer, useRef, useState } from "../../dom.js";
import { clock, moment, plural } from "../../format.js";
import { useLive } from "../../live.js";
import { ENDED, causeTone } from "../../meaning.js";
import { recorded } from "../../recorded.js";
import { link, setQuery } from "../../route.js";
import { yaml } from "../../yaml.js";

const PAGE = 100;
/** Pages that one click on the button for earlier events reads. */
const MORE = 5;
/** After this number of new events the list begins again with the newest page, so that the page does not grow for ever. */
const LATER = 2000;

/**
 * Events, the newest first; ``cursor``: of the page before them, null if there is none; ``last``: the id after which the stream goes on.
 * @typedef {Api.Event} JobEvent @typedef {{events: JobEvent[], cursor: string | null, last: number}} Held
 */

/** @type {Held} */
const NONE = { events: [], cursor: null, last: 0 };

/**
 * With the newest page. If more events came than it has, the list begins again with it: what lies between is read on request, and
 * the stream sends again what came after it.
 * @param {Held} held @param {{items: JobEvent[], next_cursor: string | null, last: number}} page @returns {Held}
 */
export function withNewest(held, page) {
  const later = page.items.filter((one) => one.id > (held.events[0]?.id ?? 0));
  return later.length === page.items.length ? { events: page.items, cursor: page.next_cursor, last: page.last } : { ...held, events: [...later, ...held.events], last: Math.max(held.last, page.last) };
}

/** With those of the stream that fit and that it has not yet. @param {Held} held @param {JobEvent[]} found - the oldest first @param {(event: JobEvent) => boolean} fits @returns {Held} */
export function withLater(held, found, fits) {
  const later = found.filter((one) => fits(one) && one.id > (held.events[0]?.id ?? 0));
  return { ...held, events: later.length ? [...later.reverse(), ...held.events] : held.events, last: Math.max(held.last, ...found.map((one) => one.id)) };
}

/** A reader for ``useLive``: the newest page, with the id ``last`` after which the stream goes on. @param {`v1/jobs/${string}/events`} all - path of all events */
const newest = (all) => async (/** @type {string} */ path, /** @type {{signal?: AbortSignal}} */ { signal } = {}) => {
  const last = await read(`${all}?sort=-id&limit=1`, { signal }); // first, so that no event is between the page and the stream
  const { data } = await read(/** @type {`v1/jobs/${string}/events?`} */ (path), { signal });
  return { data: { ...data, last: last.data.items[0]?.id ?? 0 }, etag: "" };
};

/**
 * The events that ``fits`` accepts, which those of ``filter`` (parameters of the request) are.
 * @param {string} id @param {boolean} live - a resume of an ended job begins a new stream
 * @param {URLSearchParams} filter @param {(event: JobEvent) => boolean} fits
 */
function useEvents(id, live, filter, fits) {
  const all = /** @type {const} */ (`v1/jobs/${encodeURIComponent(id)}/events`);
  const path = /** @type {const} */ (`${all}?${new URLSearchParams([["sort", "-id"], ["limit", String(PAGE)], ...filter])}`);
  const load = useMemo(() => newest(all), [all]);
  const { data, error, refresh } = useLive(path, { every: null, load });
  const kept = useRef({ held: /** @type {Held} */ (NONE), came: 0, state: "", busy: false, error: /** @type {Error | null} */ (null) });
  const [, render] = useReducer((/** @type {number} */ n) => n + 1, 0);
  const [woken, wake] = useReducer((/** @type {number} */ n) => n + 1, 0);
  useEffect(() => {
    const names = ["visibilitychange", "signed-in"];
    names.forEach((name) => addEventListener(name, wake));
    return () => names.forEach((name) => removeEventListener(name, wake));
  }, []);
  const now = kept.current;
  useEffect(() => {
    if (!data) return;
    now.held = withNewest(now.came > LATER ? NONE : now.held, data);
    now.came = 0;
    render(undefined);
  }, [data]);
  useEffect(() => {
    if (document.hidden || !data) return undefined;
    const stop = new AbortController();
    let timer = 0;
    const soon = () => { timer ||= window.setTimeout(() => { timer = 0; render(undefined); }, 100); };
    follow(`${all}?follow=true`, {
      signal: stop.signal, lastId: String(now.held.last),
      onState: (state) => {
        now.state = state;
        if (state === "open") now.error = null;
        soon();
      },
      onEvents: (found) => {
        const before = { came: now.came, length: now.held.events.length };
        now.held = withLater(now.held, found.map((one) => JSON.parse(one.data)), fits);
        now.came += now.held.events.length - before.length;
        if (now.came > LATER && before.came <= LATER) refresh(); // once: what comes until it is read, the stream sends again
        soon();
      },
    }).catch((wrong) => {
      Object.assign(now, { error: wrong, state: "" });
      soon();
    });
    return () => { stop.abort(); clearTimeout(timer); };
  }, [data, live, woken]);
  /** Reads events before those that are held. */
  const earlier = useCallback(async () => {
    if (now.busy) return;
    now.busy = true;
    render(undefined);
    try {
      for (let n = 0; n < MORE && now.held.cursor; n += 1) {
        const { cursor } = now.held;
        const found = (await read(`${path}&cursor=${encodeURIComponent(cursor)}`)).data;
        if (now.held.cursor !== cursor) break; // the list has begun again
        now.held = { ...now.held, events: [...now.held.events, ...found.items], cursor: found.next_cursor };
      }
      now.error = null;
    } catch (wrong) {
      now.error = /** @type {Error} */ (wrong);
    }
    now.busy = false;
    render(undefined);
  }, [path]);
  return { ...now, ready: data !== null, error: error ?? now.error, earlier };
}

/** @param {string} type @param {Record<string, any>} data */
export function toneOf(type, data) {
  if (type === "attempt-ended" && data.cause) return causeTone(data.cause);
  const text = `${type} ${data.phase ?? ""} ${data.to ?? ""} ${data.verdict ?? ""} ${type === "alert" ? data.level : ""}`.toLowerCase();
  if (/fail|damag|quarantin|lost|\bhang|differ|not[_-]exact|error|refused|overflow|killed|stuck/.test(text)) return "bad";
  if (/succeed|finished|(?<!in)complet|commit|verified|exact|tracker-back/.test(text)) return "good";
  if (/suspend|preempt|cancel|fork|branch|pinned|label|priority|requested/.test(text)) return "held";
  if (/queue|wait|backoff|stop|overdue|warn|slow|straggler|excluded/.test(text)) return "wait";
  if (/start|running|train|launch|resum|begun/.test(text)) return "busy";
  return "quiet";
}

/** What to do, where the event has it. @param {Record<string, any>} data */
const adviceOf = (data) => [data.advice, data.remedy, data.hint, data.next_step].filter((one) => typeof one === "string" && one);

/** @param {{job: Api.Job, attempts: Api.Attempt[], route: import("../../route.js").Route}} props */
export default function Events({ job, route }) {
  const attempt = route.query.get("attempt") ?? "";
  const types = route.query.getAll("type");
  const [known, setKnown] = useState(/** @type {string[]} */ ([]));
  const onTypes = useCallback((/** @type {string[]} */ found) => setKnown((old) => (found.every((one) => old.includes(one)) ? old : [...new Set([...old, ...found])])), []);
  const toggle = (/** @type {string} */ type) => setQuery({ type: types.includes(type) ? types.filter((one) => one !== type) : [...types, type] });
  const live = !recorded && !ENDED.includes(job.phase);
  return html`<div class="stack">
    <div class="row pickers" role="search" aria-label="Filter events">
      <label class="field">Attempt<select value=${attempt} onChange=${(/** @type {any} */ event) => setQuery({ attempt: event.target.value })}>
        <option value="">all attempts</option><option value="0">no attempt</option>
        ${Array.from({ length: Math.min(500, job.attempt) }, (_, n) => html`<option value=${job.attempt - n}>${job.attempt - n}</option>`)}</select></label>
      <div class="field grow">Types<div class="row" style=${{ gap: ".35rem" }} role="group" aria-label="Types">
        ${[...new Set([...known, ...types])].sort().map((type) => html`<button type="button" class="pick" key=${type} aria-pressed=${String(types.includes(type))} onClick=${() => toggle(type)}>${type}</button>`)}
        <input type="text" aria-label="Another type" placeholder="another type" value="" onChange=${(/** @type {any} */ event) => { const type = event.target.value.trim(); event.target.value = ""; if (type && !types.includes(type)) toggle(type); }} />
        ${types.length > 0 && html`<button type="button" class="plain" onClick=${() => setQuery({ type: [] })}>all types</button>`}</div></div>
    </div>
    <${List} key=${`${attempt} ${types.join(" ")}`} job=${job} live=${live} attempt=${attempt} types=${types} onTypes=${onTypes} />
    <div class="row spread small"><${Command} line=${`ratchet events ${job.id} --all${live ? " --follow" : ""}`} />${!recorded && html`<a href=${link(["team"], { subject: job.id })}>Who changed this job</a>`}</div>
  </div>`;
}

/** @param {{job: Api.Job, live: boolean, attempt: string, types: string[], onTypes: (types: string[]) => void}} props */
function List({ job, live, attempt, types, onTypes }) {
  const filter = new URLSearchParams([...(attempt ? [["attempt", attempt]] : []), ...types.map((one) => ["type", one])]);
  const fits = (/** @type {JobEvent} */ one) => (!attempt || String(one.attempt ?? 0) === attempt) && (!types.length || types.includes(one.type));
  const found = useEvents(job.id, live, filter, fits);
  const { events, cursor } = found.held;
  useEffect(() => onTypes([...new Set(events.map((one) => one.type))]), [events]);
  return html`<${Trouble} error=${found.error} />
    <section class="card flush"><header style=${{ paddingBottom: ".6rem" }}><h2>${found.ready ? `${cursor ? "The newest " : ""}${plural(events.length, "event")}` : "Events"}</h2>
        <small>${found.state === "lost" ? html`<span class="word wait"><span class="dot"></span> connection lost, trying again</span>` : live && found.state === "open" ? html`<span class="word good"><span class="dot"></span> live</span>` : ""} newest first</small></header>
      ${events.length
        ? html`<div class="scroll" tabindex="0" role="region" aria-label="Events"><table role="table" class="tight events"><caption class="hidden">Events, the newest first</caption>
            <thead><tr><th scope="col">Time</th><th scope="col" class="number">Attempt</th><th scope="col">Type</th><th scope="col">Message</th><th scope="col"><span class="hidden">Data and logs</span></th></tr></thead>
            <tbody>${events.map((one, n) => html`<${Row} key=${one.id} job=${job} event=${one} day=${dayOf(one.at) !== dayOf(events[n - 1]?.at)} />`)}</tbody></table></div>`
        : found.ready && html`<${Empty}><p>${attempt || types.length ? "No event has the chosen attempt and type." : "No event yet. Each change of phase, attempt and checkpoint becomes one."}</p><${Command} line=${`ratchet events ${job.id} --follow`} /></${Empty}>`}
      ${cursor && html`<p class="edge"><button type="button" disabled=${found.busy} onClick=${found.earlier}>Earlier events</button></p>`}
    </section>`;
}

/** @param {string | undefined} at */
const dayOf = (at) => (at ? new Date(at).toDateString() : "");

/** @param {{job: Api.Job, event: JobEvent, day: boolean}} props */
function Row({ job, event, day }) {
  const [open, setOpen] = useState(false);
  const { data } = event;
  const rank = typeof data.rank === "number" ? data.rank : null;
  const since = new Date(Date.parse(event.at) - 10_000).toISOString();
  return html`<tr role="row">
    <td role="cell" class="nowrap top"><time dateTime=${event.at} title=${moment(event.at)}>${day && html`<span class="dim">${new Date(event.at).toLocaleDateString(undefined, { month: "short", day: "numeric" })} </span>`}${clock(event.at)}</time></td>
    <td role="cell" class="top number">${event.attempt ? html`<a href=${link(["jobs", job.id, "attempts"], { attempt: event.attempt })}><span class="phone">attempt </span>${event.attempt}</a>` : html`<span class="dim">–</span>`}</td>
    <td role="cell" class="nowrap top"><${Badge} tone=${toneOf(event.type, data)}>${event.type}</${Badge}></td>
    <td role="cell" class="message">${event.message}
      ${adviceOf(data).map((text) => html`<p class="notice wait small">${text}</p>`)}
      ${open && html`<pre class="data">${yaml(data)}</pre>`}</td>
    <td role="cell" class="nowrap top links">${Object.keys(data).length > 0 && html`<button type="button" class="plain" aria-expanded=${String(open)} aria-label=${`Data of ${event.type}`} onClick=${() => setOpen(!open)}>data ${open ? "▴" : "▾"}</button>`}
      ${event.attempt && html`<a href=${link(["jobs", job.id, "logs"], { attempt: event.attempt, rank, since })} title="The logs from ten seconds before this event">logs at that time</a>`}</td></tr>`;
}
