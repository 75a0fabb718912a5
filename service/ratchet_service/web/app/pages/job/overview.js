// @ts-check
/** What one wants to know first: why it failed, why it waits, or how it goes; then the curve, the attempts, and what they cost. */
import { Chart } from "../../components/chart.js";
import { Badge, Card, Command, Empty, Warnings } from "../../components/basics.js";
import { ResumeMatrix } from "../../components/resume.js";
import { SpentBar } from "../../components/spent.js";
import { Timeline } from "../../components/timeline.js";
import { classes, html, useEffect, useState } from "../../dom.js";
import { ago, count, duration, moment, percent, plural, stepOf } from "../../format.js";
import { useLive, useNow } from "../../live.js";
import { lastVersion, spans } from "../../logs/ansi.js";
import { ACTIVE, causeText, causeTone, isUnmanaged, proofTone, reasonText, verdict, verdictText, verdictTone } from "../../meaning.js";
import { elsewhere, link } from "../../route.js";
import { attemptMarks, curveOf, extentOf, leftOut, prefersLog, smoothingWidths } from "../../series.js";

const EVENTS = 8;
/** Points from which on the curve is smoothed. */
const SMOOTHED = 100;

/** @param {{job: Api.Job, attempts: Api.Attempt[], refresh: () => void}} props */
export default function Overview({ job, attempts }) {
  const newest = attempts.find((one) => one.number === job.attempt);
  return html`<div class="stack">
    ${job.phase === "FAILED" && html`<${Failed} job=${job} attempt=${newest} />`}
    ${["QUEUED", "SUSPENDED"].includes(job.phase) && html`<${Waiting} job=${job} />`}
    <div class="main-side">
      <div class="stack"><${Curve} job=${job} attempts=${attempts} /><${Timeline} job=${job} attempts=${attempts} /><${Recent} job=${job} />
        <${Warnings} job=${job} /></div>
      <div class="stack"><${Proof} job=${job} attempts=${attempts} /><${Cost} job=${job} attempts=${attempts} /><${Trackers} job=${job} />
        ${newest?.resume_report && html`<${Resume} key=${newest.number} job=${job} attempt=${newest} />`}</div>
    </div></div>`;
}

/** The cause in words, the guilty rank's last lines, and what to do. @param {{job: Api.Job, attempt: Api.Attempt | undefined}} props */
function Failed({ job, attempt }) {
  const rank = attempt?.rank ?? 0;
  const { data } = useLive(attempt ? `v1/jobs/${job.id}/logs?attempt=${attempt.number}&rank=${rank}&tail=30` : null, { every: null });
  return html`<${Card} tone="bad" title=${`Failed: ${failure(job, attempt)}`} aside=${attempt && html`<${Badge} tone="bad">${job.reason}</${Badge}> attempt ${attempt.number}${attempt.rank !== null ? `, rank ${attempt.rank}` : ""}, after step ${count(attempt.last_step)}`}>
    <div class="stack" style=${{ gap: ".7rem" }}>
      <p class="said" tabindex="0">${job.message ?? attempt?.message}</p>
      ${attempt?.message && !job.message?.includes(attempt.message) && html`<pre class="said" tabindex="0">${attempt.message}</pre>`}
      ${attempt && data && data.items.length > 0 && html`<div><p class="dim small">Last lines of rank ${rank} · <a href=${link(["jobs", job.id, "logs"], { attempt: attempt.number, rank })}>all of them</a></p>
        <div class="log quote" ref=${(/** @type {HTMLElement | null} */ box) => box?.scrollTo(0, box.scrollHeight)} tabindex="0" role="region" aria-label=${`Last lines of rank ${rank}`}>${data.items.map((line) => html`<div><span class="text">${spans(lastVersion(line.text).text).map((span) => (span.tone ? html`<span class=${span.tone}>${span.text}</span>` : span.text))}</span></div>`)}</div></div>`}
      <div class="stack" style=${{ gap: ".4rem" }}><p class="dim small">After the cause is mended, continue from ${job.last_checkpoint ? stepOf(job.last_checkpoint) : "the beginning"}:</p>
        <${Command} line=${`ratchet resume ${job.id}`} /><${Command} line=${`ratchet resume ${job.id} --code .`} /></div>
    </div></${Card}>`;
}

/** In words; a reason such as no-progress may follow an end that was no failure. @param {Api.Job} job @param {Api.Attempt | undefined} attempt */
function failure(job, attempt) {
  if (!attempt?.cause || attempt.cause === job.reason) return reasonText(job.reason);
  return causeTone(attempt.cause) === "bad" ? `${causeText(attempt.cause).replace(/\.$/, "")} (${reasonText(job.reason)})` : reasonText(job.reason);
}

