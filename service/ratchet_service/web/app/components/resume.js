// @ts-check
/** What a resume restored: components by ranks, and what differs from the base. */
import { classes, html } from "../dom.js";
import { count, plural } from "../format.js";
import { statusTone } from "../meaning.js";
import { Card } from "./basics.js";

const MOST = 16;
const NOTES = 6;
/** @type {Record<string, [string, string]>} */
const SIGNS = { exact: ["✓", "restored bit for bit"], redistributed: ["↔", "redistributed to another number of ranks"], reset: ["0", "set back to its start"], absent: ["–", "not in the checkpoint"], imported: ["↓", "imported"], "not-exact": ["!", "not exact"] };

/** @param {{status: string, reason?: string | null}} props */
const Sign = ({ status, reason }) => html`<span class=${classes("mark", statusTone(status))} role="img" aria-label=${status} title=${reason ? `${status}: ${reason}` : status}>${SIGNS[status]?.[0] ?? "!"}</span>`;

/**
 * Components by ranks. With more than 16 ranks: a column that sums up all of them, then those that deviate, then others.
 * @param {{attempt: {number: number, resume_report: Api.Report}}} props
 */
export function ResumeMatrix({ attempt }) {
  const report = attempt.resume_report;
  const all = report.components;
  const names = [...new Set(all.map((one) => one.component))];
  const cell = new Map(all.map((one) => [`${one.component} ${one.rank}`, one]));
  const deviating = new Set(all.filter((one) => one.status !== "exact").map((one) => one.rank));
  const ranks = [...new Set(all.map((one) => one.rank))].sort((a, b) => Number(deviating.has(b)) - Number(deviating.has(a)) || a - b);
  const many = ranks.length > MOST;
  const columns = many ? ranks.slice(0, MOST) : ranks.sort((a, b) => a - b);
  const seen = [...new Set(all.map((one) => one.status))];
  const reasons = reasonsOf(all);
  return html`<${Card} title=${`Resume of attempt ${attempt.number}`} aside=${html`<span class=${classes("word", report.verdict === "exact" ? "good" : report.verdict === "not-exact" ? "bad" : "quiet")}>${report.verdict}</span>, from step ${count(report.base.step)}`}>
    <div class="stack" style=${{ gap: ".7rem" }}>
    ${report.recorded_world_size && report.recorded_world_size !== report.world_size && html`<p class="notice wait">The checkpoint has ${plural(report.recorded_world_size, "rank")}, this attempt ${report.world_size}.</p>`}
    ${names.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label=${`Resume of attempt ${attempt.number}`}><table class="tight matrix"><caption class="hidden">How each component of each rank was restored</caption>
      <thead><tr><th scope="col"><span class="hidden">Component</span></th>${many && html`<th scope="col">all ${count(ranks.length)} ranks</th>`}${columns.map((rank) => html`<th scope="col">r${rank}</th>`)}</tr></thead>
      <tbody>${names.map((name) => html`<tr><th scope="row">${name}</th>${many && html`<td class="nowrap small"><${Summary} of=${all.filter((one) => one.component === name)} /></td>`}
        ${columns.map((rank) => {
          const one = cell.get(`${name} ${rank}`);
          return html`<td>${one ? html`<${Sign} status=${one.status} reason=${one.reason} />` : ""}</td>`;
        })}</tr>`)}</tbody></table></div>
      <p class="row small dim" style=${{ gap: ".3rem .9rem" }}>${seen.map((status) => html`<span class="row" style=${{ gap: ".35rem" }}><${Sign} status=${status} />${SIGNS[status]?.[1] ?? status}</span>`)}
        ${many && html`<span>${deviating.size ? `${plural(deviating.size, "rank")} deviate and come first; ` : ""}${plural(ranks.length - columns.length, "rank")} not drawn</span>`}</p>`}
    ${reasons.length > 0 && html`<ul class="plain-list small">${reasons.slice(0, NOTES).map((one) => html`<li><strong>${one.component}</strong> of ${one.ranks}: ${one.reason}</li>`)}
      ${reasons.length > NOTES && html`<li class="dim">and ${plural(reasons.length - NOTES, "more reason")}</li>`}</ul>`}
    ${report.differences.length > 0 && html`<div class="scroll inset" tabindex="0" role="region" aria-label="Differences of the environment"><table class="tight small"><caption class="hidden">Differences of the environment</caption>
      <thead><tr><th scope="col">Differs</th><th scope="col">in the checkpoint</th><th scope="col">now</th></tr></thead>
      <tbody>${report.differences.map((one) => html`<tr><th scope="row">${one.key}</th><td><code>${String(one.recorded)}</code></td><td><code>${String(one.current)}</code></td></tr>`)}</tbody></table></div>`}
    ${report.quarantined.length > 0 && html`<p class="notice bad"><strong>Quarantined:</strong> ${report.quarantined.join(", ")}. The attempt began from an older checkpoint.</p>`}
    ${report.notes.length > 0 && html`<ul class="plain-list small dim">${report.notes.slice(0, NOTES).map((/** @type {string} */ note) => html`<li>${note}</li>`)}
      ${report.notes.length > NOTES && html`<li>and ${plural(report.notes.length - NOTES, "more note")}</li>`}</ul>`}
    </div></${Card}>`;
}

/** @param {{of: Api.Component[]}} props */
function Summary({ of }) {
  /** @type {Map<string, number>} */
  const found = new Map();
  for (const one of of) found.set(one.status, (found.get(one.status) ?? 0) + 1);
  return html`${[...found].map(([status, number], n) => html`${n ? ", " : ""}<span class=${classes("word", statusTone(status))}>${count(number)} ${status}</span>`)}`;
}

/** The reasons, with the ranks that share one. @param {Api.Component[]} all @returns {{component: string, reason: string, ranks: string}[]} */
function reasonsOf(all) {
  /** @type {Map<string, {component: string, reason: string, of: number[]}>} */
  const found = new Map();
  for (const one of all) {
    if (!one.reason) continue;
    const key = `${one.component}\n${one.reason}`;
    const same = found.get(key) ?? { component: one.component, reason: one.reason, of: /** @type {number[]} */ ([]) };
    same.of.push(one.rank);
    found.set(key, same);
  }
  return [...found.values()].map(({ component, reason, of }) => ({ component, reason, ranks: of.length === 1 ? `rank ${of[0]}` : of.length <= 4 ? `ranks ${of.join(", ")}` : `${of.length} ranks` }));
}
