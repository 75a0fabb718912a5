// @ts-check
/** Numbers, times and sizes as text. */

/** @param {number | null | undefined} seconds @returns {string} */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds < 0.0995) return `${(1000 * seconds).toPrecision(2)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60 ? `${whole % 60} s` : ""}`.trim();
  const all = Math.round(whole / 60);
  const [hours, minutes] = [Math.floor(all / 60), all % 60];
  if (hours < 48) return `${hours} h ${minutes ? `${minutes} min` : ""}`.trim();
  return `${Math.floor(hours / 24)} d ${hours % 24 ? `${hours % 24} h` : ""}`.trim();
}

/** @param {number | null | undefined} bytes */
export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = bytes;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit && value < 9.95 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

/** A measured value in about four digits. @param {number | null | undefined} value */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const large = Math.abs(value);
  if (Number.isInteger(value) && large < 1e7) return count(value);
  if (large !== 0 && (large < 1e-3 || large >= 1e6)) return value.toExponential(3).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

/** A whole number with thin spaces between thousands. @param {number | null | undefined} value */
export function count(value) {
  if (value === null || value === undefined) return "–";
  return String(value).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
}

/** @param {number | null | undefined} share - 0 to 1 */
export function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${share > 0.995 && share < 1 ? (Math.floor(1000 * share) / 10).toFixed(1) : Math.round(100 * share)} %`;
}

/** How long ago. @param {string | null | undefined} time @param {number} now - milliseconds */
export function ago(time, now) {
  if (!time) return "–";
  const seconds = Math.max(0, (now - Date.parse(time)) / 1000);
  return seconds < 5 ? "just now" : seconds < 60 ? `${Math.floor(seconds)} s ago` : `${duration(seconds).split(" ").slice(0, 2).join(" ")} ago`;
}

/** A checkpoint's step, from its id. @param {string} id */
export const stepOf = (id) => `step ${count(Number(id.slice(5, 17)))}`;

/** Date and time here. @param {string | null | undefined} time */
export function moment(time) {
  if (!time) return "–";
  return new Date(time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

/** The time of a day, with milliseconds. @param {string | null | undefined} time */
export function clock(time) {
  if (!time) return "";
  const at = new Date(time);
  return `${at.toLocaleTimeString(undefined, { hourCycle: "h23" })}.${String(at.getMilliseconds()).padStart(3, "0")}`;
}

/** Seconds between two times. @param {string | null | undefined} from @param {string | null | undefined} to */
export function between(from, to) {
  return from && to ? (Date.parse(to) - Date.parse(from)) / 1000 : null;
}

/** @param {number} n @param {string} noun */
export const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

/** A text as a word of a command line. @param {string} text */
export const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** The day of a time here, as ``2030-01-31``. @param {number | string} time */
export function localDay(time) {
  const at = new Date(time);
  return [at.getFullYear(), at.getMonth() + 1, at.getDate()].map((part) => String(part).padStart(2, "0")).join("-");
}

/** The day ``days`` days before a time. @param {number} time - milliseconds @param {number} days */
export const dateBefore = (time, days) => localDay(time - days * 864e5);

/** When a day begins here, in UTC; what is no day stays, for the service to refuse. @param {string} day */
export function midnight(day) {
  const at = new Date(`${day}T00:00`);
  return Number.isNaN(at.getTime()) ? day : at.toISOString().replace(".000", "");
}
