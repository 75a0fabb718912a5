// @ts-check
/** Hours of GPUs, CPU slots and ranks by owner or by a label's value, with the same as CSV. What is asked is in the address. */
import { download, save, serverNow } from "../api.js";
import { html } from "../dom.js";
import { count, dateBefore, localDay, midnight, number, quoted } from "../format.js";
import { useKept, useLive } from "../live.js";
import { link, setQuery } from "../route.js";
import { Card, Command, Empty, Table, Trouble } from "./basics.js";
import { notify } from "./frame.js";

const ROWS = 50;

/** @param {{query: URLSearchParams, days: number}} props - days: up to now, if the address has no dates */
export function Usage({ query, days }) {
  const label = query.get("by") ?? "";
  const since = query.get("since") ?? dateBefore(serverNow(), days);
  const until = query.get("until") ?? "";
  const asked = new URLSearchParams({ by: label ? `label:${label}` : "owner", since: midnight(since), ...(until && { until: midnight(until) }) });
  const path = /** @type {const} */ (`v1/usage?${asked}`);
  const { data, error } = useKept(useLive(path, { every: 60_000 }));
  const set = (/** @type {string} */ name) => (/** @type {any} */ event) => setQuery({ [name]: event.target.value.trim() });
  const csv = () => download(path, { headers: { Accept: "text/csv" } }).then((blob) => save(blob, `usage-${since}.csv`), (wrong) => notify(wrong.message, "bad"));
  const items = data?.items ?? [];
  return html`<${Card} id="usage" title="Hours used" aside=${data && `${localDay(data.since)} to ${until ? localDay(data.until) : "now"}`} flush>
    <div class="row lead-in" style=${{ alignItems: "end" }} role="search" aria-label="Hours used by, and when">
      <label class="field">By the label<input type="text" placeholder="none: by owner" value=${label} onChange=${set("by")} /></label>
      <label class="field">Since<input type="date" value=${since} onChange=${set("since")} /></label>
      <label class="field">Before<input type="date" value=${until} onChange=${set("until")} /></label>
      <button type="button" onClick=${csv}>CSV</button></div>
    ${error && html`<div class="lead-in"><${Trouble} error=${error} /></div>`}
    ${items.length
      ? html`<${Table} caption="Hours used" tight numbers=${[1, 2, 3, 4, 5]} head=${[label || "Owner", "GPU hours", "CPU hours", "Rank hours", "Jobs", "Attempts"]}
          rows=${items.slice(0, ROWS).map((one) => [html`<div class="value" style=${{ minWidth: "7rem" }}>${one.value === null ? html`<span class="dim">without the label</span>` : html`<a href=${link(["jobs"], label ? { label: `${label}=${one.value}` } : { owner: one.value })}>${one.value || "(empty)"}</a>`}</div>`,
            number(one.gpu_hours), number(one.cpu_hours), number(one.rank_hours), count(one.jobs), count(one.attempts)])} />`
      : data && html`<${Empty}><p>No attempt ran in this time.</p></${Empty}>`}
    ${items.length > ROWS && html`<p class="small dim lead-in">The first ${ROWS} of ${count(items.length)}: the CSV has all.</p>`}
    <div class="lead-in"><${Command} line=${`ratchet usage${label ? ` --by ${quoted(`label:${label}`)}` : ""} --since ${midnight(since)}${until ? ` --until ${midnight(until)}` : ""}`} /></div></${Card}>`;
}
