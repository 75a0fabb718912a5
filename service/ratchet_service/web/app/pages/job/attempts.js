// @ts-check
/** Every launch of the job on a time axis, page by page, and the selected one below. */
import { Attempt } from "../../components/attempt.js";
import { Card, Command, Empty, Trouble } from "../../components/basics.js";
import { Timeline } from "../../components/timeline.js";
import { html } from "../../dom.js";
import { count } from "../../format.js";
import { useLive } from "../../live.js";
import { ENDED } from "../../meaning.js";
import { link } from "../../route.js";

const PAGE = 30;

/** @param {{job: Api.Job, attempts: Api.Attempt[], route: import("../../route.js").Route}} props */
export default function Attempts({ job, attempts, route }) {
  const cursor = route.query.get("cursor");
  const asked = `exclude=components&exclude=nodes&limit=${PAGE}${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""}`;
  const idle = ENDED.includes(job.phase) || cursor !== null;
  const { data, error } = useLive(`v1/jobs/${encodeURIComponent(job.id)}/attempts?${asked}`, { every: idle ? 15_000 : 2000 });
  const shown = data?.items ?? (cursor ? [] : attempts.slice(0, PAGE));
  const wanted = Number(route.query.get("attempt"));
  const number = wanted > 0 ? wanted : (shown[0]?.number ?? job.attempt);
  if (!job.attempt) {
    return html`<${Card} title="Attempts"><${Empty}>${ENDED.includes(job.phase)
      ? html`<p>The job ended before its first attempt.</p><${Command} line=${`ratchet resume ${job.id}`} />`
      : html`<p>No attempt yet. The first one is made when the scheduler finds room for it.</p><${Command} line=${`ratchet queue ${job.id}`} />`}</${Empty}></${Card}>`;
  }
  const pages = (cursor || data?.next_cursor) && html`<span class="row small">
    ${cursor && html`<a class="button" href=${link(["jobs", job.id, "attempts"])}>Newest</a>`}
    ${data?.next_cursor && html`<a class="button" href=${link(["jobs", job.id, "attempts"], { cursor: data.next_cursor })}>Earlier attempts</a>`}
    <span class="dim">${count(shown.length)} of ${count(job.attempt)} shown</span></span>`;
  return html`<div class="stack">
    <${Trouble} error=${error} />
    <${Timeline} job=${job} attempts=${shown} limit=${PAGE} selected=${number} query=${{ cursor }} footer=${pages || html`<span></span>`} />
    <${Attempt} key=${number} job=${job} number=${number} listed=${shown.find((one) => one.number === number) ?? attempts.find((one) => one.number === number)} />
  </div>`;
}
