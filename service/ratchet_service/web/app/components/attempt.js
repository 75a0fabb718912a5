// @ts-check
/** One attempt: how it ended and what to do, where its time went, its nodes, its resume and proof, its software. */
import { adviceFor } from "../advice.js";
import { Badge, Bar, Card, Command, Empty, Facts, Table, Trouble } from "./basics.js";
import { classes, html, useState } from "../dom.js";
import { between, count, duration, moment, percent, plural } from "../format.js";
import { useLive } from "../live.js";
import { causeText, causeTone, verdict, verdictText, verdictTone } from "../meaning.js";
import { elsewhere, link } from "../route.js";
import { ResumeMatrix } from "./resume.js";
import { SpentBar, partsOf } from "./spent.js";

const NODES = 64;
/** A resume report of more ranks stands in the wide column. */
const BESIDE = 4;
const PACKAGES = 400;

/** A checkpoint's id, from its step and attempt. @param {{step: number, attempt: number | null}} base */
export const checkpointId = ({ step, attempt }) => `step-${String(step).padStart(12, "0")}.a${String(attempt).padStart(4, "0")}`;

/** @param {{job: Api.Job, number: number, listed: Api.Attempt | undefined}} props - listed: what the list has of it, without nodes and components; shown until it is read */
export function Attempt({ job, number, listed }) {
  const { data, error } = useLive(`v1/jobs/${encodeURIComponent(job.id)}/attempts/${number}`, { every: listed?.ended_at ? 15_000 : 2000 });
  const attempt = data ?? listed;
  if (!attempt) return html`<${Trouble} error=${error} />`;
  const report = data?.resume_report;
  const hasReport = report && (report.components.length > 0 || report.notes.length > 0 || report.differences.length > 0);
  const broad = hasReport && new Set(report.components.map((one) => one.rank)).size > BESIDE;
  const matrix = hasReport && html`<${ResumeMatrix} attempt=${data} />`;
  return html`<${Trouble} error=${error} /><div class="main-side">
    <div class="stack"><${End} job=${job} attempt=${attempt} />
      <${Card} title="Where its time went" aside=${attempt.goodput && `goodput ${percent(attempt.goodput.goodput)} of ${duration(attempt.goodput.wall_seconds)}`}>
        ${attempt.goodput && partsOf(attempt.goodput).length ? html`<${SpentBar} spent=${attempt.goodput} label=${`Attempt ${number}`} />` : html`<${Empty}><p>No time has passed yet.</p></${Empty}>`}</${Card}>
      ${attempt.stragglers.length > 0 && html`<${Slow} job=${job} attempt=${attempt} />`}
      ${broad && matrix}${data && html`<${Nodes} nodes=${data.nodes} /><${Software} number=${number} environment=${data.environment} />`}</div>
    <div class="stack"><${Proof} job=${job} attempt=${attempt} />
      ${!broad && matrix}
      <${Notice} attempt=${attempt} /></div></div>`;
}

