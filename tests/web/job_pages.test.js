import assert from "node:assert/strict";
import test from "node:test";
import { signsOf } from "../../service/ratchet_service/web/app/components/lineage.js";
import { pointsFor } from "../../service/ratchet_service/web/app/hook_series.js";
import { bestOf } from "../../service/ratchet_service/web/app/pages/job/checkpoints.js";
import { toneOf, withLater, withNewest } from "../../service/ratchet_service/web/app/pages/job/events.js";
import { commandLine } from "../../service/ratchet_service/web/app/pages/job/logs.js";
import { decided } from "../../service/ratchet_service/web/app/pages/job/spec.js";
import { rounded } from "../../service/ratchet_service/web/app/yaml.js";

test("tones of events", () => {
  assert.equal(toneOf("labels-changed", {}), "held");
  assert.equal(toneOf("upload-incomplete", {}), "quiet");
  assert.equal(toneOf("job-completed", {}), "good");
  assert.deepEqual(["exact", "not-exact"].map((verdict) => toneOf("resumed", { verdict })), ["good", "bad"]);
  assert.equal(toneOf("hang", {}), "bad");
  assert.deepEqual(["info", "warning", "error"].map((level) => toneOf("alert", { level })), ["quiet", "wait", "bad"]);
  assert.deepEqual(["straggler", "node-excluded"].map((type) => toneOf(type, {})), ["wait", "wait"]);
  assert.deepEqual(["tracker-failing", "tracker-back", "tracker-branched"].map((type) => toneOf(type, {})), ["bad", "good", "held"]);
});

const events = (/** @type {number[]} */ ...ids) => ids.map((id) => /** @type {any} */ ({ id }));

const all = () => true;

test("a list of events takes the newest page, and each later event once", () => {
  const first = withNewest({ events: [], cursor: null, last: 0 }, { items: events(9, 8, 7), next_cursor: "a", last: 9 });
  assert.deepEqual(first, { events: events(9, 8, 7), cursor: "a", last: 9 });
  assert.deepEqual(withLater(first, events(9, 10, 12), all), { events: events(12, 10, 9, 8, 7), cursor: "a", last: 12 });
  assert.deepEqual(withLater(first, events(10, 11), () => false), { ...first, last: 11 });
  assert.deepEqual(withNewest(first, { items: events(10, 9, 8), next_cursor: "b", last: 10 }), { events: events(10, 9, 8, 7), cursor: "a", last: 10 });
});

test("a list of events begins again if more came than a page has", () =>
  assert.deepEqual(withNewest({ events: events(3, 2), cursor: "a", last: 3 }, { items: events(9, 8), next_cursor: "b", last: 9 }), { events: events(9, 8), cursor: "b", last: 9 }));

test("what the stream sent after the page was read is sent again to a list that begins again with the page", () => {
  const again = withNewest({ events: [], cursor: null, last: 0 }, { items: events(9, 8), next_cursor: "b", last: 9 });
  assert.equal(again.last, 9);
  assert.deepEqual(withNewest(withLater({ events: [], cursor: null, last: 9 }, events(10), all), { items: [], next_cursor: null, last: 9 }), { events: [], cursor: null, last: 9 });
});

test("the best checkpoint of a page is not called the best of all", () => {
  const items = [3, 1, 2].map((metric, n) => ({ id: `c${n}`, state: "committed", metric }));
  const words = (/** @type {boolean} */ whole) => signsOf(items[1], bestOf(items, "min", whole)).map(({ word }) => word);
  assert.deepEqual([words(true), words(false)], [["best"], ["best on this page"]]);
  assert.equal(bestOf(items, "max", true)?.id, "c0");
  assert.deepEqual(signsOf({ state: "committed" }, bestOf([], "min", true)), []);
});

test("a hook's history of many ranks has fewer steps", () => assert.deepEqual([0, 1, 8, 100, 5000].map(pointsFor), [300, 300, 125, 10, 5]));

test("auto means something in some parts of a spec only", () => {
  const job = { resolved: { device: "cpu", backend: "gloo", threads_per_rank: 2, code_digest: null } };
  assert.deepEqual(["/world/device", "/ddp/backend", "/checkpoint/staging", "/task/args/device", "/task/args/constructor"].map((path) => decided(job, path)),
    ["cpu", "gloo", "decided when it runs", null, null]);
  assert.equal(decided({ resolved: null }, "/world/device"), "decided when it runs");
});

test("integers that JSON.parse changes", () => {
  assert.equal(rounded(JSON.parse('{"a": [{"seed": 9007199254740993}]}')), true);
  assert.equal(rounded({ a: [1, 1.5, "9007199254740993", null, 2 ** 53 - 1] }), false);
});

test("the command line of a view of logs", () => {
  const chosen = { attempt: null, rank: 1, search: "it's", since: "", live: true };
  assert.equal(commandLine({ id: "j" }, chosen), "ratchet logs j --attempt all --rank 1 --grep 'it'\\''s' --follow");
});
