import assert from "node:assert/strict";
import test from "node:test";
import { dateBefore, localDay, midnight } from "../../service/ratchet_service/web/app/format.js";
import { changesText } from "../../service/ratchet_service/web/app/pages/team/audit.js";

test("changes have the old and the new value, also those of labels", () => {
  assert.equal(changesText({ priority: { old: 0, new: 5 }, labels: { note: { old: null, new: "a" }, b: { old: "c", new: null } } }), "priority 0 → 5, labels note none → a, b c → none");
  assert.equal(changesText({ name: "x", scopes: ["jobs:read"], outputs: true }), 'name x, scopes ["jobs:read"], outputs true');
});

test("a day begins at the midnight of this place, and what is no day stays", () => {
  assert.equal(new Date(midnight("2030-03-01")).getTime(), new Date(2030, 2, 1).getTime());
  assert.match(midnight("2030-03-01"), /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$/);
  assert.equal(midnight("soon"), "soon");
  assert.equal(localDay(new Date(2030, 0, 5, 23).getTime()), "2030-01-05");
  assert.equal(dateBefore(new Date(2030, 0, 8, 12).getTime(), 7), "2030-01-01");
});
