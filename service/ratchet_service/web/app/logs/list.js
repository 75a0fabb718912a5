// @ts-check
/** The lines of a LogReader: a bounded list that reads on where its reader scrolls, and follows what is written. */
import { Command, Empty, Trouble } from "../components/basics.js";
import { classes, html, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState } from "../dom.js";
import { count, moment, plural, size } from "../format.js";
import { lastVersion, marked, spans } from "./ansi.js";
import { HELD, LogReader } from "./reader.js";

/** @typedef {import("./reader.js").Line} Line @typedef {import("./reader.js").View} View */

const CHUNK = 100;
const LONG = 2000;
const NEAR = 400;

/**
 * @param {{view: View, live: boolean, over: boolean, title?: any, showRank: boolean, onView: (values: Record<string, any>) => void, height: string}} props
 * ``live``: the job can write more. ``over``: the job has ended; lines still come until the stream ends. ``onView``: change what the address asks for.
 */
export function LogList({ view, live, over, title, showRank, onView, height }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const stuck = useRef(true);
  const anchor = useRef(/** @type {{id: string, top: number} | null} */ (null));
  const [again, setAgain] = useReducer((/** @type {number} */ n) => n + 1, 0);
  const [, render] = useReducer((/** @type {number} */ n) => n + 1, 0);
  const key = JSON.stringify([view.job, view.attempt, view.rank, view.search, view.from, again]);
  const waiting = useRef(0);
  const reader = useMemo(() => {
    const made = new LogReader(view, () => {
      waiting.current ||= requestAnimationFrame(() => {
        waiting.current = 0;
        anchor.current = box.current && firstSeen(box.current);
        render(undefined);
      });
    });
    return made;
  }, [key]);
  useEffect(() => {
    stuck.current = reader.backwards;
    reader.begin();
    return () => reader.close();
  }, [reader]);
  const streaming = reader.state === "open" || reader.state === "lost";
  const following = (live || (over && streaming)) && reader.ready && !reader.partial && (reader.backwards || reader.atEnd);
  useFollow(reader, following);
  useEffect(() => {
    const signedIn = () => void (reader.error && setAgain(undefined));
    window.addEventListener("signed-in", signedIn);
    return () => window.removeEventListener("signed-in", signedIn);
  }, [reader]);

  useLayoutEffect(() => {
    const place = box.current;
    if (!place) return;
    if (stuck.current && reader.atEnd) place.scrollTop = place.scrollHeight;
    else if (anchor.current) {
      const row = place.querySelector(`[data-line="${anchor.current.id}"]`);
      if (row) place.scrollTop += row.getBoundingClientRect().top - anchor.current.top;
    }
    anchor.current = null;
  });

  useEffect(() => {
    const place = box.current; // a list that does not fill it is never scrolled
    if (place && !reader.backwards && !reader.busy && !reader.paused && !reader.error && place.scrollHeight - place.clientHeight < NEAR) reader.newer();
  });

  const scrolled = () => {
    const place = box.current;
    if (!place) return;
    const left = place.scrollHeight - place.scrollTop - place.clientHeight;
    const now = left < 30 && reader.atEnd;
    if (now !== stuck.current) {
      stuck.current = now;
      reader.reading = !now;
      render(undefined);
    }
    if (place.scrollTop < NEAR) reader.older();
    if (left < NEAR && !reader.paused) reader.newer();
  };
  const toEnd = () => {
    stuck.current = true;
    reader.reading = false;
    if (reader.atEnd) render(undefined);
    else if (reader.backwards) setAgain(undefined);
    else onView({ since: null, from: null, search: null });
  };
  const { lines } = reader;
  /** Earlier attempts may have lines. */
  const unseen = reader.backwards && reader.ready && !reader.atStart;
  const awayFromEnd = reader.ready && lines.length > 0 && (!stuck.current || !reader.atEnd);
  return html`<section class="card flush loglist" aria-label=${typeof title === "string" ? title : "Log"}>
    <header>${title && html`<h2>${title}</h2>`}<${State} reader=${reader} following=${following} /></header>
    <${Trouble} error=${reader.error} />
    ${reader.error && html`<p class="edge"><button type="button" onClick=${() => setAgain(undefined)}>Read again</button></p>`}
    <div class="log" ref=${box} onScroll=${scrolled} tabindex="0" role="region" aria-label="Lines of the log" style=${{ maxHeight: height }}>
      ${(lines.length > 0 || unseen) && html`<${Top} reader=${reader} onView=${onView} onAgain=${() => setAgain(undefined)} />`}
      ${chunks(lines).map((part) => rows(part, view.search, showRank))}
      ${reader.ready && !lines.length && (unseen ? html`<p class="edge">No line in the newest attempts that were read.</p>` : html`<${None} view=${view} live=${live} />`)}
      ${!reader.ready && !reader.error && html`<p class="edge">Lines are being read …</p>`}
      ${reader.paused && html`<p class="edge">Nothing found in the part that was searched. <button type="button" onClick=${() => reader.newer()}>Search on</button></p>`}
      ${live && reader.partial && html`<p class="edge">New lines do not appear here: the job has too many ranks to be read at one time. Choose a rank to follow its lines.</p>`}
      ${reader.backwards && !reader.atEnd && lines.length > 0 && html`<p class="edge">Later lines are not shown here.</p>`}
      ${!reader.backwards && lines.length > 0 && html`<p class="edge">${reader.atEnd ? (following ? "New lines appear here." : "End of the log.") : "Further lines are being read …"}</p>`}
    </div>
    ${awayFromEnd && html`<button type="button" class="toend" onClick=${toEnd}>${reader.fresh ? `To the end (${count(reader.fresh)} new)` : reader.atEnd || reader.backwards ? "To the end" : "End of the log"} ↓</button>`}
  </section>`;
}