/** @param {{job: Api.Job, attempt: Api.Attempt}} props */
function End({ job, attempt }) {
  const advice = adviceFor(attempt.cause);
  const tone = causeTone(attempt.cause);
  const to = (/** @type {string} */ tab, /** @type {Record<string, any>} */ query) => link(["jobs", job.id, tab], query);
  const guilty = tone === "bad" || attempt.cause === "sigterm";
  const base = attempt.base && checkpointId(attempt.base);
  const [root, parent] = job.forked_from?.split("/") ?? [];
  return html`<${Card} tone=${tone} title=${`Attempt ${attempt.number}: ${causeText(attempt.cause)}`} aside=${html`<${Badge} tone=${tone}>${attempt.cause ?? attempt.phase.toLowerCase()}</${Badge}>`}>
    <div class="stack" style=${{ gap: ".85rem" }}>
      ${attempt.message && html`<pre class="quote" tabindex="0">${attempt.message}</pre>`}
      ${advice && html`<p>${advice.text} ${attempt.cause !== "completed" && html`<span class="dim small">docs/troubleshooting.md, under <code>${attempt.cause}</code>, has more.</span>`}</p>
        ${advice.lines?.(job.id, attempt.number).map((line) => html`<${Command} key=${line} line=${line} />`)}`}
      <${Facts} items=${[
        ["Outcome", attempt.outcome ?? attempt.phase.toLowerCase()],
        ...(guilty && attempt.rank !== null ? [["Guilty rank", html`<a href=${to("logs", { attempt: attempt.number, rank: attempt.rank })}>rank ${attempt.rank}</a>`, "The rank that caused the end."]] : []),
        ...(attempt.exit_code !== null ? [["Exit code", attempt.exit_code]] : []),
        ["Began from", attempt.base ? (attempt.base.step ? html`<a href=${parent === base ? elsewhere(["jobs", root, "checkpoints"], { checkpoint: base }) : to("checkpoints", { checkpoint: base })}>step ${count(attempt.base.step)}</a>` : "step 0") : "–"],
        ["Last step", count(attempt.last_step)], ["Steps done", count(attempt.steps_done)],
        ["Steps lost", attempt.steps_lost === null ? "–" : html`<span class=${attempt.steps_lost ? "word bad" : ""}>${count(attempt.steps_lost)}</span>`, "Executed, but in no checkpoint that a later attempt can start from."],
        ["Last commit", attempt.committed_step === null ? "none" : `step ${count(attempt.committed_step)}`],
        ...(attempt.excluded_nodes.length ? [["Stays away from", html`<a href=${to("events", { type: "node-excluded" })}>${attempt.excluded_nodes.join(", ")}</a>`, "Nodes that caused earlier ends: policy.exclude_nodes."]] : []),
        ["Created", moment(attempt.created_at)], ...(attempt.ended_at ? [["Took", duration(between(attempt.created_at, attempt.ended_at))]] : []),
      ]} />
      <p class="row small"><a href=${to("logs", { attempt: attempt.number })}>Its logs</a><a href=${to("events", { attempt: attempt.number })}>Its events</a>
        ${attempt.committed_step !== null && html`<a href=${to("checkpoints", { checkpoint: checkpointId({ step: attempt.committed_step, attempt: attempt.number }) })}>Its last checkpoint</a>`}</p>
    </div></${Card}>`;
}

/** The notice that it was given, and what it needed of it. @param {{attempt: Api.Attempt}} props */
function Notice({ attempt }) {
  const { notice_seconds: given, notice_used: used } = attempt;
  if (!attempt.stop_at || given === null) return null;
  const share = used === null ? null : used / given;
  return html`<${Card} title="Notice" aside=${`${duration(given)} given`}>
    <div class="stack" style=${{ gap: ".5rem" }}>
      <${Bar} share=${share ?? 0} label="Share of the notice that was used" tone=${share !== null && share > 0.8 ? "bad" : share !== null && share > 0.5 ? "wait" : "good"} />
      <p class="small">${used === null ? "No checkpoint was committed after the stop request." : html`<strong>${duration(used)}</strong> from the stop request until its checkpoint was safe, or to the end if nothing was left to save${share !== null && share > 0.8 ? ": nearly all of it. A larger state or a busy disk would lose the save." : "."}`}</p></div></${Card}>`;
}

/** What is proved of its beginning. @param {{job: Api.Job, attempt: Api.Attempt}} props */
function Proof({ job, attempt }) {
  const found = verdict(attempt);
  const { redone, metrics_differ: differ } = attempt;
  const first = redone.first_difference;
  const later = Boolean(attempt.proof?.includes("; not exact since"));
  const tone = later ? "wait" : verdictTone(found);
  return html`<${Card} tone=${tone} title="Was its beginning exact?" aside=${html`<span class=${classes("word", tone)}>${found === "unknown" && attempt.ended_at ? "did not begin" : verdictText(found)}</span>`}>
    <div class="stack" style=${{ gap: ".5rem" }}>
      ${(later || (found === "not-exact" && (first || redone.compared > 0))) && html`<p class=${classes("notice", tone)}>${attempt.proof}</p>`}
      ${first
        ? html`<p><strong class="word bad">Step ${count(first.step)} differs.</strong> It was done again, and ${first.part} of rank ${first.rank} came out otherwise. ${count(redone.equal)} of ${count(redone.compared)} redone steps before it are identical.</p>`
        : redone.compared
          ? html`<p class="huge">${count(redone.equal)} of ${count(redone.compared)}</p><p class="small">Proved: ${count(redone.equal)} of ${count(redone.compared)} redone steps are identical, bit for bit, on every rank.</p>`
          : html`<p>${{
            fresh: "It began at step 0. No earlier attempt had done these steps, so nothing is to be compared.",
            exact: "Every component of every rank and every recorded fact is the same as in the checkpoint. No step was compared.",
            unmanaged: "The script saves and restores its own state; Ratchet knows nothing of it.",
            "not-exact": attempt.proof, unknown: attempt.ended_at ? "The attempt ended before it began to train." : "The attempt has not begun to train.", proved: attempt.proof, differs: attempt.proof,
          }[found]}</p>`}
      ${redone.reason && html`<p class="small dim">${redone.reason}</p>`}
      ${redone.steps > redone.compared && html`<p class="small dim">${plural(redone.steps - redone.compared, "step")} of ${count(redone.steps)} not compared yet.</p>`}
      ${differ.length > 0 && html`<p class="small dim">Metrics that differ although the steps are identical, as measured times do: ${differ.slice(0, 8).join(", ")}${differ.length > 8 ? ` and ${differ.length - 8} more` : ""}.</p>`}
      ${["exact", "proved", "differs", "not-exact"].includes(found) && html`<${Command} line=${`ratchet prove ${job.id}`} />`}</div></${Card}>`;
}

