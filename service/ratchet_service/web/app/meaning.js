// @ts-check
/** What phases, causes and verdicts mean: their tone (a class name of style.css) and words. */
import { count } from "./format.js";

/** @typedef {"good" | "busy" | "wait" | "held" | "bad" | "quiet"} Tone */

/** @type {Record<string, Tone>} */
const PHASES = {
  QUEUED: "wait", STARTING: "busy", RUNNING: "busy", STOPPING: "wait", SUSPENDED: "held", SUCCEEDED: "good", FAILED: "bad",
  CANCELLED: "quiet",
};

/** @param {string} phase @returns {Tone} */
export const phaseTone = (phase) => PHASES[phase] ?? "quiet";

export const ENDED = ["SUCCEEDED", "FAILED", "CANCELLED"];
export const ACTIVE = ["STARTING", "RUNNING", "STOPPING"];
/** Phases in which a job can be resumed: one that has succeeded can only be forked. */
export const RESUMABLE = ["FAILED", "CANCELLED", "SUSPENDED"];

/** Its share of all steps, null if their number is not known: 1 if it has succeeded, as a trial does before its last step. @param {Api.Job} job */
export const shareDone = ({ phase, progress }) => (progress.total_steps ? (phase === "SUCCEEDED" ? 1 : progress.step / progress.total_steps) : null);

/** The number of all steps, behind that of those done. @param {Api.Job} job */
export const ofTotal = ({ phase, progress: { step, total_steps } }) => (total_steps ? ` of ${count(total_steps)}${phase === "SUCCEEDED" && step < total_steps ? ", ended early" : ""}` : "");

/** Whether the caller may act on the job. @param {Api.Caller | null} caller @param {Api.Job} job @param {Api.Caller["scopes"][number]} [scope] */
export const mayAct = (caller, job, scope = "jobs:write") =>
  caller !== null && caller.scopes.includes(scope) && (!caller.tokens_required || caller.role === "admin" || caller.owner === job.owner);

/** Whether its script has no Session: nothing is known of its steps. @param {Api.Job} job */
export const isUnmanaged = (job) => (job.warnings ?? []).some((one) => one.code === "unmanaged-script");

/** @type {Record<string, [Tone, string]>} */
const CAUSES = {
  completed: ["good", "It did all its steps."],
  "api-preempt": ["held", "Somebody asked for a preemption."],
  sigterm: ["wait", "The machine sent SIGTERM: a preemption from outside."],
  "higher-priority": ["wait", "A job of higher priority needed the slots."],
  "node-lost": ["bad", "A node was lost."],
  evicted: ["wait", "The engine evicted it."],
  "time-limit": ["wait", "The engine's time limit was reached."],
  upgrade: ["held", "The service was upgraded; the attempt used the earlier protocol."],
  "api-suspend": ["held", "Somebody suspended the job."],
  "api-cancel": ["quiet", "Somebody cancelled the job."],
  exception: ["bad", "A rank raised an exception."],
  "rank-killed": ["bad", "A rank was killed."],
  oom: ["bad", "A rank ran out of memory."],
  hang: ["bad", "The ranks made no progress."],
  "checkpoint-error": ["bad", "Checkpoints could not be written."],
  "user-error": ["bad", "The code or the spec has an error that a new attempt would meet again."],
  timeout: ["bad", "policy.timeout was reached."],
  "lease-lost": ["bad", "The attempt was cut off from the service and was replaced."],
  "launcher-error": ["bad", "The launcher could not start it."],
  unknown: ["bad", "It left no result behind."],
};

/** @param {string | null | undefined} cause @returns {Tone} */
export const causeTone = (cause) => (cause ? (CAUSES[cause]?.[0] ?? "bad") : "busy");

/** @param {string | null | undefined} cause */
export const causeText = (cause) => (cause ? (CAUSES[cause]?.[1] ?? cause) : "It runs.");

/** Why a job failed, in words. The reason may be another one than the newest attempt's cause. @param {string | null} reason */
export const reasonText = (reason) => (reason ? (CAUSES[reason]?.[1] ?? reason.replaceAll("-", " ")) : "the reason is not known");

/** @param {string} proof - of an attempt @returns {Tone} */
export const proofTone = (proof) =>
  proof.startsWith("not-exact") ? "bad" : proof.includes("not exact since") ? "wait" : proof.startsWith("exact") ? "good" : "quiet";

/**
 * What is known of an attempt's beginning. ``proved``: all steps that it did again gave the same bits.
 * @typedef {"fresh" | "proved" | "exact" | "not-exact" | "differs" | "unmanaged" | "unknown"} Verdict
 */

/** @param {{proof?: string | null, redone?: {steps: number, compared: number, equal: number, first_difference: object | null}}} attempt
 *  @returns {Verdict} */
export function verdict(attempt) {
  const text = attempt.proof ?? "";
  if (attempt.redone?.first_difference) return "differs";
  if (text.startsWith("not-exact")) return "not-exact";
  if (text.startsWith("exact, proved") || text.startsWith("fresh, proved")) return "proved";
  if (text.startsWith("exact")) return "exact";
  if (text.startsWith("fresh")) return "fresh";
  return text.startsWith("unmanaged") ? "unmanaged" : "unknown";
}

/** @type {Record<Verdict, [Tone, string]>} */
const VERDICTS = {
  fresh: ["quiet", "began at step 0"],
  proved: ["good", "exact, proved"],
  exact: ["good", "exact, no step compared"],
  "not-exact": ["bad", "not exact"],
  differs: ["bad", "a redone step differs"],
  unmanaged: ["wait", "the script restores its own state"],
  unknown: ["quiet", "not known yet"],
};

/** @param {Verdict} found */
export const verdictTone = (found) => VERDICTS[found][0];
/** @param {Verdict} found */
export const verdictText = (found) => VERDICTS[found][1];

/** Parts of an attempt's time, in order, with their words. */
export const SPENT = /** @type {[string, string, string][]} */ ([
  ["queued_seconds", "queued", "waiting for its engine"],
  ["launching_seconds", "launching", "until training began"],
  ["useful_seconds", "useful", "steps that count"],
  ["lost_seconds", "lost", "steps that are in no checkpoint"],
  ["stall_seconds", "saving", "training waited for a save"],
  ["stopping_seconds", "stopping", "from the last step to the end"],
  ["unseen_seconds", "unseen", "a script without a Session ran"],
]);

/** @param {string} status - of a component in a resume report @returns {Tone} */
export const statusTone = (status) =>
  status === "exact" ? "good" : status === "redistributed" ? "held" : status === "reset" ? "wait" : "bad";
