// @ts-check
/** What to do after an attempt's end, by cause: the short form of docs/troubleshooting.md, which has the long one. */

/** ``lines``: command lines that help. @typedef {{text: string, lines?: (job: string, attempt: number) => string[]}} Advice */

/** @type {Record<string, Advice>} */
const ADVICE = {
  completed: { text: "No action is needed: the final checkpoint is committed." },
  "api-preempt": { text: "No action is needed: the job saved, and is queued again." },
  "api-suspend": { text: "The job waits until it is resumed.", lines: (job) => [`ratchet resume ${job}`] },
  "api-cancel": { text: "The job saved and stopped. A resume can still continue it.", lines: (job) => [`ratchet resume ${job}`] },
  sigterm: { text: "No action is needed. If nobody stopped it, find the sender: an operator, a scheduler, or a machine that shuts down." },
  "higher-priority": { text: "No action is needed: the job continues when there is room. With policy.preemptible: false no other job may displace it." },
  upgrade: { text: "No action is needed: the next attempt uses the service's version." },
  "node-lost": { text: "No action is needed: the job resumes on other nodes. If one node is named again and again, take it out of service.", lines: () => ["kubectl cordon NODE", "scontrol update nodename=NODE state=drain reason=lost"] },
  evicted: { text: "No action is needed after a drain. Against pressure on a node, give the pods realistic requests (resources.memory)." },
  "time-limit": { text: "No action is needed: the next attempt continues. If no attempt makes progress, the limit is too short for a start, one step and a save." },
  exception: { text: "Mend the code, then resume with it. Without --code the job runs its present snapshot again.", lines: (job, attempt) => [`ratchet logs ${job} --attempt ${attempt}`, `ratchet resume ${job} --code .`] },
  "rank-killed": { text: "No action is needed if the signal was intended. For SIGBUS look at /dev/shm, for SIGSEGV at native extensions." },
  oom: { text: "Use a smaller batch or model, or request more memory. PowerSGD's residuals need as much memory as the gradients.", lines: (job) => [`ratchet hook ${job}`, "ratchet doctor"] },
  hang: { text: "Read the stacks of the ranks in their logs. A rank that waits in a collective is not the cause; it waits for the named one.", lines: (job, attempt) => [`ratchet logs ${job} --attempt ${attempt}`] },
  "checkpoint-error": { text: "Read the events: they name the file and the error. If the disk was full, free space, then resume.", lines: (job) => [`ratchet events ${job}`, `ratchet resume ${job}`] },
  "user-error": { text: "A new attempt would end in the same way. Do what the message says, then resume with the changed code.", lines: (job) => [`ratchet resume ${job} --code .`] },
  timeout: { text: "The job's own limit, policy.timeout, was reached. A fork with a longer one continues from its checkpoint.", lines: (job) => [`ratchet fork ${job} --set policy.timeout=86400`] },
  "lease-lost": { text: "No action is needed: the job resumes. If it happens again and again, the agents cannot reach the service." },
  "launcher-error": { text: "Read the message: the launcher's or the engine's own error is in it.", lines: () => ["ratchet doctor"] },
  unknown: { text: "No result was left behind. Read the last lines of the ranks and the agent's log.", lines: (job, attempt) => [`ratchet logs ${job} --attempt ${attempt} --tail 50`] },
};

/** @param {string | null | undefined} cause @returns {Advice | null} */
export const adviceFor = (cause) => (cause ? (ADVICE[cause] ?? null) : null);
