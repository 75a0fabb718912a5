// @ts-check
/**
 * The lines of a job's logs, a bounded window of them: from the end backwards, or forwards from a time, the beginning or a search.
 * The API orders lines by attempt and rank; here lines of several ranks are merged by time.
 */
import { follow, read } from "../api.js";

/** Lines that are held at one time. */
export const HELD = 3000;
const STEP = 400;
const PAGE = 1000;
/** Lines that may have been written meanwhile. */
const SLACK = 200;
const MAX_TAIL = 1_000_000;
/** More ranks than this are not merged by time. */
export const MERGED_RANKS = 16;
/** The API's parameter for lines that contain a text. */
export const SEARCH = "grep";
/** Requests of one search that may find nothing before it pauses. */
const ROUNDS = 12;
/** Attempts that are read backwards at one time; "Earlier lines" reads on. */
const ATTEMPTS = 20;

/**
 * ``time``: milliseconds, for merging.
 * @typedef {{id: string, attempt: number, rank: number, text: string, at: string | null, left_out: number | null, time: number, offset: number}} Line
 * ``first``, ``last``: byte offsets of the lines at both ends. ``behind``: lines from ``first`` to the end of the log. ``held``: read, but
 * lines of other ranks of the same time are still missing.
 * @typedef {{attempt: number, rank: number, first: number, last: number, behind: number, done: boolean, held: Line[]}} Source
 * @typedef {{rank: number | null, cursor: string | null, done: boolean, held: Line[]}} Lane
 * ``from``: "end", "start" or a time. ``attempt``: null: all.
 * @typedef {{job: string, attempt: number | null, rank: number | null, search: string, from: string, attempts: number[], ranks: number}} View
 */

/** @param {Api.Line} item @param {number} time @returns {Line} */
const line = (item, time) => ({ ...item, time, offset: Number(item.id.slice(item.id.lastIndexOf(".") + 1)) });

/** Lines that belong to the one before. */
const CONTINUES = /^(\s|$|[\w.]*(Error|Exception|Interrupt|Exit)\b|During handling of|The above exception)/;

/**
 * The API's times are upper bounds that many lines of a log have in common. To merge logs, such lines are spread over the second before,
 * but a traceback stays in one piece.
 * @param {Api.Line[]} items - of one log @returns {Line[]}
 */
function lines(items) {
  /** @type {Line[]} */
  const out = [];
  let begin = 0;
  let known = 0;
  while (begin < items.length) {
    let end = begin + 1;
    while (end < items.length && items[end].at === items[begin].at) end += 1;
    const before = known;
    const { at } = items[begin];
    known = at ? Math.max(known, Date.parse(at)) : known;
    const span = Math.min(1000, known - before);
    for (let n = begin; n < end; n += 1) {
      const time = known - (span * (end - 1 - n)) / (end - begin);
      out.push(line(items[n], out.length && CONTINUES.test(items[n].text) ? out[out.length - 1].time : time));
    }
    begin = end;
  }
  return out;
}

/** Lines of several logs. @param {Api.Line[]} items */
function linesOf(items) {
  /** @type {Map<string, Api.Line[]>} */
  const logs = new Map();
  for (const item of items) {
    const key = `${item.attempt}.${item.rank}`;
    const found = logs.get(key);
    if (found) found.push(item);
    else logs.set(key, [item]);
  }
  return [...logs.values()].flatMap(lines);
}

const inOrder = (/** @type {Line} */ a, /** @type {Line} */ b) => a.attempt - b.attempt || a.time - b.time || a.rank - b.rank || a.offset - b.offset;

export class LogReader {
  /** @param {View} view @param {() => void} onChange */
  constructor(view, onChange) {
    this.view = view;
    this.onChange = onChange;
    /** @type {Line[]} */
    this.lines = [];
    /** @type {Map<string, Source>} */
    this.sources = new Map();
    /** @type {Lane[]} */
    this.lanes = [];
    /** @type {number[]} attempts whose lines were not read yet, the oldest first */
    this.unread = [];
    this.backwards = view.from === "end" && !view.search;
    this.busy = false;
    this.ready = false;
    /** Nothing is before the first held line. */
    this.atStart = false;
    /** The last held line is the last one that is known. */
    this.atEnd = false;
    /** Somebody reads lines before the end: they must stay. */
    this.reading = false;
    this.dropped = 0;
    /** Lines that came while the end was not held. */
    this.fresh = 0;
    this.paused = false;
    this.unmerged = false;
    /** The newest attempt has more ranks than are read at one time: a stream would send the other logs from their beginning. */
    this.partial = false;
    this.state = "";
    /** @type {Error | null} */
    this.error = null;
    this.stop = new AbortController();
  }

