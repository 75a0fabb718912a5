// @ts-check
/** ``GET /v1/fleet`` in the form in which the pages draw it. */

/** @typedef {Api.Fleet} Fleet */
/**
 * ``kind``: what a slot is; ``capacity``: null if it is not known.
 * @typedef {{kind: string, title: string, capacity: number | null, used: number, holders: {id: string, name: string, owner: string, held: number}[]}} Slots
 */

/** Entries that are not 0, the largest first. @param {Record<string, number>} from @returns {[string, number][]} */
export const counts = (from) => Object.entries(from).filter(([, number]) => number > 0).sort((a, b) => b[1] - a[1]);

/** @param {Fleet} fleet @returns {Slots[]} */
export const slotsOf = (fleet) => fleet.slots.map((one) => {
  /** @type {Map<string, Slots["holders"][number]>} */
  const jobs = new Map(); // the service names each node of a job
  for (const { job_id: id, name, owner, count: held } of one.holders) jobs.set(id, { id, name, owner, held: held + (jobs.get(id)?.held ?? 0) });
  const holders = [...jobs.values()].sort((a, b) => b.held - a.held);
  return { kind: one.kind, title: one.kind === "gpu" ? "GPUs" : "CPU slots", capacity: one.capacity ?? null, used: holders.reduce((sum, job) => sum + job.held, 0), holders };
});

/**
 * ``all``: ends; ``faults``: those of them that the hardware may have caused; ``avoiding``: ids of jobs.
 * @typedef {{host: string, causes: [string, number][], all: number, faults: [string, number][], avoiding: string[]}} Host
 */

/** @param {Fleet} fleet @returns {Host[]} */
export const hostsOf = (fleet) => fleet.hosts.map((one) => {
  const causes = counts(one.ends);
  return { host: one.host, causes, all: causes.reduce((sum, [, number]) => sum + number, 0), faults: counts(one.faults), avoiding: one.excluded_by };
});
