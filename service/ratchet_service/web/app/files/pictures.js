// @ts-check
/** The size of a picture in pixels, from its first bytes: before a browser decodes it, which a small file can make very large. */

/** Larger pictures are not decoded. */
export const MOST_PIXELS = 50e6;
/** A canvas of a larger side is not drawn by every browser. */
const MOST_SIDE = 16_384;

/** @typedef {{width: number, height: number}} Pixels */

/** @param {Uint8Array} bytes @returns {Pixels | null} null: of no known format, or cut off */
export function pixelsOf(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const text = (/** @type {number} */ at, /** @type {number} */ length) => String.fromCharCode(...bytes.subarray(at, at + length));
  try {
    if (text(0, 8) === "\u0089PNG\r\n\u001a\n") return { width: view.getUint32(16), height: view.getUint32(20) };
    if (/^GIF8[79]a$/.test(text(0, 6))) return ofGif(view);
    if (text(0, 2) === "BM" && view.getUint32(14, true) >= 40) return { width: Math.abs(view.getInt32(18, true)), height: Math.abs(view.getInt32(22, true)) };
    if (text(0, 4) === "RIFF" && text(8, 4) === "WEBP") return ofWebp(view, text(12, 4));
    if (view.getUint16(0) === 0xffd8) return ofJpeg(view);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
  }
  return null;
}

/** The first frame can be larger than the screen that the header names. @param {DataView} view @returns {Pixels | null} */
function ofGif(view) {
  const table = (/** @type {number} */ flags) => (flags & 0x80 ? 3 * 2 ** ((flags & 7) + 1) : 0);
  let at = 13 + table(view.getUint8(10));
  while (view.getUint8(at) === 0x21) {
    at += 2;
    while (view.getUint8(at)) at += view.getUint8(at) + 1;
    at += 1;
  }
  if (view.getUint8(at) !== 0x2c) return null;
  const side = (/** @type {number} */ screen, /** @type {number} */ n) => Math.max(view.getUint16(screen, true), view.getUint16(at + 1 + n, true) + view.getUint16(at + 5 + n, true));
  return { width: side(6, 0), height: side(8, 2) };
}

/** @param {DataView} view @param {string} kind @returns {Pixels | null} */
function ofWebp(view, kind) {
  const three = (/** @type {number} */ at) => view.getUint16(at, true) + 65_536 * view.getUint8(at + 2);
  if (kind === "VP8X") return { width: three(24) + 1, height: three(27) + 1 };
  if (kind === "VP8 ") return { width: view.getUint16(26, true) & 0x3fff, height: view.getUint16(28, true) & 0x3fff };
  if (kind !== "VP8L") return null;
  const packed = view.getUint32(21, true);
  return { width: (packed & 0x3fff) + 1, height: ((packed >> 14) & 0x3fff) + 1 };
}

/** The size of its first frame. @param {DataView} view @returns {Pixels | null} */
function ofJpeg(view) {
  for (let at = 2; ;) {
    if (view.getUint8(at) !== 0xff) return null;
    const marker = view.getUint8(at + 1);
    if (marker === 0xff) at += 1;
    else if (marker === 0xda || marker === 0xd9) return null;
    else if (marker >= 0xc0 && marker <= 0xcf && ![0xc4, 0xc8, 0xcc].includes(marker)) return { width: view.getUint16(at + 7), height: view.getUint16(at + 5) };
    else at += 2 + (marker === 1 || (marker >= 0xd0 && marker <= 0xd8) ? 0 : view.getUint16(at + 2));
  }
}

/** @param {Pixels} pixels */
export const tooLarge = ({ width, height }) => width * height > MOST_PIXELS || Math.max(width, height) > MOST_SIDE;
