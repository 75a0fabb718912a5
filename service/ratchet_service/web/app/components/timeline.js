// @ts-check
/** Attempts over time. */
import { serverNow } from "../api.js";
import { classes, html } from "../dom.js";
import { count, duration, moment } from "../format.js";
import { causeText, causeTone, verdict, verdictText, verdictTone } from "../meaning.js";
import { go, link } from "../route.js";
import { pieces, place, ticks } from "../timescale.js";
import { Badge, Card } from "./basics.js";
import { PartsLegend, partsOf } from "./spent.js";

/**
 * One bar per attempt on a common time axis, in the order in which its parts came. Its cap has the colour of its cause. Long pauses
 * between attempts are folded. ``selected``: the number of the attempt that is shown below; ``query``: kept in its address.
 * @param {{job: Api.Job, attempts: Api.Attempt[], selected?: number | null, limit?: number, query?: Record<string, any>, footer?: any}} props
 */
export function Timeline({ job, attempts, selected = null, limit = 12, query = {}, footer }) {
  const shown = [...attempts].sort((a, b) => a.number - b.number).slice(-limit);
  if (!shown.length) return null;
  const spans = shown.map((one) => /** @type {[number, number]} */ ([Date.parse(one.created_at), endOf(one)]));
  const axis = pieces(spans);
  const marks = ticks(axis, 7);
  const folds = axis.filter((piece) => piece.folded);
  const whole = (Math.max(...spans.map(([, to]) => to)) - spans[0][0]) / 1000;
  const range = shown.length < job.attempt ? `attempts ${shown[0].number} to ${shown[shown.length - 1].number} of ${count(job.attempt)} · ` : "";
  return html`<${Card} title="Attempts" aside=${`${range}${duration(whole)} from ${moment(shown[0].created_at)}`} flush>
    <div class="scroll" tabindex="0" role="region" aria-label="Attempts over time"><table class="tight timeline">
      <caption class="hidden">Attempts over time: what each spent its time on, why it ended, whether its resume was exact</caption>
      <thead><tr><th scope="col"><span class="hidden">Attempt</span></th>
        <th scope="col" class="lane-head"><span class="hidden">Time</span><span class="lane" aria-hidden="true">${marks.map((mark) => html`<span class="tick" style=${{ left: `${100 * mark.at}%` }}>${mark.after ? duration(mark.after) : "0"}</span>`)}
          ${folds.filter((fold) => !marks.some((mark) => Math.abs(mark.at - fold.at - fold.wide / 2) < 0.07)).map((fold) => html`<span class="tick" style=${{ left: `${100 * (fold.at + fold.wide / 2)}%` }}>⋯</span>`)}</span></th>
        <th scope="col">Ended by</th><th scope="col">Resume</th><th scope="col" class="number">Steps</th><th scope="col" class="number">Lost</th><th scope="col" class="number">Redone, equal</th></tr></thead>
      <tbody>${shown.map((one) => html`<tr key=${one.number} class=${one.number === selected ? "selected" : ""} onClick=${(/** @type {any} */ event) => event.target.closest("a") || go(link(["jobs", job.id, "attempts"], { ...query, attempt: one.number }))}>
        <th scope="row"><a href=${link(["jobs", job.id, "attempts"], { ...query, attempt: one.number })} aria-current=${one.number === selected ? "true" : undefined} aria-label=${`Attempt ${one.number}`}>${one.number}</a></th>
        <td class="lane-cell"><${Lane} attempt=${one} axis=${axis} marks=${marks} folds=${folds} /></td>
        <td>${one.cause ? html`<${Badge} tone=${causeTone(one.cause)} title=${causeText(one.cause)}>${one.cause}</${Badge}>` : html`<span class="dim nowrap">not ended</span>`}</td>
        <td class="nowrap">${one.ended_at && !one.base ? html`<span class="dim">did not begin</span>` : html`<span class=${classes("word", verdictTone(verdict(one)), verdict(one))}>${verdictText(verdict(one))}</span>`}</td>
        <td class="number nowrap">${one.base ? html`<span class="dim">${count(one.base.step)} → </span>${count(one.last_step)}` : html`<span class="dim">–</span>`}</td>
        <td class="number">${one.steps_lost ? html`<span class="word bad">${count(one.steps_lost)}</span>` : html`<span class="dim">${one.steps_lost ?? "–"}</span>`}</td>
        <td class="number nowrap">${one.redone.compared ? `${count(one.redone.equal)} of ${count(one.redone.compared)}` : html`<span class="dim">–</span>`}</td></tr>`)}</tbody></table></div>
    <div class="row spread timeline-foot"><${PartsLegend} />${footer}${!footer && shown.length < job.attempt && html`<a class="small" href=${link(["jobs", job.id, "attempts"])}>all attempts</a>`}</div></${Card}>`;
}

/** When it ended, or how far it is. @param {Api.Attempt} attempt */
const endOf = (attempt) => {
  if (attempt.ended_at) return Date.parse(attempt.ended_at);
  const begin = Date.parse(attempt.created_at);
  return attempt.goodput ? begin + 1000 * attempt.goodput.wall_seconds : Math.max(begin, serverNow());
};

/** @param {{attempt: Api.Attempt, axis: any[], marks: {at: number}[], folds: any[]}} props */
function Lane({ attempt, axis, marks, folds }) {
  const begin = place(axis, Date.parse(attempt.created_at));
  const end = place(axis, endOf(attempt));
  const parts = partsOf(attempt.goodput ?? {});
  const seconds = parts.reduce((sum, part) => sum + part.seconds, 0) || 1;
  const text = parts.map((part) => `${part.word} ${duration(part.seconds)}`).join(", ");
  return html`<div class="lane" role="img" aria-label=${`From ${moment(attempt.created_at)}: ${text || "nothing yet"}`}>
    ${marks.map((mark) => html`<span class="grid" style=${{ left: `${100 * mark.at}%` }}></span>`)}
    ${folds.map((fold) => html`<span class="fold" style=${{ left: `${100 * fold.at}%`, width: `${100 * fold.wide}%` }} title=${`A pause of ${duration((fold.to - fold.from) / 1000)}, not to scale`}></span>`)}
    <span class="parts-bar" style=${{ left: `${100 * begin}%`, width: `max(3px, ${100 * (end - begin)}%)` }}>
      ${parts.map((part) => html`<span class=${`part ${part.word}`} style=${{ width: `${(100 * part.seconds) / seconds}%` }} title=${`${part.word}: ${duration(part.seconds)}`}></span>`)}</span>
    ${attempt.cause && html`<span class=${classes("cap", causeTone(attempt.cause))} style=${{ left: `${100 * end}%` }} title=${causeText(attempt.cause)}></span>`}</div>`;
}