/** Follow while the page is visible. @param {LogReader} reader @param {boolean} wanted */
function useFollow(reader, wanted) {
  const [seen, setSeen] = useState(!document.hidden);
  useEffect(() => {
    const changed = () => setSeen(!document.hidden);
    document.addEventListener("visibilitychange", changed);
    return () => document.removeEventListener("visibilitychange", changed);
  }, []);
  useEffect(() => {
    if (!wanted || !seen) return undefined;
    const stop = new AbortController();
    reader.follow(stop.signal);
    return () => stop.abort();
  }, [reader, wanted, seen]);
}

/** @param {{reader: LogReader, following: boolean}} props */
function State({ reader, following }) {
  const words = reader.busy ? "reading …" : !following || reader.state === "ended" ? "" : reader.state === "lost" ? "connection lost, trying again" : reader.state === "open" ? "live" : "";
  const tone = reader.state === "lost" ? "wait" : "good";
  return html`<small class="row" style=${{ gap: ".5rem" }}>${words === "live" || reader.state === "lost" ? html`<span class=${classes("word", tone)}><span class="dot"></span> ${words}</span>` : html`<span>${words}</span>`}
    <span>${plural(reader.lines.length, "line")} shown${reader.lines.length >= HELD ? ", the most at one time" : ""}</span></small>`;
}

/** What is before the first line. @param {{reader: LogReader, onView: (values: Record<string, any>) => void, onAgain: () => void}} props */
function Top({ reader, onView, onAgain }) {
  const { view } = reader;
  if (reader.unmerged && !reader.unread.length && reader.backwards) {
    return html`<p class="edge">The last lines of ${count(reader.ranks())} ranks, rank by rank. Choose a rank to read its earlier lines.</p>`;
  }
  if (reader.backwards) {
    return html`<p class="edge">${reader.atStart ? "Beginning of the log." : html`<button type="button" class="plain" onClick=${() => reader.older()}>Earlier lines</button>`}</p>`;
  }
  if (reader.dropped) {
    return html`<p class="edge">${count(reader.dropped)} earlier lines are no longer shown. <button type="button" class="plain" onClick=${onAgain}>From the first one</button></p>`;
  }
  const at = Date.parse(view.from);
  if (Number.isNaN(at)) return html`<p class="edge">Beginning of the ${view.search ? "found lines" : "log"}.</p>`;
  const earlier = (/** @type {number} */ seconds) => onView({ since: new Date(at - 1000 * seconds).toISOString() });
  return html`<p class="edge">Lines since ${moment(view.from)}. <button type="button" class="plain" onClick=${() => earlier(60)}>1 min earlier</button>
    <button type="button" class="plain" onClick=${() => earlier(600)}>10 min earlier</button></p>`;
}

