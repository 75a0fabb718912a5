// @ts-check
/** Who holds CPU slots and GPUs, as cells. */
import { html } from "../dom.js";
import { count, plural } from "../format.js";
import { link } from "../route.js";
import { Card, Command, Empty, Table } from "./basics.js";

/** More slots than these are one bar instead of cells. */
const CELLS = 64;
const HOLDERS = 20;

/** @param {{slots: import("../fleet.js").Slots[]}} props */
export const Holders = ({ slots }) => html`${slots.filter((one) => one.capacity || one.used).map((one) => html`<${One} key=${one.kind} slots=${one} />`)}
  ${!slots.some((one) => one.capacity || one.used) && html`<${Card} title="Slots"><${Empty}><p>The service manages no slots: an engine such as Slurm or Kubernetes places the jobs. With slots of its own:</p><${Command} line="ratchet serve --cpu-slots 8" /></${Empty}></${Card}>`}`;

/** @param {{slots: import("../fleet.js").Slots}} props */
function One({ slots }) {
  const whole = slots.capacity ?? slots.used;
  const free = Math.max(0, whole - slots.used);
  const colour = (/** @type {number} */ n) => `var(--c${n % 8})`;
  const cells = slots.holders.flatMap((holder, n) => Array.from({ length: Math.min(holder.held, CELLS) }, () => ({ holder, n })));
  const label = `${count(slots.used)} of ${count(whole)} ${slots.title} in use`;
  return html`<${Card} title=${slots.title} aside=${html`<strong>${count(slots.used)} of ${count(whole)}</strong> in use, ${count(free)} free`}>
    <div class="stack" style=${{ gap: ".8rem" }}>
    ${whole <= CELLS
      ? html`<div class="cells" role="img" aria-label=${label}>${cells.map(({ holder, n }) => html`<span class="cell" style=${{ background: colour(n) }} title=${`${holder.name} (${holder.owner})`}></span>`)}${Array.from({ length: free }, () => html`<span class="cell free" title="free"></span>`)}</div>`
      : html`<div class="spent" role="img" aria-label=${label}>${slots.holders.map((holder, n) => html`<span style=${{ width: `${(100 * holder.held) / whole}%`, background: colour(n) }} title=${`${holder.name}: ${holder.held}`}></span>`)}</div>`}
    ${slots.holders.length
      ? html`<div class="inset"><${Table} caption=${`Holders of ${slots.title}`} tight numbers=${[2]} head=${["Job", "Owner", slots.title]}
          rows=${slots.holders.slice(0, HOLDERS).map((holder, n) => [html`<span class="row" style=${{ gap: ".5rem", flexWrap: "nowrap" }}><span class="swatch" style=${{ background: colour(n) }}></span><a href=${link(["jobs", holder.id])}>${holder.name}</a></span>`, holder.owner, count(holder.held)])} /></div>
          ${slots.holders.length > HOLDERS && html`<p class="small dim">and ${plural(slots.holders.length - HOLDERS, "more job")}</p>`}`
      : html`<p class="dim small">All are free.</p>`}</div></${Card}>`;
}
