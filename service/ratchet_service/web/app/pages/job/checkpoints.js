// @ts-check
/** Checkpoints: their lineage over steps, what each save cost, and the selected one with its actions. */
import { Card, Choice, Command, Empty, Trouble } from "../../components/basics.js";
import { Checkpoint } from "../../components/checkpoint.js";
import { Lineage, signsOf } from "../../components/lineage.js";
import { classes, html } from "../../dom.js";
import { ago, count, duration, number, plural, size } from "../../format.js";
import { useLive, useNow } from "../../live.js";
import { ENDED } from "../../meaning.js";
import { go, link, setQuery } from "../../route.js";

const PAGE = 50;

/** @param {{job: Api.Job, attempts: Api.Attempt[], route: import("../../route.js").Route, refresh: () => void, caller: Api.Caller | null}} props */
export default function Checkpoints({ job, attempts, route, refresh: refreshJob, caller }) {
  const { query } = route;
  const [cursor, selected, all] = [query.get("cursor"), query.get("checkpoint"), query.get("state") === "all"];
  const asked = new URLSearchParams([["limit", String(PAGE)], ...(all ? ["committed", "quarantined", "deleted"].map((state) => ["state", state]) : []), ...(cursor ? [["cursor", cursor]] : [])]);
  const path = /** @type {const} */ (`v1/jobs/${encodeURIComponent(job.id)}`);
  const { data, error, refresh } = useLive(`${path}/checkpoints?${asked}`, { every: ENDED.includes(job.phase) || cursor ? 15_000 : 3000 });
  const events = useLive(`${path}/events?type=forked&limit=100`, { every: 15_000 });
  const items = data?.items ?? [];
  const keep = job.spec.checkpoint?.keep_best;
  const best = bestOf(items, keep?.mode ?? "min", !cursor && !data?.next_cursor);
  const forks = (events.data?.items ?? []).map((one) => ({ fork: String(one.data.fork ?? ""), checkpoint: /forked from (\S+)/.exec(one.message)?.[1] ?? "" })).filter((one) => one.fork);
  const hrefOf = (/** @type {string} */ id) => link(["jobs", job.id, "checkpoints"], { checkpoint: id, state: all ? "all" : null, cursor });
  const listed = items.find((one) => one.id === selected);
  if (!data) return html`<${Trouble} error=${error} />`;
  const filter = html`<${Choice} label="Which checkpoints" value=${all ? "all" : "stored"} options=${[["stored", "Stored"], ["all", "Deleted ones too"]]}
    onChange=${(/** @type {string} */ key) => setQuery({ state: key === "all" ? "all" : null, cursor: null })} />`;
  if (!items.length) {
    return html`<${Card} title="Checkpoints" aside=${filter}><${Empty}><p>${job.attempt ? "No checkpoint is stored." : "No checkpoint: no attempt of the job has started."} A running job writes them as the part checkpoint of its spec says, or on request:</p>
      <${Command} line=${`ratchet checkpoint ${job.id}`} /></${Empty}></${Card}>`;
  }
  return html`<div class="stack">
    <${Trouble} error=${error} />
    <${Card} title="Lineage" aside=${filter}>
      <${Lineage} job=${job} items=${items} attempts=${attempts} forks=${forks} selected=${selected} best=${best} hrefOf=${hrefOf} /></${Card}>
    ${selected && html`<${Checkpoint} key=${selected} job=${job} id=${selected} listed=${listed} best=${best} caller=${caller} refresh=${() => { refresh(); refreshJob(); }} />`}
    <${List} job=${job} items=${items} selected=${selected} best=${best} metric=${keep?.metric ?? null} hrefOf=${hrefOf} />
    ${(cursor || data.next_cursor) && html`<div class="row end small"><span class="dim">${plural(items.length, "checkpoint")} on this page</span>
      ${cursor && html`<a class="button" href=${link(["jobs", job.id, "checkpoints"], { state: all ? "all" : null })}>Newest</a>`}
      ${data.next_cursor && html`<a class="button" href=${link(["jobs", job.id, "checkpoints"], { state: all ? "all" : null, cursor: data.next_cursor })}>Earlier steps</a>`}</div>`}
  </div>`;
}

/**
 * The best of these by the metric of keep_best.
 * @param {Api.Checkpoint[]} items @param {"min" | "max"} mode @param {boolean} whole - they are all that are stored
 * @returns {import("../../components/lineage.js").Best | null}
 */
export function bestOf(items, mode, whole) {
  const found = items.filter((one) => one.state === "committed" && typeof one.metric === "number");
  if (!found.length) return null;
  const value = (/** @type {Api.Checkpoint} */ one) => /** @type {number} */ (one.metric);
  return { id: found.reduce((a, b) => ((mode === "max" ? value(b) > value(a) : value(b) < value(a)) ? b : a)).id, whole };
}

/** @param {{job: Api.Job, items: Api.Checkpoint[], selected: string | null, best: import("../../components/lineage.js").Best | null, metric: string | null, hrefOf: (id: string) => string}} props */
function List({ job, items, selected, best, metric, hrefOf }) {
  const now = useNow();
  return html`<section class="card flush"><div class="scroll" tabindex="0" role="region" aria-label="Checkpoints"><table class="tight stored">
    <caption class="hidden">Checkpoints, newest step first</caption>
    <thead><tr><th scope="col" class="number">Step</th><th scope="col">Id</th><th scope="col">Saved for</th><th scope="col" class="number">Attempt</th><th scope="col" class="number">Size</th><th scope="col" class="number">Pause</th>
      <th scope="col" class="number">Save time</th>${metric && html`<th scope="col" class="number">${metric}</th>`}<th scope="col">Age</th><th scope="col">Lineage</th><th scope="col">State</th></tr></thead>
    <tbody>${items.map((one) => html`<tr key=${one.id} class=${classes("choose", one.id === selected && "selected")} onClick=${(/** @type {any} */ event) => event.target.closest("a") || go(hrefOf(one.id))}>
      <th scope="row" class="number"><a href=${hrefOf(one.id)} aria-current=${one.id === selected ? "true" : undefined}>${count(one.step)}</a></th>
      <td class="nowrap"><code class="dim">${one.id}</code></td><td>${one.reason}</td>
      <td class="number"><a href=${link(["jobs", job.id, "attempts"], { attempt: one.attempt })}>${one.attempt}</a></td>
      <td class="number nowrap">${size(one.size)}</td><td class="number nowrap">${duration(one.stall)}</td><td class="number nowrap">${duration(one.seconds)}</td>
      ${metric && html`<td class="number">${number(one.metric)}</td>`}
      <td class="nowrap dim" title=${one.created_at}>${ago(one.created_at, now)}</td>
      <td><span class=${classes("word", one.lineage === "current" ? "busy" : "quiet")}>${one.lineage}</span></td>
      <td class="nowrap small">${signsOf(one, best).map((sign) => html`<span class=${sign.tone} style=${{ marginRight: ".6rem" }}><span class="word">${sign.mark} ${sign.word}</span></span>`)}${one.state === "committed" && !signsOf(one, best).length ? html`<span class="dim">committed</span>` : ""}</td></tr>`)}</tbody></table></div></section>`;
}
