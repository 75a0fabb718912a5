// @ts-check
/** What the job wrote to its working directory: folders to open, a file beside them. The folder and the file are in the address. */
import { Badge, Command, Empty, Trouble } from "../../components/basics.js";
import { Download, Preview, REFUSED, address, fileView, shownName } from "../../files/preview.js";
import { classes, html, useEffect, useMemo, useState } from "../../dom.js";
import { read } from "../../api.js";
import { ago, moment, plural, quoted, size } from "../../format.js";
import { useLive, useNow } from "../../live.js";
import { ACTIVE } from "../../meaning.js";
import { recorded } from "../../recorded.js";
import { link, setQuery } from "../../route.js";

const PAGE = 1000;
/** Names of one folder that are shown at most. */
const SHOWN = 5000;
/** The ages of more names change every half minute, not every second. */
const MANY = 200;
/** What no further page has: one list, so that it is the same at every drawing. @type {Api.File[]} */
const NONE = [];

/** @type {Record<string, string>} */
const ICONS = { directory: "▸", file: "·", symlink: "↪", special: "◇" };

/** @param {{job: Api.Job, route: import("../../route.js").Route}} props */
export default function Files({ job, route }) {
  const folder = route.query.get("dir") ?? "";
  const chosen = route.query.get("file") ?? "";
  const all = route.query.get("all") === "true";
  const asked = new URLSearchParams({ ...(folder && { path: folder }), ...(all && { all: "true" }), recursive: "false", limit: String(PAGE) });
  const base = /** @type {const} */ (`v1/jobs/${encodeURIComponent(job.id)}/files?${asked}`);
  const { data, error } = useLive(base, { every: ACTIVE.includes(job.phase) ? 10_000 : null });
  const more = useMore(base, data?.next_cursor ?? null);
  const items = useMemo(() => [...(data?.items ?? []), ...more.items], [data, more.items]);
  const beat = items.length > MANY ? 30_000 : 1000;
  const now = Math.ceil(useNow() / beat) * beat;
  const folders = items.filter((one) => one.kind === "directory");
  const rest = items.filter((one) => one.kind !== "directory");
  const known = items.find((one) => one.path === chosen);
  const open = useFile(job.id, chosen, known);
  const rows = useMemo(() => [...folders, ...rest].map((one) => html`<${Row} key=${one.path} job=${job} file=${one} all=${all} folder=${folder} chosen=${one.path === chosen} now=${now} />`),
    [items, job.id, all, folder, chosen, now]);
  return html`<div class="stack">
    <div class="row spread"><${Crumbs} job=${job} folder=${folder} all=${all} />
      <div class="row">${!recorded && html`<label class="check"><input type="checkbox" checked=${all} onChange=${() => setQuery({ all: all ? null : "true" })} />unchanged code, too</label>`}
        ${items.length > 0 && html`<${Download} path=${address(job.id, "archive", folder)} name=${`${folder ? folder.slice(folder.lastIndexOf("/") + 1) : job.id}.tar`} bytes=${sum(rest)}>Archive of this folder</${Download}>`}</div></div>
    <${Trouble} error=${error ?? more.error} />
    <div class=${classes("files", chosen && "open")}>
      <section class="card flush">${data && (items.length
        ? html`<div class="scroll" tabindex="0" role="region" aria-label="Files"><table class="tight"><caption class="hidden">Files in ${folder || "the working directory"}</caption>
            <thead><tr><th scope="col">Name</th><th scope="col" class="number">Size</th><th scope="col">Changed</th></tr></thead>
            <tbody>${rows}</tbody></table></div>
          <p class="edge">${contents(folders, rest)}${sum(rest) ? `, ${size(sum(rest))} in files` : ""}${more.next ? html`. Further names are not shown. ${items.length < SHOWN
            ? html`<button type="button" disabled=${more.busy} onClick=${more.load}>Show more</button>` : "The archive and the command line have all."}` : "."}</p>`
        : html`<${Empty}><p>${folder ? "The folder is empty." : "No file yet. What a rank writes to its current directory appears here."}</p>
            ${!all && html`<p class="small">Unchanged files of the job's code are left out.</p>`}<${Command} line=${`ratchet files ${job.id}`} /></${Empty}>`)}
        ${!data && !error && html`<p class="edge">Names are being read …</p>`}</section>
      ${open.file && html`<${Preview} key=${chosen} job=${job} file=${open.file} onClose=${() => setQuery({ file: null })} />`}
      ${open.error && html`<${Trouble} error=${open.error} />`}
    </div>
    <${Command} line=${`ratchet cp ${quoted(`${job.id}${folder ? `:${folder}` : ":"}`)} .`} />
  </div>`;
}

