// @ts-check
/** A report's data, from an element of the page. A page of a service has none. */

/**
 * ``attempts``: newest first; ``environment`` is known of those that have the key. ``checkpoints``: newest step first; ``manifest`` is known
 * of those that have the key. ``events``: oldest first. ``logs``: by attempt and rank, of ``log_attempts``, oldest first.
 * @typedef {{made_at: string, service: string, ratchet: string, left_out: string[], job: any, hook: any, hook_history: any[], attempts: any[],
 *            checkpoints: any[], metrics: any[], trackers: any[], events: any[], files: any[], logs: any[], log_attempts: number[]}} Recorded
 */

const text = globalThis.document?.getElementById("recorded")?.textContent;
/** @type {Recorded | null} null: the page reads from a service */
export const recorded = text ? JSON.parse(text) : null;

/** What was asked for is not in the report. */
export class NotRecorded extends Error {
  /** @param {Recorded} from @param {string} path - as the pages ask for it */
  constructor(from, path) {
    super(`Not in this report. While the service runs, ${from.service}/#/${path.split("/").slice(1, 3).join("/")} shows it.`);
  }
}
