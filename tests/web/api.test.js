import assert from "node:assert/strict";
import test from "node:test";
import { parseEvents } from "../../service/ratchet_service/web/app/api.js";

test("complete events, and the rest", () => {
  const { events, rest } = parseEvents("id: 1\ndata: a\n\nid: 2\nevent: end\ndata: {}\n\nid: 3\nda");
  assert.deepEqual(events, [{ id: "1", type: "message", data: "a" }, { id: "2", type: "end", data: "{}" }]);
  assert.equal(rest, "id: 3\nda");
});

test("an event that arrives in two pieces", () => {
  const first = parseEvents("id: 1\nda");
  const second = parseEvents(`${first.rest}ta: x\n\n`);
  assert.deepEqual([first.events, second.events[0].data], [[], "x"]);
});

test("comments are no events, several lines of data are one text", () =>
  assert.deepEqual(parseEvents(": ping\n\ndata: a\ndata:  b\n\n").events, [{ id: "", type: "message", data: "a\n b" }]));

test("lines may end with CR LF", () => assert.equal(parseEvents("data: a\r\n\r\n").events[0].data, "a"));
