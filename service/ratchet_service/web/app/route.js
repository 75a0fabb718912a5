// @ts-check
/** Addresses of pages, in the part behind ``#``: ``#/jobs/JOB/metrics?x=time``. What is filtered or chosen is in them. */
import { useEffect, useState } from "./dom.js";
import { recorded } from "./recorded.js";

/** @typedef {{path: string[], query: URLSearchParams}} Route */

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a percent sign that was typed
  }
}

/** @param {string} hash @returns {Route} */
export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  return { path: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(query) };
}

/**
 * The address of a page. Values that are null, undefined or empty are left out; a list is repeated.
 * @param {string[]} path @param {Record<string, any>} [query]
 */
export function link(path, query = {}) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") found.append(name, String(one));
    }
  }
  const text = found.toString();
  return `#/${path.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

/** The address of a page that is not about the job of a report; there the link becomes plain text. @type {typeof link | (() => undefined)} */
export const elsewhere = recorded ? () => undefined : link;

/** @returns {Route} */
export function useRoute() {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const changed = () => setHash(location.hash);
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return parse(hash);
}

/**
 * Change some values of the present address, without a new entry in the browser's history.
 * @param {Record<string, any>} values
 */
export function setQuery(values) {
  const { path, query } = parse(location.hash);
  /** @type {Record<string, any>} */
  const now = {};
  for (const name of new Set(query.keys())) now[name] = query.getAll(name);
  location.replace(link(path, { ...now, ...values }));
}

/** @param {string} address */
export const go = (address) => {
  location.hash = address;
};
