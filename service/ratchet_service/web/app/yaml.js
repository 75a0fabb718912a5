// @ts-check
/** JSON values as YAML text, and the differences of two of them. Pure functions. */

const PLAIN = /^[A-Za-z_/][\w ./@%+=,()<>-]*$/;
const WORDS = /^(?:true|false|null|yes|no|on|off|y|n|~)$/i;

/** @param {any} value */
export function scalar(value) {
  if (value === null || value === undefined) return "null";
  if (typeof value === "string") return PLAIN.test(value) && !WORDS.test(value) && value === value.trim() ? value : JSON.stringify(value);
  return JSON.stringify(value);
}

/** @param {any} value */
const flat = (value) => value === null || typeof value !== "object" || Object.keys(value).length === 0;

/** @param {any} value */
const short = (value) => Array.isArray(value) && value.every(flat) && JSON.stringify(value).length <= 90;

/**
 * One line per value. ``path``: its JSON pointer. ``end``: its text, behind the indent and the key.
 * @typedef {{indent: number, key: string, end: string, path: string}} YamlLine
 * @param {any} value @param {number} indent @param {string} path @returns {YamlLine[]}
 */
export function yamlLines(value, indent = 0, path = "") {
  /** @type {YamlLine[]} */
  const out = [];
  for (const [name, one] of Object.entries(value)) {
    const list = Array.isArray(value);
    const key = list ? "-" : `${scalar(name)}:`;
    const at = `${path}/${name.replaceAll("~", "~0").replaceAll("/", "~1")}`;
    if (flat(one)) out.push({ indent, key, end: one !== null && typeof one === "object" ? (Array.isArray(one) ? "[]" : "{}") : scalar(one), path: at });
    else if (short(one)) out.push({ indent, key, end: `[${one.map(scalar).map((/** @type {string} */ text) => (/[,[\]{}]/.test(text) && !text.startsWith('"') ? JSON.stringify(text) : text)).join(", ")}]`, path: at });
    else out.push({ indent, key, end: "", path: at }, ...yamlLines(one, indent + 1, at));
  }
  return out;
}

/** @param {any} value */
export const yaml = (value) => yamlLines(value).map(({ indent, key, end }) => `${"  ".repeat(indent)}${key}${end ? ` ${end}` : ""}\n`).join("");

/**
 * Values by JSON pointer.
 * @param {any} value @param {string} path @returns {Map<string, any>}
 */
export function leaves(value, path = "") {
  /** @type {Map<string, any>} */
  const out = new Map();
  for (const [name, one] of Object.entries(value ?? {})) {
    const at = `${path}/${name.replaceAll("~", "~0").replaceAll("/", "~1")}`;
    if (flat(one) || short(one)) out.set(at, one);
    else for (const [deep, found] of leaves(one, at)) out.set(deep, found);
  }
  return out;
}

/**
 * What differs. A part that only one of them has is one difference.
 * @param {any} before @param {any} after @param {string} path
 * @returns {{path: string, before: any, after: any}[]} undefined: it is not there
 */
export function differences(before, after, path = "") {
  const names = [...new Set([...Object.keys(before ?? {}), ...Object.keys(after ?? {})])];
  return names.flatMap((name) => {
    const [old, now] = [before?.[name], after?.[name]];
    const at = `${path}/${name.replaceAll("~", "~0").replaceAll("/", "~1")}`;
    if (JSON.stringify(old) === JSON.stringify(now)) return [];
    const deep = [old, now].every((one) => one !== undefined && !flat(one) && !Array.isArray(one));
    return deep ? differences(old, now, at) : [{ path: at, before: old, after: now }];
  });
}

/** Whether a value has an integer that JSON.parse may have changed: of 2 to the 53rd or more. @param {any} value @returns {boolean} */
export function rounded(value) {
  if (typeof value === "number") return Number.isInteger(value) && !Number.isSafeInteger(value);
  return value !== null && typeof value === "object" && Object.values(value).some(rounded);
}