  close() {
    this.stop.abort();
  }

  /** @param {Record<string, any>} query @returns {`v1/jobs/${string}/logs?${string}`} */
  path(query) {
    const { job, rank } = this.view;
    /** @type {[string, any][]} */
    const asked = Object.entries({ rank, ...query });
    const all = asked.filter(([, value]) => value !== null && value !== undefined && value !== "");
    return `v1/jobs/${encodeURIComponent(job)}/logs?${new URLSearchParams(all.map(([name, value]) => [name, String(value)]))}`;
  }

  /** @param {() => Promise<void>} work */
  async exclusively(work) {
    if (this.busy || this.stop.signal.aborted) return;
    this.busy = true;
    this.onChange();
    try {
      await work();
      this.error = null;
    } catch (error) {
      if (!this.stop.signal.aborted) this.error = /** @type {Error} */ (error);
    }
    this.busy = false;
    if (!this.stop.signal.aborted) this.onChange();
  }

  /** Read what is shown first. */
  begin() {
    return this.exclusively(async () => {
      if (this.backwards) {
        this.unread = this.view.attempt === null ? [...this.view.attempts] : [this.view.attempt];
        for (let n = 0; n < ATTEMPTS && this.lines.length < STEP && this.unread.length; n += 1) {
          await this.readAttempt(/** @type {number} */ (this.unread.pop()));
        }
        this.atEnd = true;
        this.atStart = !this.unread.length && [...this.sources.values()].every((one) => one.done && !one.held.length);
      } else {
        await this.findLanes();
        this.atStart = true;
        await this.forwards();
      }
      this.ready = true;
    });
  }

  // Backwards: each log by ``tail``.

  /** Read the last lines of an attempt, and put them before the held ones. @param {number} attempt */
  async readAttempt(attempt) {
    const tail = Math.max(10, Math.min(STEP, Math.floor(2000 / Math.max(1, this.view.rank === null ? this.view.ranks : 1))));
    const found = [];
    /** @type {string | null} */
    let cursor = null;
    do {
      /** @type {{data: {items: Api.Line[], next_cursor: string | null}}} */
      const { data } = await read(this.path({ attempt, tail, limit: PAGE, cursor }), { signal: this.stop.signal });
      found.push(...data.items);
      cursor = data.next_cursor;
    } while (cursor && found.length < 2 * HELD);
    if (cursor && !this.sources.size) this.partial = true;
    for (const rank of new Set(found.map((item) => item.rank))) {
      const held = lines(found.filter((item) => item.rank === rank));
      this.sources.set(`${attempt}.${rank}`, {
        attempt, rank, first: held[0].offset, last: /** @type {Line} */ (held.at(-1)).offset, behind: held.length, done: held.length < tail, held,
      });
    }
    this.release();
  }

  /** Number of ranks whose lines were read, in all attempts together. */
  ranks() {
    return new Set([...this.sources.values()].map((one) => one.rank)).size;
  }

  /** Show the read lines of which no rank can have earlier ones. */
  release() {
    const all = [...this.sources.values()];
    this.unmerged = this.ranks() > MERGED_RANKS;
    const first = this.unmerged ? -Infinity : Math.max(-Infinity, ...all.filter((one) => !one.done && one.held.length).map((one) => one.held[0].time));
    /** @type {Line[]} */
    const out = [];
    for (const one of all) {
      const cut = one.held.findIndex((each) => each.time >= first);
      if (cut >= 0) out.push(...one.held.splice(cut));
    }
    if (out.length) this.lines = [...out.sort(inOrder), ...this.lines];
  }

  /** Read lines before the first held one. */
  older() {
    if (!this.backwards || this.atStart || !this.ready) return Promise.resolve();
    return this.exclusively(async () => {
      const before = this.lines.length;
      let left = ATTEMPTS;
      while (this.lines.length === before && left > 0) {
        const waiting = [...this.sources.values()].filter((one) => !one.done && !one.held.length);
        if (waiting.length && !this.unmerged) await Promise.all(waiting.map((one) => this.readBefore(one)));
        else if (this.unread.length) {
          await this.readAttempt(/** @type {number} */ (this.unread.pop()));
          left -= 1;
        } else if (![...this.sources.values()].some((one) => one.held.length)) break;
        this.release();
      }
      this.atStart = this.lines.length === before && left > 0;
      if (this.lines.length > HELD) {
        this.lines = this.lines.slice(0, HELD);
        this.atEnd = false;
      }
    });
  }

