import assert from "node:assert/strict";
import test from "node:test";
import { hostsOf, slotsOf } from "../../service/ratchet_service/web/app/fleet.js";

test("a job on several nodes holds slots once, the largest holder first", () => {
  const node = (/** @type {string} */ id, /** @type {number} */ count) => ({ job_id: id, name: `name-${id}`, owner: "ada", count, devices: [] });
  const [found] = slotsOf(/** @type {any} */ ({ slots: [{ kind: "cpu", capacity: 9, holders: [node("a", 2), node("b", 1), node("b", 3)] }] }));
  assert.equal(found.used, 6);
  assert.deepEqual(found.holders.map(({ name, held }) => [name, held]), [["name-b", 4], ["name-a", 2]]);
});

test("a node has its ends and faults, the most frequent first, and the jobs that stay away from it", () => {
  const host = { host: "n1", failures: 3, ends: { hang: 2, completed: 0, "node-lost": 3 }, faults: { hang: 1, "node-lost": 3 }, excluded_by: ["j"] };
  assert.deepEqual(hostsOf(/** @type {any} */ ({ hosts: [host] })), [
    { host: "n1", causes: [["node-lost", 3], ["hang", 2]], all: 5, faults: [["node-lost", 3], ["hang", 1]], avoiding: ["j"] }]);
});
