// @ts-check
/** The answers to the page's requests from a report's data. The pages of a service do not load this. */
import { NotRecorded } from "./recorded.js";

/** @typedef {import("./recorded.js").Recorded} Recorded */

/** What the API answers to a GET, from a report. @param {Recorded} from @param {string} path - as the pages ask for it @returns {any} raises NotRecorded */
export function answerFrom(from, path) {
  const [where, query = ""] = path.split("?", 2);
  const [, , id, part = "", name] = where.split("/").map(decodeURIComponent);
  const found = id === from.job.id ? partOf(from, part, name, new URLSearchParams(query)) : undefined;
  if (found === undefined) throw new NotRecorded(from, where);
  return found;
}

/** @param {Recorded} from @param {string} part @param {string | undefined} name - below it @param {URLSearchParams} asked */
function partOf(from, part, name, asked) {
  switch (part) {
    case "": return from.job;
    case "attempts": return name ? from.attempts.find((one) => String(one.number) === name) : page(from.attempts, asked);
    case "checkpoints": return name ? from.checkpoints.find((one) => one.id === name && "manifest" in one) : page(checkpointsOf(from, asked), asked);
    case "hook": return name ? page(inSteps(from.hook_history, asked, (one) => one.summary.step), asked) : from.hook;
    case "metrics": return { series: seriesOf(from, asked) };
    case "trackers": return page(from.trackers, asked);
    case "events": return page(eventsOf(from, asked), asked);
    case "logs": return logsOf(from, asked);
    case "files": return name ? undefined : filesOf(from, asked);
    default: return undefined;
  }
}

/** One page of a list. A cursor is the place of its first item. @param {any[]} items @param {URLSearchParams} asked */
function page(items, asked) {
  const begin = Number(asked.get("cursor"));
  const end = begin + (Number(asked.get("limit")) || items.length);
  return { items: items.slice(begin, end), next_cursor: end < items.length ? String(end) : null };
}

/** @param {Recorded} from @param {URLSearchParams} asked */
function checkpointsOf(from, asked) {
  const states = asked.has("state") ? asked.getAll("state") : ["committed", "quarantined"];
  return from.checkpoints.filter((one) => states.includes(one.state));
}

/** @param {Recorded} from @param {URLSearchParams} asked */
function eventsOf(from, asked) {
  const [attempt, types] = [asked.get("attempt"), asked.getAll("type")];
  const found = from.events.filter((one) => (attempt === null || String(one.attempt ?? 0) === attempt) && (!types.length || types.includes(one.type)));
  return asked.get("sort") === "-id" ? found.reverse() : found;
}

/** @param {any[]} items @param {URLSearchParams} asked @param {(one: any) => number} stepOf */
function inSteps(items, asked, stepOf) {
  const [first, last] = [Number(asked.get("from_step")), Number(asked.get("to_step") ?? Infinity)];
  return items.filter((one) => stepOf(one) >= first && stepOf(one) <= last);
}

/** Of a series that the report has not whole, ``total`` and ``every`` of some steps are estimated. @param {Recorded} from @param {URLSearchParams} asked */
function seriesOf(from, asked) {
  const names = asked.getAll("name");
  const most = Number(asked.get("max_points"));
  return from.metrics.filter((one) => !names.length || names.includes(one.name)).map((one) => {
    const points = inSteps(one.points, asked, (point) => point.step);
    const whole = points.length === one.points.length;
    const share = Math.ceil(one.total / one.points.length);
    return {
      ...one, points: evenly(points, most), superseded: inSteps(one.superseded, asked, (point) => point.step),
      total: whole ? one.total : points.length, every: whole ? one.every : one.every * share,
    };
  });
}

/** @param {any[]} items @param {number} most - at least 2 */
const evenly = (items, most) =>
  items.length <= most ? items : Array.from({ length: most }, (_, n) => items[Math.ceil((n * (items.length - 1)) / (most - 1))]);

/** @param {Recorded} from @param {URLSearchParams} asked */
function logsOf(from, asked) {
  const [attempt, rank] = [asked.get("attempt") ?? String(from.job.attempt), asked.get("rank")];
  const [search, since] = [asked.get("grep") ?? "", Date.parse(asked.get("since") ?? "")];
  if (attempt !== "all" && !from.log_attempts.includes(Number(attempt))) return undefined;
  const found = from.logs.filter((one) => (attempt === "all" || String(one.attempt) === attempt) && (rank === null || String(one.rank) === rank)
    && !(Date.parse(one.at) < since) && (one.left_out !== null || one.text.includes(search)));
  return page(asked.has("tail") ? lastOfEach(found, Number(asked.get("tail"))) : found, asked);
}

/** The last lines of each log. @param {any[]} lines @param {number} most */
function lastOfEach(lines, most) {
  /** @type {Map<string, number>} */
  const seen = new Map();
  return [...lines].reverse().filter((one) => {
    const log = `${one.attempt}.${one.rank}`;
    seen.set(log, (seen.get(log) ?? 0) + 1);
    return /** @type {number} */ (seen.get(log)) <= most;
  }).reverse();
}

/** Names directly in a folder, or one file. The report has no unchanged code. @param {Recorded} from @param {URLSearchParams} asked */
function filesOf(from, asked) {
  const path = asked.get("path") ?? "";
  const inside = from.files.filter((one) => one.path.slice(0, one.path.lastIndexOf("/") + 1) === (path && `${path}/`));
  const alone = from.files.filter((one) => one.path === path && one.kind !== "directory");
  return asked.get("all") === "true" && !alone.length ? undefined : page(alone.length ? alone : inside, asked);
}