  /** @param {Source} source */
  async readBefore(source) {
    const tail = source.behind + STEP;
    if (tail > MAX_TAIL) {
      source.done = true;
      return;
    }
    const { data } = await read(this.path({ attempt: source.attempt, rank: source.rank, tail, limit: STEP + 2 }), { signal: this.stop.signal });
    const found = lines(data.items).filter((one) => one.offset < source.first);
    if (!found.length) {
      source.done = true;
      return;
    }
    source.held = found;
    source.first = found[0].offset;
    source.behind += found.length;
  }

  // Forwards: by cursor, one lane per rank.

  async findLanes() {
    const attempt = this.view.attempt ?? "all";
    let ranks = [this.view.rank];
    if (this.view.rank === null) {
      const { data } = await read(this.path({ attempt, tail: 1, limit: PAGE }), { signal: this.stop.signal });
      const found = /** @type {number[]} */ ([...new Set(data.items.map((item) => item.rank))]);
      this.unmerged = found.length > MERGED_RANKS || Boolean(data.next_cursor);
      ranks = this.unmerged ? [null] : found.length ? found.sort((a, b) => a - b) : [0];
    }
    this.lanes = ranks.map((rank) => ({ rank, cursor: null, done: false, held: [] }));
  }

  /** Read the next lines; at most ``ROUNDS`` requests per rank without a line. */
  async forwards() {
    const { attempt, search, from } = this.view;
    const since = from === "start" || from === "end" ? null : from;
    const before = this.lines.length + this.dropped;
    this.paused = false;
    for (let round = 0; this.lines.length + this.dropped === before && this.lanes.some((lane) => !lane.done || lane.held.length); round += 1) {
      if (round === ROUNDS) {
        this.paused = true;
        return;
      }
      await Promise.all(this.lanes.map(async (lane) => {
        if (lane.done || lane.held.length) return;
        const limit = this.lanes.length > 1 ? STEP : PAGE;
        const query = { attempt: attempt ?? "all", ...(lane.rank !== null && { rank: lane.rank }), [SEARCH]: search, since, limit, cursor: lane.cursor };
        const { data } = await read(this.path(query), { signal: this.stop.signal });
        lane.held = linesOf(data.items);
        lane.cursor = data.next_cursor;
        lane.done = !data.next_cursor;
      }));
      const open = this.lanes.filter((lane) => !lane.done);
      if (open.some((lane) => !lane.held.length)) continue;
      const last = open.map((lane) => /** @type {Line} */ (lane.held.at(-1))).sort((a, b) => a.attempt - b.attempt || a.time - b.time)[0];
      /** @type {Line[]} */
      const out = [];
      for (const lane of this.lanes) {
        let cut = lane.held.length;
        if (last && this.lanes.length > 1) {
          cut = lane.held.findIndex((one) => one.attempt > last.attempt || (one.attempt === last.attempt && one.time > last.time));
          if (cut < 0) cut = lane.held.length;
        }
        out.push(...lane.held.splice(0, cut));
      }
      this.append(this.unmerged ? out : out.sort(inOrder));
      this.onChange();
    }
    this.atEnd = this.lanes.every((lane) => lane.done && !lane.held.length);
  }

  /** Read the lines behind the last held one. */
  newer() {
    if (this.atEnd || !this.ready || (this.backwards && this.unmerged)) return Promise.resolve();
    return this.exclusively(() => (this.backwards ? this.readAfter() : this.forwards()));
  }