/** Why it waits, its place, what is ahead. @param {{job: Api.Job}} props */
function Waiting({ job }) {
  const now = useNow();
  const held = job.phase === "SUSPENDED";
  const place = job.position ? `It is number ${count(job.position)} in the queue.` : job.ahead_at_least ? `At least ${count(job.ahead_at_least)} jobs are ahead of it.` : "";
  return html`<${Card} tone=${held ? "held" : "wait"} title=${held ? "Suspended" : "Waiting"} aside=${job.reason}>
    <p class="sentence said" tabindex="0">${job.message?.replace(/[^.!?]$/, "$&.") ?? (held ? "It holds no resources until it is resumed." : "The scheduler has not looked at it yet.")} ${place}
      ${job.not_before && Date.parse(job.not_before) > now ? `The next attempt starts in ${duration((Date.parse(job.not_before) - now) / 1000)}.` : ""}
      ${!held && html` <a href=${elsewhere(["queue"])}>The queue</a>`}</p>
    <p class="dim">${isUnmanaged(job) ? "" : job.progress.steps_at_risk > 0 ? `${plural(job.progress.steps_at_risk, "step")} will be done again. ` : job.attempt ? "No step is lost. " : ""}${job.last_checkpoint ? `It will continue from ${stepOf(job.last_checkpoint)}.` : "It has no checkpoint yet."}</p></${Card}>`;
}

/** @param {{job: Api.Job, attempts: Api.Attempt[]}} props */
function Curve({ job, attempts }) {
  const every = ACTIVE.includes(job.phase) ? 3000 : 15_000;
  const [name, setName] = useState(/** @type {string | null} */ (null));
  const index = useLive(`v1/jobs/${job.id}/metrics?max_points=2`, { every: name === null ? every : 30_000 });
  const all = index.data?.series ?? [];
  const wanted = (all.find((one) => one.name === "loss") ?? all[0])?.name ?? null;
  useEffect(() => setName(wanted), [wanted]);
  const { data } = useLive(wanted === null ? null : `v1/jobs/${job.id}/metrics?max_points=600&name=${encodeURIComponent(wanted)}`, { every });
  const first = data?.series[0];
  if (!index.data || (wanted !== null && !data)) return html`<${Card} title="Metrics"><div style=${{ height: "240px" }}></div></${Card}>`;
  if (!first) return html`<${Card} title="Metrics"><${Empty}><p>No metric yet. A script sends one with</p><${Command} line=${'session.log({"loss": loss})'} /></${Empty}></${Card}>`;
  const widths = smoothingWidths(extentOf([first], "step", 0));
  const width = first.points.length > SMOOTHED ? widths[Math.max(0, widths.length - 4)] : 0;
  const curves = curveOf(first, width);
  return html`<${Card} title=${first.name} aside=${html`<a href=${link(["jobs", job.id, "metrics"])}>${plural(all.length, "metric")}</a>`}>
    <${Chart} title=${`${first.name} over steps`} curves=${curves} marks=${attemptMarks(attempts)} log=${prefersLog(first.name, first.points)} height=${300}
      note=${[width > 0 && `Smoothed over ${plural(width, "step")}, in front of the raw values.`, attempts.some((one) => one.cause && one.cause !== "completed") && "Lines: ends of attempts, coloured by cause. Shaded: steps that were lost and done again.", attempts.length < job.attempt && `Marked are the newest ${count(attempts.length)} attempts.`, leftOut(first)].filter(Boolean).join(" ")} /></${Card}>`;
}