/** @param {Api.File[]} folders @param {Api.File[]} rest */
function contents(folders, rest) {
  const files = rest.filter((one) => one.kind === "file").length;
  return [[folders.length, "folder"], [files, "file"], [rest.length - files, "other name"]].filter(([n]) => n).map(([n, noun]) => plural(Number(n), String(noun))).join(", ");
}

/** @param {Api.File[]} files */
const sum = (files) => files.reduce((bytes, one) => bytes + (one.size ?? 0), 0);

/** Further pages, on request. @param {`v1/jobs/${string}/files?${string}`} base @param {string | null} first */
function useMore(base, first) {
  const none = { base, items: NONE, next: /** @type {string | null} */ (null), read: false, busy: false, error: /** @type {Error | null} */ (null) };
  const [kept, setState] = useState(none);
  const state = kept.base === base ? kept : none;
  const next = state.read ? state.next : first;
  const load = async () => {
    setState({ ...state, busy: true });
    try {
      const { data } = await read(`${base}&${new URLSearchParams({ cursor: next ?? "" })}`);
      setState({ base, items: [...state.items, ...data.items], next: data.next_cursor, read: true, busy: false, error: null });
    } catch (error) {
      setState({ ...state, busy: false, error: /** @type {Error} */ (error) });
    }
  };
  return { items: state.items, next, busy: state.busy, error: state.error, load };
}

/** The chosen file: from the folder's list, or asked for. @param {string} id @param {string} path @param {Api.File | undefined} known */
function useFile(id, path, known) {
  const [found, setFound] = useState({ path: "", file: /** @type {Api.File | null} */ (null), error: /** @type {Error | null} */ (null) });
  useEffect(() => {
    if (!path || known) return;
    fileView(id, path).then((file) => setFound({ path, file, error: null }), (error) => setFound({ path, file: null, error }));
  }, [id, path, Boolean(known)]);
  if (known) return { file: known, error: null };
  return found.path === path ? found : { file: null, error: null };
}

/** @param {{job: Api.Job, folder: string, all: boolean}} props */
function Crumbs({ job, folder, all }) {
  const parts = folder.split("/").filter(Boolean);
  const to = (/** @type {string} */ dir) => link(["jobs", job.id, "files"], { dir, all: all ? "true" : null });
  return html`<nav class="crumbs" aria-label="Folder"><a href=${to("")} aria-current=${parts.length ? undefined : "page"}>working directory</a>
    ${parts.map((part, n) => html`<span class="sep" aria-hidden="true">/</span><a href=${to(parts.slice(0, n + 1).join("/"))} aria-current=${n === parts.length - 1 ? "page" : undefined}><bdi>${shownName(part)}</bdi></a>`)}</nav>`;
}

/** @param {{job: Api.Job, file: Api.File, all: boolean, folder: string, chosen: boolean, now: number}} props */
function Row({ job, file, all, folder, chosen, now }) {
  const name = html`<bdi>${shownName(file.path.slice(file.path.lastIndexOf("/") + 1))}</bdi>`;
  const query = { all: all ? "true" : null };
  const opens = !file.refused && (file.kind === "directory" || file.kind === "file");
  const target = file.kind === "directory" ? { ...query, dir: file.path } : { ...query, dir: folder, file: file.path };
  return html`<tr class=${chosen ? "chosen" : ""}>
    <td class="name"><span class="icon" aria-hidden="true">${ICONS[file.kind] ?? "·"}</span>${opens
      ? html`<a href=${link(["jobs", job.id, "files"], target)} aria-current=${chosen ? "true" : undefined}>${name}${file.kind === "directory" ? "/" : ""}</a>` : name}
      ${file.from_code && html` <${Badge} tone="quiet" title="It belongs to the snapshot of the code, and is unchanged.">code</${Badge}>`}
      ${file.refused && html` <span class="small word wait">not sent:</span> <span class="small dim">${REFUSED[file.refused] ?? file.refused}</span>`}</td>
    <td class="number nowrap">${file.kind === "file" ? size(file.size) : ""}</td>
    <td class="nowrap dim small" title=${moment(file.modified_at)}>${ago(file.modified_at, now)}</td></tr>`;
}
