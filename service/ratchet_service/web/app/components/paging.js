// @ts-check
/** Links to the pages of a list, which keep its filters. */
import { html } from "../dom.js";
import { link } from "../route.js";

/** @param {{path: string[], query: URLSearchParams, next: string | null}} props - path: of the list; next: cursor of the next page */
export function Pages({ path, query, next }) {
  if (!next && !query.get("cursor")) return null;
  const kept = Object.fromEntries([...new Set(query.keys())].map((key) => [key, query.getAll(key)]));
  return html`<div class="row end small">
    ${query.get("cursor") && html`<a class="button" href=${link(path, { ...kept, cursor: null })}>First page</a>`}
    ${next && html`<a class="button" href=${link(path, { ...kept, cursor: next })}>Next page</a>`}</div>`;
}