/** Were the resumes exact? @param {{job: Api.Job, attempts: Api.Attempt[]}} props */
function Proof({ job, attempts }) {
  const resumed = attempts.filter((one) => one.base?.step);
  const equal = attempts.reduce((sum, one) => sum + one.redone.equal, 0);
  const compared = attempts.reduce((sum, one) => sum + one.redone.compared, 0);
  const bad = attempts.filter((one) => ["not-exact", "differs"].includes(verdict(one)));
  const unknown = resumed.some((one) => verdict(one) === "unknown"); // its report has not come, or was lost
  const later = attempts.some((one) => proofTone(one.proof ?? "") === "wait"); // exact copies of a state that was not
  const tone = bad.length ? "bad" : later ? "wait" : compared || (resumed.length && !unknown) ? "good" : "quiet";
  const part = attempts.length < job.attempt ? `of the newest ${count(attempts.length)} attempts` : "";
  return html`<${Card} tone=${tone} title="Were the resumes exact?" aside=${part}>
    ${bad.length
      ? html`<p><strong class="word bad">No: ${plural(bad.length, "attempt")}.</strong></p>${bad.map((one) => html`<p class="small">Attempt ${one.number}: ${one.proof}</p>`)}`
      : compared
        ? html`<p class="huge">${count(equal)} of ${count(compared)}</p><p class="dim small">steps that were done again gave the same bits on every rank</p>`
        : html`<p>${unknown ? "What the resumes restored is not known yet." : resumed.length ? "Every component was restored exactly. No step was compared." : "It was not resumed yet."}</p>`}
    <div class="stack small" style=${{ marginTop: ".6rem", gap: ".2rem" }}>${resumed.slice(0, 6).map((one) => {
      const later = proofTone(one.proof ?? "") === "wait";
      return html`<div class="row spread" title=${one.proof}><a href=${link(["jobs", job.id, "attempts"], { attempt: one.number })}>attempt ${one.number}</a>
        <span class=${classes("word", later ? "wait" : verdictTone(verdict(one)), verdict(one))}>${verdictText(verdict(one))}${later && `; ${one.proof?.slice(one.proof.indexOf("not exact since"))}`}</span></div>`;
    })}</div>
    <div style=${{ marginTop: ".7rem" }}><${Command} line=${`ratchet prove ${job.id}`} /></div></${Card}>`;
}

/** What the ends of attempts cost. @param {{job: Api.Job, attempts: Api.Attempt[]}} props */
function Cost({ job, attempts }) {
  const spent = job.goodput;
  if (!spent || spent.wall_seconds === 0) return null;
  const lost = attempts.reduce((sum, one) => sum + (one.steps_lost ?? 0), 0);
  return html`<${Card} title="Where its time went" aside=${`goodput ${percent(spent.goodput)}`}>
    ${lost > 0 && attempts.length >= job.attempt && html`<p style=${{ marginBottom: ".5rem" }}><strong>${plural(lost, "step")} lost</strong>, ${duration(spent.lost_seconds)}</p>`}
    <${SpentBar} spent=${spent} label="The job" /></${Card}>`;
}

/** The newest run in each experiment tracker, and others that fail. @param {{job: Api.Job}} props */
function Trackers({ job }) {
  const { data } = useLive(`v1/jobs/${job.id}/trackers`, { every: 10_000 });
  const all = data?.items ?? [];
  const shown = all.filter((one, n) => one.failing_since || one.tracker !== all[n + 1]?.tracker);
  const left = all.length - shown.length;
  return shown.length > 0 && html`<${Card} tone=${shown.some((one) => one.failing_since) && "bad"} title="Trackers">
    <ul class="plain-list small" style=${{ gap: ".7rem" }}>${shown.map((one) => html`<li key=${`${one.tracker} ${one.run}`}>
      <div class="row spread"><strong>${one.tracker}</strong><span>${one.step === null ? "nothing sent yet" : `step ${count(one.step)}`}${one.done && ", all sent"}</span></div>
      ${(/^https?:/i).test(one.place ?? "") ? html`<a href=${one.place}>${one.run}</a>` : (one.place ?? one.run)}
      ${one.failing_since && html`<p class="notice bad said" tabindex="0">Fails since ${moment(one.failing_since)}, values are kept: ${one.error}</p>`}</li>`)}</ul>
    ${left > 0 && html`<p class="small" style=${{ marginTop: ".7rem" }}>${plural(left, "earlier run")}:</p><${Command} line=${`ratchet trackers ${job.id}`} />`}</${Card}>`;
}

/** How the newest attempt was restored. The components are read once: they do not change. @param {{job: Api.Job, attempt: Api.Attempt}} props */
function Resume({ job, attempt }) {
  const { data } = useLive(`v1/jobs/${job.id}/attempts/${attempt.number}`, { every: null });
  const components = data?.resume_report?.components ?? [];
  return components.length > 0 && html`<${ResumeMatrix} attempt=${{ ...attempt, resume_report: { ...attempt.resume_report, components } }} />`;
}

/** The newest events. @param {{job: Api.Job}} props */
function Recent({ job }) {
  const now = useNow();
  const { data } = useLive(`v1/jobs/${job.id}/events?sort=-id&limit=${EVENTS}`, { every: 5000 });
  return html`<${Card} title="Latest events" aside=${html`<a href=${link(["jobs", job.id, "events"])}>all events</a>`}>
    <div class="latest">${data?.items.map((one) => html`<span class="dim" title=${moment(one.at)}>${ago(one.at, now)}</span><strong>${one.type}</strong><span>${one.message}</span>`)}</div></${Card}>`;
}
