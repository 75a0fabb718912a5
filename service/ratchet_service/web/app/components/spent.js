// @ts-check
/** Where time went: the parts of goodput as one bar, with their words and seconds. */
import { html } from "../dom.js";
import { duration, percent } from "../format.js";
import { SPENT } from "../meaning.js";

/** The parts in the order in which an attempt's time is drawn: lost steps are its last ones. @type {[string, string, string][]} */
export const PARTS = ["queued_seconds", "launching_seconds", "unseen_seconds", "useful_seconds", "stall_seconds", "lost_seconds", "stopping_seconds"]
  .map((key) => /** @type {[string, string, string]} */ (SPENT.find(([other]) => other === key)));

/** @param {Record<string, any>} spent */
export const partsOf = (spent) => PARTS.map(([key, word, explain]) => ({ word, explain, seconds: Number(spent[key] ?? 0) })).filter((part) => part.seconds > 0);

/** What the colours mean. @param {{words?: string[]}} props */
export const PartsLegend = ({ words }) => html`<div class="row small dim parts-legend">${PARTS.filter(([, word]) => (words ? words.includes(word) : word !== "unseen")).map(([, word, explain]) => html`
  <span class="row" title=${explain}><span class=${`swatch part ${word}`}></span>${word}</span>`)}</div>`;

/**
 * One bar and a list of its parts. @param {{spent: Record<string, any>, label: string}} props - spent: seconds by part
 */
export function SpentBar({ spent, label }) {
  const parts = partsOf(spent);
  const whole = parts.reduce((sum, part) => sum + part.seconds, 0) || 1;
  const text = parts.map((part) => `${part.word} ${duration(part.seconds)}`).join(", ");
  return html`<div class="stack" style=${{ gap: ".8rem" }}>
    <div class="spent" role="img" aria-label=${`${label}: ${text}`}>${parts.map((part) => html`<span class=${`part ${part.word}`} style=${{ width: `${(100 * part.seconds) / whole}%` }} title=${`${part.word}: ${duration(part.seconds)}`}></span>`)}</div>
    <dl class="parts">${parts.map((part) => html`<div><dt><span class=${`swatch part ${part.word}`}></span>${part.word} <span class="dim">${part.explain}</span></dt>
      <dd>${duration(part.seconds)}</dd><dd class="dim">${percent(part.seconds / whole)}</dd></div>`)}</dl></div>`;
}