/** @param {number} seconds */
const inMs = (seconds) => `${count(Math.round(1000 * seconds))} ms`;

/** Ranks that the others waited for. @param {{job: Api.Job, attempt: Api.Attempt}} props */
const Slow = ({ job, attempt: { number, stragglers } }) => html`<${Card} tone="wait" title="Slow ranks" aside=${stragglers.length > NODES ? `the first ${NODES} of ${stragglers.length}` : "first gradients of a step, medians"} flush>
  <${Table} caption="Slow ranks" tight numbers=${[1, 2, 3]} head=${["Rank", "Ready after", "Others after", "Others wait", "Node"]}
    rows=${stragglers.slice(0, NODES).map((one) => [html`<a href=${link(["jobs", job.id, "logs"], { attempt: number, rank: one.rank })}>${one.rank}</a>`, inMs(one.ready_seconds), inMs(one.others_seconds), percent(one.share), `${one.node}${one.host === null ? "" : `, ${one.host}`}`])} /></${Card}>`;

/** @param {{nodes: Api.Node[]}} props */
const Nodes = ({ nodes }) => html`<${Card} title="Nodes" aside=${nodes.length > NODES ? `the first ${NODES} of ${nodes.length}` : plural(nodes.length, "node")} flush>
  ${nodes.length
    ? html`<${Table} caption="Nodes" tight numbers=${[2]} head=${["Node", "Host", "Agent's pid", "GPUs", "Phase", "Address"]}
        rows=${nodes.slice(0, NODES).map((one) => [one.node, one.host ?? "–", one.pid ?? "–", one.gpus.length ? one.gpus.join(", ") : html`<span class="dim">none</span>`, one.phase.toLowerCase(), one.address ?? html`<span class="dim">–</span>`])} />`
    : html`<${Empty}><p>No agent has started yet.</p></${Empty}>`}</${Card}>`;

/** @param {{number: number, environment: Api.Environment | null | undefined}} props - undefined: a report does not have it */
function Software({ number, environment }) {
  const [filter, setFilter] = useState("");
  const title = `Software of attempt ${number}`;
  if (!environment) return html`<${Card} title=${title}><p class="dim">${environment === null ? "It is recorded when training begins." : "Not in this report."}</p></${Card}>`;
  const { git } = environment;
  const found = environment.packages.filter((/** @type {string} */ one) => one.toLowerCase().includes(filter.toLowerCase()));
  const torch = environment.packages.find((/** @type {string} */ one) => one.startsWith("torch=="));
  return html`<${Card} title=${title}>
    <div class="stack" style=${{ gap: ".7rem" }}>
      <${Facts} items=${[["Ratchet", environment.ratchet], ["Python", environment.python], ...(torch ? [["PyTorch", torch.slice(7)]] : []),
        ...(git ? Object.entries(git).filter(([, value]) => value !== null && value !== "").map(([key, value]) => [`Git ${key.replaceAll("_", " ")}`, html`<span class="clip" title=${String(value)}>${String(value)}</span>`]) : [["Git", html`<span class="dim">unknown</span>`]]),
        ["Digest", html`<code title=${environment.digest}>${environment.digest.slice(0, 12)}</code>`]]} />
      <details><summary class="small">${plural(environment.packages.length, "package")}</summary>
        <div class="stack" style=${{ gap: ".5rem", marginTop: ".5rem" }}><input type="search" placeholder="filter packages" aria-label="Filter packages" value=${filter} onInput=${(/** @type {any} */ event) => setFilter(event.target.value)} />
        <ul class="plain-list packages mono">${found.slice(0, PACKAGES).map((/** @type {string} */ one) => html`<li>${one}</li>`)}</ul>
        ${found.length > PACKAGES && html`<p class="small dim">${plural(found.length - PACKAGES, "more package")}: filter them.</p>`}</div></details></div></${Card}>`;
}
