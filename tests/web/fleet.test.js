import assert from "node:assert/strict";
import test from "node:test";
import { slotsOf } from "../../service/ratchet_service/web/app/fleet.js";

test("a job on several nodes holds slots once, the largest holder first", () => {
  const node = (/** @type {string} */ id, /** @type {number} */ count) => ({ job_id: id, name: `name-${id}`, owner: "ada", count, devices: [] });
  const [found] = slotsOf(/** @type {any} */ ({ slots: [{ kind: "cpu", capacity: 9, holders: [node("a", 2), node("b", 1), node("b", 3)] }] }));
  assert.equal(found.used, 6);
  assert.deepEqual(found.holders.map(({ name, held }) => [name, held]), [["name-b", 4], ["name-a", 2]]);
});
