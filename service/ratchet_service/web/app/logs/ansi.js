// @ts-check
/** Terminal output as text: colours become class names, other control codes are removed. Pure functions. */

/** @typedef {{text: string, tone: string}} Span - tone: class names of style.css, or empty */

/* eslint-disable no-control-regex -- control codes are what this is about */
const ESCAPE = new RegExp("\\u001b(?:\\[([0-9;:?<=>]*)[ -/]*([@-~])|\\][^\\u0007\\u001b]*(?:\\u0007|\\u001b\\\\)?|[PX^_][^\\u001b]*(?:\\u001b\\\\)?|[ -/]*[0-~])?", "g");
const CONTROL = new RegExp("[\\u0000-\\u0008\\u000b-\\u001f\\u007f]", "g");
const COLORS = ["ansi-gray", "ansi-red", "ansi-green", "ansi-yellow", "ansi-blue", "ansi-magenta", "ansi-cyan", ""];

/**
 * The text that a terminal would leave standing: behind the last carriage return, as a progress bar rewrites its line.
 * @param {string} raw @returns {{text: string, overwritten: number}} overwritten: number of earlier versions of the line
 */
export function lastVersion(raw) {
  if (!raw.includes("\r")) return { text: raw, overwritten: 0 };
  const parts = raw.split("\r").filter((part) => part !== "");
  return { text: parts.at(-1) ?? "", overwritten: Math.max(0, parts.length - 1) };
}

/** @param {string} raw @returns {Span[]} */
export function spans(raw) {
  if (!raw.includes("\u001b")) return [{ text: raw.replace(CONTROL, "\ufffd"), tone: "" }];
  /** @type {Span[]} */
  const out = [];
  let color = "";
  let bold = false;
  let at = 0;
  const add = (/** @type {string} */ text) => {
    const tone = [color, bold && "ansi-bold"].filter(Boolean).join(" ");
    if (text) out.push({ text: text.replace(CONTROL, "\ufffd"), tone });
  };
  for (const found of raw.matchAll(ESCAPE)) {
    add(raw.slice(at, found.index));
    at = /** @type {number} */ (found.index) + found[0].length;
    if (found[2] !== "m") continue;
    const codes = (found[1] || "0").split(/[;:]/).map(Number);
    for (let n = 0; n < codes.length; n += 1) {
      const code = codes[n];
      if (code === 0) [color, bold] = ["", false];
      else if (code === 1) bold = true;
      else if (code === 22) bold = false;
      else if (code === 39) color = "";
      else if (code === 38 || code === 48) n += codes[n + 1] === 5 ? 2 : 4;
      else if (code >= 30 && code <= 37) color = COLORS[code - 30];
      else if (code >= 90 && code <= 97) color = COLORS[code - 90];
    }
  }
  add(raw.slice(at));
  return out;
}

/**
 * Split spans where ``wanted`` is found, also across spans.
 * @param {Span[]} list @param {string} wanted @returns {(Span & {hit: boolean})[]}
 */
export function marked(list, wanted) {
  if (!wanted) return list.map((span) => ({ ...span, hit: false }));
  const whole = list.map((span) => span.text).join("");
  const out = [];
  let begin = 0;
  let found = whole.indexOf(wanted);
  for (const span of list) {
    const end = begin + span.text.length;
    let at = begin;
    while (found >= 0 && found < end) {
      const stop = Math.min(end, found + wanted.length);
      if (found > at) out.push({ text: whole.slice(at, found), tone: span.tone, hit: false });
      out.push({ text: whole.slice(Math.max(at, found), stop), tone: span.tone, hit: true });
      at = stop;
      if (found + wanted.length > end) break; // the rest of it is in the next span
      found = whole.indexOf(wanted, found + wanted.length);
    }
    if (at < end) out.push({ text: whole.slice(at, end), tone: span.tone, hit: false });
    begin = end;
  }
  return out;
}
