// @ts-check
/** Who holds CPU slots and GPUs, as cells. */
import { html } from "../dom.js";
import { count, plural } from "../format.js";
import { link } from "../route.js";
import { Card, Command, Empty, Table } from "./basics.js";

/** More slots than these are one bar instead of cells. */
const CELLS = 64;
/** As many as there are colours. */
const HOLDERS = 8;

/** @param {import("../fleet.js").Slots} one */
const isShown = (one) => Boolean(one.capacity || one.used);

/** @param {{slots: import("../fleet.js").Slots[]}} props */
export const Holders = ({ slots }) => html`${slots.filter(isShown).map((one) => html`<${One} key=${one.kind} slots=${one} />`)}
  ${!slots.some(isShown) && html`<${Card} title="Slots"><${Empty}><p>${slots.some((one) => one.capacity === null) ? "The machine that trains has not reported its slots, or an" : "An"} engine such as Slurm or Kubernetes places the jobs. To lend slots of this machine:</p><${Command} line="ratchet serve --cpu-slots 8" /></${Empty}></${Card}>`}`;

/** @param {{slots: import("../fleet.js").Slots}} props */
function One({ slots }) {
  const whole = slots.capacity ?? slots.used;
  const known = slots.capacity !== null;
  const free = known ? Math.max(0, whole - slots.used) : 0;
  const colour = (/** @type {number} */ n) => `var(--${n < HOLDERS ? `c${n}` : "quiet"})`;
  const others = slots.holders.slice(HOLDERS).reduce((sum, holder) => sum + holder.held, 0);
  const cells = slots.holders.flatMap((holder, n) => Array.from({ length: Math.min(holder.held, CELLS) }, () => ({ holder, n })));
  const label = known ? `${count(slots.used)} of ${count(whole)} ${slots.title} in use` : `${count(slots.used)} ${slots.title} in use, capacity not known`;
  return html`<${Card} title=${slots.title} aside=${known ? html`<strong>${count(slots.used)} of ${count(whole)}</strong> in use, ${count(free)} free` : html`<strong>${count(slots.used)}</strong> in use, capacity not known`}>
    <div class="stack" style=${{ gap: ".8rem" }}>
    ${whole <= CELLS
      ? html`<div class="cells" role="img" aria-label=${label}>${cells.map(({ holder, n }) => html`<span class="cell" style=${{ background: colour(n) }} title=${`${holder.name} (${holder.owner})`}></span>`)}${Array.from({ length: free }, () => html`<span class="cell free" title="free"></span>`)}</div>`
      : html`<div class="spent" role="img" aria-label=${label}>${slots.holders.slice(0, HOLDERS).map((holder, n) => html`<span style=${{ width: `${(100 * holder.held) / whole}%`, background: colour(n) }} title=${`${holder.name}: ${holder.held}`}></span>`)}
        ${others > 0 && html`<span class="tone-fill quiet" style=${{ width: `${(100 * others) / whole}%` }} title=${`other jobs: ${others}`}></span>`}</div>`}
    ${slots.holders.length
      ? html`<div class="inset side-list"><${Table} caption=${`Holders of ${slots.title}`} tight numbers=${[1]} head=${["Job", "Held"]}
          rows=${slots.holders.slice(0, HOLDERS).map((holder, n) => [html`<span class="row"><span class="swatch" style=${{ background: colour(n) }}></span><span><a href=${link(["jobs", holder.id])}>${holder.name}</a> <span class="small dim">${holder.owner}</span></span></span>`, count(holder.held)])} /></div>
          ${slots.holders.length > HOLDERS && html`<p class="small dim">and ${plural(slots.holders.length - HOLDERS, "more job")}</p>`}`
      : html`<p class="dim small">${known ? "All are free." : "No job holds one."}</p>`}</div></${Card}>`;
}