  /** Read lines again that were let go when earlier ones were read. */
  async readAfter() {
    /** @type {Map<string, {many: number, last: number}>} */
    const shown = new Map();
    for (const one of this.lines) {
      const key = `${one.attempt}.${one.rank}`;
      shown.set(key, { many: (shown.get(key)?.many ?? 0) + 1, last: one.offset });
    }
    const open = [...this.sources.values()].map((source) => {
      const { many, last } = shown.get(`${source.attempt}.${source.rank}`) ?? { many: 0, last: -1 };
      return { source, last, left: source.behind - many - source.held.length };
    }).filter(({ left }) => left > 0);
    const attempt = Math.min(...open.map(({ source }) => source.attempt));
    const found = await Promise.all(open.filter(({ source }) => source.attempt === attempt).map(async ({ source, last, left }) => {
      const asked = { attempt, rank: source.rank, tail: left + SLACK, limit: STEP + SLACK };
      const { data } = await read(this.path(asked), { signal: this.stop.signal });
      const after = lines(data.items).filter((one) => one.offset > last);
      return { after, whole: after.length >= left };
    }));
    const until = Math.min(Infinity, ...found.filter(({ after, whole }) => !whole && after.length).map(({ after }) => /** @type {Line} */ (after.at(-1)).time));
    const added = found.flatMap(({ after }) => after.filter((one) => one.time <= until)).sort(inOrder);
    this.lines = [...this.lines, ...added];
    if (this.lines.length > HELD) this.dropFirst(this.lines.length - HELD);
    this.atEnd = !added.length || (open.every(({ source }) => source.attempt === attempt) && found.every(({ whole }) => whole) && until === Infinity);
    if (this.atEnd) this.fresh = 0;
  }

  /** @param {Line[]} added */
  append(added) {
    for (const one of added) {
      const key = `${one.attempt}.${one.rank}`;
      const source = this.sources.get(key);
      if (source) Object.assign(source, { last: one.offset, behind: source.behind + 1 });
      else this.sources.set(key, { attempt: one.attempt, rank: one.rank, first: one.offset, last: one.offset, behind: 1, done: true, held: [] });
    }
    if (this.backwards && this.reading && this.lines.length + added.length > HELD) this.atEnd = false;
    if (this.backwards && !this.atEnd) {
      this.fresh += added.length;
      return;
    }
    this.lines = [...this.lines, ...added];
    const most = this.reading ? 2 * HELD : HELD;
    if (this.lines.length > most) this.dropFirst(this.lines.length - most);
  }

  /** Let go of the first lines. They can be read again. @param {number} many */
  dropFirst(many) {
    const gone = this.lines.slice(0, many);
    this.lines = this.lines.slice(many);
    this.dropped += many;
    this.atStart = false;
    if (!this.backwards) return;
    const oldest = this.lines[0].attempt;
    for (const [key, source] of this.sources) {
      if (source.attempt >= oldest) {
        const ofIt = (/** @type {Line} */ one) => one.attempt === source.attempt && one.rank === source.rank;
        const mine = gone.filter(ofIt);
        if (!mine.length && !source.held.length) continue;
        const last = mine.at(-1) ?? source.held.at(-1);
        const first = this.lines.find(ofIt)?.offset ?? /** @type {Line} */ (last).offset + 1;
        Object.assign(source, { behind: source.behind - mine.length - source.held.length, held: [], done: false, first });
      } else {
        this.sources.delete(key);
        if (!this.unread.includes(source.attempt)) this.unread = [...this.unread, source.attempt].sort((a, b) => a - b);
      }
    }
  }

  /** Where a stream goes on: behind the last line of each log of the newest attempt. */
  mark() {
    const all = [...this.sources.values()];
    const newest = Math.max(...all.map((one) => one.attempt));
    return all.filter((one) => one.attempt === newest).map((one) => `${one.attempt}.${one.rank}.${one.last}`).join(",");
  }

  /** Follow what is written, until ``signal`` aborts it or the job ends. @param {AbortSignal} signal */
  async follow(signal) {
    const { attempt, search, from } = this.view;
    const since = Number.isNaN(Date.parse(from)) ? null : from; // for logs that have no line yet
    try {
      await follow(this.path({ follow: true, attempt: attempt ?? "all", [SEARCH]: search, since }), {
        signal, lastId: this.mark(),
        onState: (state) => {
          this.state = state;
          if (state === "open") this.error = null;
          this.onChange();
        },
        onEvents: (events) => {
          const now = new Date().toISOString();
          this.append(linesOf(events.map((event) => JSON.parse(event.data)).map((item) => ({ ...item, at: item.at ?? now }))).sort(inOrder));
          this.onChange();
        },
      });
    } catch (error) {
      if (!signal.aborted) this.error = /** @type {Error} */ (error);
      this.state = "";
      this.onChange();
    }
  }
}