/** @param {{view: View, live: boolean}} props */
const None = ({ view, live }) => html`<${Empty}>${view.search
  ? html`<p>No line of the chosen attempts and ranks contains “${view.search}”.</p><p class="small">The search finds the text as it was written, with upper and lower case.</p>`
  : Number.isNaN(Date.parse(view.from))
    ? html`<p>${live ? "No line yet. What the ranks print appears here as it is written." : "The ranks printed nothing."}</p><${Command} line=${live ? 'print("step", step, flush=True)' : `ratchet events ${view.job}`} />`
    : html`<p>No line was written since ${moment(view.from)}.</p>`}</${Empty}>`;

/** The row at the upper edge. @param {HTMLElement} place */
function firstSeen(place) {
  const edge = place.getBoundingClientRect().top;
  for (const part of place.children) {
    if (part.getBoundingClientRect().bottom < edge) continue;
    for (const row of /** @type {NodeListOf<HTMLElement>} */ (part.querySelectorAll("[data-line]"))) {
      const top = row.getBoundingClientRect().top;
      if (top >= edge && row.dataset.line) return { id: row.dataset.line, top };
    }
  }
  return null;
}

/** Parts of the list that stay what they are when lines are added at either end. @type {WeakMap<Line, {lines: Line[], drawn: any, drawnFor: string}>} */
const kept = new WeakMap();

/** @param {Line[]} lines */
function chunks(lines) {
  const out = [];
  let begin = 0;
  while (begin < lines.length) {
    const found = kept.get(lines[begin]);
    const same = found && found.lines.length === CHUNK && found.lines.every((one, n) => one === lines[begin + n]);
    let part = same ? found : null;
    if (!part) {
      let end = begin + 1;
      while (end < lines.length && end < begin + CHUNK && !(kept.get(lines[end])?.lines.length === CHUNK)) end += 1;
      part = { lines: lines.slice(begin, end), drawn: null, drawnFor: "" };
      kept.set(lines[begin], part);
    }
    out.push({ part, before: lines[begin - 1] });
    begin += part.lines.length;
  }
  return out;
}

/** @param {{part: {lines: Line[], drawn: any, drawnFor: string}, before: Line | undefined}} chunk @param {string} search @param {boolean} showRank */
function rows({ part, before }, search, showRank) {
  const drawnFor = JSON.stringify([search, showRank, before?.attempt]);
  if (part.drawnFor !== drawnFor) {
    let attempt = before?.attempt;
    part.drawnFor = drawnFor;
    part.drawn = html`<div class="chunk" key=${part.lines[0].id}>${part.lines.map((one) => {
      const begins = one.attempt !== attempt;
      attempt = one.attempt;
      return html`${begins && html`<div class="divider" role="separator">attempt ${one.attempt}</div>`}<${Row} key=${one.id} line=${one} search=${search} showRank=${showRank} />`;
    })}</div>`;
  }
  return part.drawn;
}

/** @param {{line: Line, search: string, showRank: boolean}} props */
function Row({ line, search, showRank }) {
  const [whole, setWhole] = useState(false);
  const { text, overwritten } = lastVersion(line.text);
  const cut = !whole && text.length > LONG;
  const time = line.at ? new Date(line.at) : null;
  return html`<div class="line" data-line=${line.id}>
    <time dateTime=${time?.toISOString()} title=${time ? `${moment(time.toISOString())}, to about 6 s` : "Its time is not known."}>${time ? time.toLocaleTimeString(undefined, { hourCycle: "h23" }) : "–"}</time>
    ${showRank && html`<span class=${`who rank${line.rank % 8}`} title=${`attempt ${line.attempt}, rank ${line.rank}`}>r${line.rank}</span>`}
    ${line.left_out !== null
      ? html`<span class="text left">${size(line.left_out)} left out here: logs are bounded</span>`
      : html`<span class="text">${marked(spans(cut ? text.slice(0, LONG) : text), search).map((span) => (
        span.hit ? html`<mark>${span.text}</mark>` : span.tone ? html`<span class=${span.tone}>${span.text}</span>` : span.text))}
        ${cut && html`<button type="button" class="plain" onClick=${() => setWhole(true)}>… ${size(text.length - LONG)} more</button>`}
        ${overwritten > 0 && html`<span class="dim" title="The line was rewritten by carriage returns, as by a progress bar. Its last version is shown."> ↻ ${overwritten}</span>`}</span>`}
  </div>`;
}
