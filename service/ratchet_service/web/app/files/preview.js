// @ts-check
/** One file of a job, shown as text or as a picture that is drawn on a canvas. Nothing of it becomes markup of the page. */
import { download, read, save, token } from "../api.js";
import { Card, Command, Trouble } from "../components/basics.js";
import { notify } from "../components/frame.js";
import { html, useEffect, useRef, useState } from "../dom.js";
import { count, moment, quoted, size } from "../format.js";
import { recorded } from "../recorded.js";
import { MOST_PIXELS, pixelsOf, tooLarge } from "./pictures.js";

const TEXT_BYTES = 256 * 1024;
const PICTURE_BYTES = 32 * 1024 * 1024;
/** Larger files would have to be held in the tab while they are sent with a token. */
const TOKEN_BYTES = 1e9;
/** Formats whose size in pixels is read before the browser decodes one. */
const PICTURE = /\.(png|jpe?g|gif|webp|bmp)$/i;

/** A name without characters that reverse the text around them. @param {string} text */
export const shownName = (text) => text.replace(/[\u202a-\u202e\u2066-\u2069]/g, "\ufffd");

/** @param {string} id @param {string} part @param {string} path */
export const address = (id, part, path) => `v1/jobs/${encodeURIComponent(id)}/files/${part}?${new URLSearchParams({ path })}`;

/** Why a file cannot be opened. @type {Record<string, string>} */
export const REFUSED = {
  "symbolic-link": "a symbolic link, which is not followed", "special-file": "a FIFO, socket or device", "file-unreadable": "the service may not read it",
  "too-deep": "below more than 64 directories", "name-not-utf8": "its name is not UTF-8; the archive of its folder has it",
};

/** @param {Uint8Array} bytes @param {boolean} cut */
function textOf(bytes, cut) {
  if (bytes.includes(0)) return null;
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes, { stream: cut });
  } catch {
    return null;
  }
}

/**
 * A download, except in a report: by the browser itself where no token is needed, so that it needs no memory; else fetched with the token.
 * @param {{path: string, name: string, bytes?: number | null, children: any}} props
 */
export function Download({ path, name, bytes, children }) {
  const [busy, setBusy] = useState(false);
  if (recorded) return null;
  if (!token()) return html`<a class="button" href=${path} download=${name}>${children}</a>`;
  const fetchIt = async () => {
    setBusy(true);
    try {
      save(await download(path), name);
    } catch (error) {
      notify(/** @type {Error} */ (error).message, "bad");
    }
    setBusy(false);
  };
  return (bytes ?? 0) > TOKEN_BYTES
    ? html`<span class="dim small">too large for this page: use the command line</span>`
    : html`<button type="button" disabled=${busy} onClick=${fetchIt}>${busy ? "Fetching …" : children}</button>`;
}

/** @param {{job: Api.Job, file: Api.File, onClose: () => void}} props - file: as the API lists it */
export function Preview({ job, file, onClose }) {
  const { path } = file;
  const name = path.slice(path.lastIndexOf("/") + 1);
  const [found, setFound] = useState(/** @type {{text?: string, cut?: boolean, picture?: ImageBitmap, width?: number, height?: number, note?: string} | null} */ (null));
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  // The file as it was when it was read. One that grows stays as it is shown until somebody asks for it again.
  const [asked, setAsked] = useState(file);
  const changed = asked.modified_at !== file.modified_at || asked.size !== file.size;
  useEffect(() => {
    const stop = new AbortController();
    setError(null);
    const show = async () => {
      if (asked.refused) return { note: `It cannot be opened: ${REFUSED[asked.refused] ?? asked.refused}.` };
      if (!asked.size) return { note: "The file is empty." };
      const target = address(job.id, "content", path);
      if (PICTURE.test(name)) {
        if (asked.size > PICTURE_BYTES) return { note: `Pictures of more than ${size(PICTURE_BYTES)} are not shown.` };
        const blob = await download(target, { signal: stop.signal });
        const pixels = pixelsOf(new Uint8Array(await blob.arrayBuffer()));
        if (!pixels) return { note: "Its size in pixels cannot be read, so the picture is not shown." };
        if (tooLarge(pixels)) return { note: `It has ${count(pixels.width)} × ${count(pixels.height)} pixels. Pictures of more than ${count(MOST_PIXELS / 1e6)} megapixels, or with a very long side, are not shown.` };
        const picture = await createImageBitmap(blob).catch(() => null);
        return picture ? { picture, width: picture.width, height: picture.height } : { note: "The browser cannot show this picture." };
      }
      const blob = await download(target, { headers: { Range: `bytes=0-${TEXT_BYTES - 1}` }, signal: stop.signal });
      const cut = asked.size > TEXT_BYTES;
      const text = textOf(new Uint8Array(await blob.arrayBuffer()), cut);
      return text === null ? { note: "The file is not text." } : { text, cut };
    };
    show().then((one) => (stop.signal.aborted ? one.picture?.close() : setFound(one)), (wrong) => stop.signal.aborted || setError(wrong));
    return () => stop.abort();
  }, [job.id, path, asked]);
  return html`<${Card} title=${html`<bdi>${shownName(name)}</bdi>`} aside=${html`<button type="button" class="plain" onClick=${onClose}>close</button>`}>
    <div class="stack" style=${{ gap: ".7rem" }}>
      <p class="dim small"><bdi>${shownName(path)}</bdi> · ${size(file.size)} · ${moment(file.modified_at)}</p>
      ${changed && html`<p class="small"><span class="word wait">The file has changed since it was read.</span> <button type="button" onClick=${() => setAsked(file)}>Read it again</button></p>`}
      <${Trouble} error=${error} />
      ${!found && !error && html`<p class="dim small">The file is being read …</p>`}
      ${found?.note && html`<p class="dim">${found.note}</p>`}
      ${found?.text !== undefined && html`<pre class="filetext" tabindex="0" role="region" aria-label=${`Text of ${shownName(name)}`}>${found.text}</pre>
        ${found.cut && html`<p class="dim small">The first ${size(TEXT_BYTES)} of ${size(asked.size)} are shown.</p>`}`}
      ${found?.picture && html`<${Picture} picture=${found.picture} width=${found.width} height=${found.height} name=${shownName(name)} />`}
      ${!file.refused && html`<div class="row"><${Download} path=${address(job.id, "content", path)} name=${name} bytes=${file.size}>Download</${Download}></div><${Command} line=${`ratchet cp ${quoted(`${job.id}:${path}`)} .`} />`}
    </div></${Card}>`;
}

/** @param {{picture: ImageBitmap, width: number, height: number, name: string}} props */
function Picture({ picture, width, height, name }) {
  const place = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  useEffect(() => {
    const canvas = place.current;
    if (!canvas) return;
    canvas.width = width;
    canvas.height = height;
    canvas.getContext("2d")?.drawImage(picture, 0, 0);
    picture.close(); // only the canvas is needed from here on
  }, [picture]);
  return html`<figure class="picture"><canvas ref=${place} role="img" aria-label=${`Picture ${name}`}></canvas>
    <figcaption class="dim small">${count(width)} × ${count(height)} pixels</figcaption></figure>`;
}

/**
 * What the API says of one file; its folder is read for it, since a file alone is listed by its own path too.
 * @param {string} id @param {string} path
 */
export async function fileView(id, path) {
  const { data } = await read(`v1/jobs/${encodeURIComponent(id)}/files?${new URLSearchParams({ path, all: "true", recursive: "false", limit: "1" })}`);
  return data.items[0] ?? null;
}
