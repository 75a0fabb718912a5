import assert from "node:assert/strict";
import test from "node:test";
import { parse, link } from "../../service/ratchet_service/web/app/route.js";

test("an address and back", () => {
  const address = link(["jobs", "a/b", "metrics"], { x: "wall", job: ["1", "2"], none: null, empty: "", zero: 0 });
  assert.equal(address, "#/jobs/a%2Fb/metrics?x=wall&job=1&job=2&zero=0");
  const { path, query } = parse(address);
  assert.deepEqual(path, ["jobs", "a/b", "metrics"]);
  assert.deepEqual(query.getAll("job"), ["1", "2"]);
});

test("an empty address", () => assert.deepEqual(parse("").path, []));

test("a question mark in a value stays in it", () => {
  const { query } = parse(link(["jobs"], { name: "a?b&c" }));
  assert.equal(query.get("name"), "a?b&c");
});

test("a percent sign that was typed stays", () => assert.deepEqual(parse("#/jobs/100%").path, ["jobs", "100%"]));
