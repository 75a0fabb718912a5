import assert from "node:assert/strict";
import test from "node:test";
import { pixelsOf, tooLarge } from "../../service/ratchet_service/web/app/files/pictures.js";
import { shownName } from "../../service/ratchet_service/web/app/files/preview.js";
import { quoted } from "../../service/ratchet_service/web/app/format.js";

/** Bytes of text and numbers. @param {...(string | number)} parts */
const bytes = (...parts) => Uint8Array.from(parts.flatMap((part) => (typeof part === "number" ? [part] : [...part].map((one) => one.charCodeAt(0)))));

test("the size of a picture is in its first bytes", () => {
  assert.deepEqual(pixelsOf(bytes(0x89, "PNG\r\n\x1a\n", 0, 0, 0, 13, "IHDR", 0, 0, 0xea, 0x60, 0, 0, 1, 0)), { width: 60_000, height: 256 });
  const gif = ["GIF89a", 1, 0, 2, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0];
  assert.deepEqual(pixelsOf(bytes(...gif, 0x21, 0xf9, 1, 0, 0, 0x2c, 0, 0, 0, 0, 0, 1, 2, 0)), { width: 256, height: 2 }, "a frame can be larger than the screen");
  assert.deepEqual(pixelsOf(bytes(0xff, 0xd8, 0xff, 0xe0, 0, 4, 0, 0, 0xff, 0xff, 0xc2, 0, 11, 8, 1, 0, 2, 0)), { width: 512, height: 256 });
  assert.deepEqual(pixelsOf(bytes("RIFF", 0, 0, 0, 0, "WEBPVP8X", 10, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 1, 0, 0)), { width: 65_536, height: 2 });
  assert.deepEqual(pixelsOf(bytes("RIFF", 0, 0, 0, 0, "WEBPVP8L", 0, 0, 0, 0, 0x2f, 0xff, 0xff, 0xff, 0x0f)), { width: 16_384, height: 16_384 });
  assert.deepEqual(pixelsOf(bytes("BM", ..."\0".repeat(12), 40, 0, 0, 0, 3, 0, 0, 0, 0xfe, 0xff, 0xff, 0xff)), { width: 3, height: 2 });
  assert.deepEqual([bytes(), bytes("GIF89a"), bytes("hello, this is a text"), bytes(0xff, 0xd8, 0xff, 0xd9)].map(pixelsOf), [null, null, null, null]);
});

test("very large pictures are refused", () =>
  assert.deepEqual([{ width: 8000, height: 6000 }, { width: 8000, height: 7000 }, { width: 20_000, height: 2 }].map(tooLarge), [false, true, true]));

test("names cannot reverse the text around them, and are one word of a command line", () => {
  assert.equal(shownName("a\u202egnp.exe"), "a\ufffdgnp.exe");
  assert.deepEqual(["j:a/b.txt", "j:a b", "j:it's $(x)"].map(quoted), ["j:a/b.txt", "'j:a b'", "'j:it'\\''s $(x)'"]);
});
