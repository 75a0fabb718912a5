// @ts-check
/** One checkpoint: what is in it, and what can be done with it. */
import { change, download, save } from "../api.js";
import { html, useState } from "../dom.js";
import { count, duration, moment, number, percent, plural, size } from "../format.js";
import { useLive } from "../live.js";
import { ENDED, RESUMABLE, mayAct } from "../meaning.js";
import { recorded } from "../recorded.js";
import { link } from "../route.js";
import { ActionButton, forkAction } from "./actions.js";
import { Badge, Card, Choice, Command, Facts, Table, Trouble } from "./basics.js";
import { signsOf } from "./lineage.js";

const RANKS = 16;
/** Larger files are not held by the page: the command line writes them to the disk. */
const MOST = 1e9;

/** @typedef {import("./actions.js").Action} Action */

/**
 * @param {{job: Api.Job, id: string, listed: Api.Checkpoint | undefined, best: import("./lineage.js").Best | null, caller: Api.Caller | null, refresh: () => void}} props
 */
export function Checkpoint({ job, id, listed, best, caller, refresh }) {
  const { data, error, refresh: again } = useLive(`v1/jobs/${encodeURIComponent(job.id)}/checkpoints/${encodeURIComponent(id)}`, { every: null });
  const one = listed ? { ...data, ...listed } : data;
  if (!one) return error ? html`<${Trouble} error=${error} />` : null;
  const done = () => { refresh(); again(); };
  const tone = one.verification === "damaged" || one.state === "quarantined" ? "bad" : one.lineage === "current" && one.state === "committed" ? "busy" : "quiet";
  return html`<${Card} tone=${tone} title=${`Checkpoint at step ${count(one.step)}`} aside=${html`<code>${one.id}</code>`}>
    <div class="stack">
      <div class="row small">${signsOf(one, best).map((sign) => html`<${Badge} tone=${sign.tone}>${sign.mark} ${sign.word}</${Badge}>`)}
        <${Badge} tone=${one.lineage === "current" ? "busy" : "quiet"}>${one.lineage === "current" ? "on the current line" : "on an abandoned branch"}</${Badge}></div>
      ${one.verification_error && html`<p class="notice bad">${one.verification_error}</p>`}
      <${Facts} items=${[
        ["Saved for", one.reason], ["Attempt", html`<a href=${link(["jobs", job.id, "attempts"], { attempt: one.attempt })}>${one.attempt}</a>`],
        ["Descends from", one.parent?.step ? `step ${count(one.parent.step)}, attempt ${one.parent.attempt}` : "the beginning"],
        ["Size", `${size(one.size)} in ${plural(one.files, "file")}`], ["Pause", duration(one.stall), "Seconds in which rank 0's training was blocked."], ["Save time", duration(one.seconds), "From the step's end until it was safe on the disk."],
        ["Saved", moment(one.created_at)], ["Hook iteration", one.hook_iteration === null ? "–" : count(one.hook_iteration)],
        ...(one.metric === null ? [] : [["Metric", number(one.metric)]]),
        [one.verification === "damaged" ? "Found damaged" : "Verified", one.verified_at ? moment(one.verified_at) : html`<span class="dim">never</span>`],
        ...(one.uri ? [["Copy", html`<code class="clip" title=${one.uri}>${one.uri}</code>`], ["Copied", one.uploaded_at ? moment(one.uploaded_at) : "under way"]] : []),
        ["Digest", html`<code title=${one.digest}>${one.digest.slice(0, 12)}</code>`],
      ]} />
      <${Actions} job=${job} one=${one} caller=${caller} done=${done} />
      <${Trouble} error=${error} />
      <${Sizes} manifest=${data?.manifest} known=${Boolean(data)} state=${one.state} job=${job.id} />
    </div></${Card}>`;
}

/** @param {{job: Api.Job, one: Api.Checkpoint, caller: Api.Caller | null, done: () => void}} props */
function Actions({ job, one, caller, done }) {
  if (one.state !== "committed") return null;
  const path = `v1/jobs/${job.id}/checkpoints/${one.id}`;
  const act = mayAct(caller, job);
  const keep = mayAct(caller, job, "checkpoints:write");
  const stopped = RESUMABLE.includes(job.phase);
  /** @type {(Action | false)[]} */
  const found = [
    keep && {
      key: "verify", title: "Verify", explain: "Read every byte and compare it with the digests. A damaged checkpoint is quarantined.",
      line: () => `ratchet checkpoints verify ${job.id} ${one.id}`,
      send: async () => {
        const result = await change("POST", `${path}/verify`);
        if (result.verification !== "ok") {
          done();
          throw new Error(`It is damaged: ${result.error}`);
        }
        return `Every byte is as it was written: ${size(result.bytes_checked)} in ${duration(result.seconds)}.`;
      },
    },
    keep && {
      key: "pin", title: one.pinned ? "Unpin" : "Pin", explain: one.pinned ? "Retention may delete it again." : "Retention never deletes a pinned checkpoint.",
      line: () => `ratchet checkpoints ${one.pinned ? "unpin" : "pin"} ${job.id} ${one.id}`,
      send: async () => {
        await change("POST", `${path}/pin`, { pinned: !one.pinned });
        return one.pinned ? "It is no longer pinned." : "It is pinned.";
      },
    },
    act && stopped && one.lineage === "current" && {
      key: "from-here", title: "Resume from here", explain: `The job continues from step ${one.step}. Checkpoints of later steps become an abandoned branch.`,
      line: () => `ratchet resume ${job.id} --from-step ${one.step}`,
      send: async () => {
        await change("POST", `v1/jobs/${job.id}/resume`, { from_step: one.step });
        return `The job is queued and continues from step ${one.step}.`;
      },
    },
    act && { ...forkAction(job, one.id), title: "Fork from here" },
  ];
  const shown = /** @type {Action[]} */ (found.filter(Boolean));
  return html`<div class="stack" style=${{ gap: ".7rem" }}>
    ${shown.length > 0 && html`<div class="row" role="group" aria-label="Actions on this checkpoint">${shown.map((action) => html`<${ActionButton} key=${action.key} action=${action} onDone=${done} />`)}
      ${act && !stopped && one.lineage === "current" && html`<span class="small dim">${ENDED.includes(job.phase) ? "The job has succeeded: a fork goes on from here." : "To resume from here, suspend the job first."}</span>`}</div>`}
    <${Export} job=${job} one=${one} path=${path} caller=${caller} /></div>`;
}

/** @type {Record<string, [string, string, string]>} */
const FORMATS = {
  safetensors: ["safetensors", "the model alone, one file", ".safetensors"], torch: ["torch", "each rank's whole state, for torch.load(weights_only=True)", ".tar"],
  dcp: ["dcp", "model and optimizer for torch.distributed.checkpoint", ".tar"],
};

/** @param {{job: Api.Job, one: Api.Checkpoint, path: string, caller: Api.Caller | null}} props */
function Export({ job, one, path, caller }) {
  const [format, setFormat] = useState("safetensors");
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState("");
  const [, explain, ending] = FORMATS[format];
  const name = `${job.name}-step-${one.step}${format === "safetensors" ? "" : `-${format}`}${ending}`;
  const address = `${path}/export?format=${format}`;
  const line = `ratchet checkpoints export ${job.id} --checkpoint ${one.id} --format ${format} -o ${format === "safetensors" ? name : name.replace(".tar", "")}`;
  const fetchIt = async () => {
    setBusy(true);
    setError("");
    try {
      save(await download(address), name);
    } catch (wrong) {
      setError(/** @type {Error} */ (wrong).message);
    }
    setBusy(false);
  };
  return html`<details class="export"><summary><strong>Export</strong> <span class="dim small">as files for other programs</span></summary><div class="stack" style=${{ gap: ".6rem", marginTop: ".6rem" }}>
    <div class="row"><${Choice} label="Format" value=${format} onChange=${setFormat} options=${Object.entries(FORMATS).map(([key, [text]]) => [key, text])} /><span class="small dim">${explain}</span></div>
    <${Command} line=${line} />
    ${!recorded && (!caller?.tokens_required
      ? html`<p class="row"><a class="button" href=${address} download=${name}>Download</a><span class="small dim">It begins when the service has verified and written the files.</span></p>`
      : one.size > MOST
        ? html`<p class="small dim">This checkpoint has ${size(one.size)}: more than a page should hold. The command line writes it to the disk.</p>`
        : html`<p class="row"><button type="button" disabled=${busy} onClick=${fetchIt}>${busy ? "The service makes the files…" : "Download"}</button>${error && html`<span class="word bad" role="alert">${error}</span>`}</p>`)}
  </div></details>`;
}

/** What the bytes are: shared by all ranks, private ones, the hook's. @param {{manifest: Api.CheckpointDetail["manifest"], known: boolean, state: string, job: string}} props */
function Sizes({ manifest, known, state, job }) {
  if (!manifest) return known ? html`<p class="dim small">${{ deleted: "Its files were deleted. What the database has of it stays.", quarantined: "It is in the quarantine, and no attempt starts from it. The second line deletes all damaged checkpoints, and also every abandoned one that is not pinned. The first line only lists them." }[state] ?? "Its manifest is not on this machine's disk, so what the bytes are is not known here."}</p>
    ${state === "quarantined" && html`<${Command} line=${`ratchet checkpoints prune ${job} --quarantined --dry-run`} /><${Command} line=${`ratchet checkpoints prune ${job} --quarantined`} />`}` : null;
  /** @type {Record<string, number>} */
  const kinds = {};
  for (const tensor of manifest.tensors) {
    const parts = tensor.name.split("/");
    const kind = parts[0] === "shared" ? `shared ${parts[1]}` : parts[2] === "hook" ? "hook" : `private ${parts[2]}`;
    kinds[kind] = (kinds[kind] ?? 0) + tensor.nbytes;
  }
  const whole = manifest.files.reduce((/** @type {number} */ sum, /** @type {any} */ file) => sum + file.size, 0) || 1;
  const tensors = Object.values(kinds).reduce((sum, bytes) => sum + bytes, 0);
  const group = (/** @type {string} */ begin) => Object.entries(kinds).filter(([kind]) => kind.startsWith(begin)).reduce((sum, [, bytes]) => sum + bytes, 0);
  const parts = /** @type {[string, string, number, string][]} */ ([
    ["shared", "equal on all ranks, stored once", group("shared"), "busy"], ["private", "each rank's own", group("private"), "held"],
    ["hook", `state of ${manifest.hook.name}`, group("hook"), "wait"], ["other", "headers and plain values", Math.max(0, whole - tensors), "quiet"],
  ]).filter(([, , bytes]) => bytes > 0);
  const detail = Object.entries(kinds).sort((a, b) => b[1] - a[1]);
  return html`<div class="stack" style=${{ gap: ".7rem" }}><h3>What its ${size(whole)} are</h3>
    <div class="spent" role="img" aria-label=${parts.map(([word, , bytes]) => `${word} ${size(bytes)}`).join(", ")}>${parts.map(([word, , bytes, tone]) => html`<span class=${`tone-fill ${tone}`} style=${{ width: `${(100 * bytes) / whole}%` }} title=${`${word}: ${size(bytes)}`}></span>`)}</div>
    <dl class="parts">${parts.map(([word, explain, bytes, tone]) => html`<div><dt><span class=${`swatch tone-fill ${tone}`}></span>${word} <span class="dim">${explain}</span></dt><dd>${size(bytes)}</dd><dd class="dim">${percent(bytes / whole)}</dd></div>`)}</dl>
    <details><summary class="small">${plural(manifest.tensors.length, "stored tensor piece")}, ${plural(manifest.world_size, "rank")}, by kind and by file</summary>
      <div class="columns inset" style=${{ marginTop: ".5rem" }}>
        <${Table} caption="Sizes by kind" tight numbers=${[1]} head=${["Kind", "Size"]} rows=${detail.map(([kind, bytes]) => [kind, size(bytes)])} />
        <div><${Table} caption="Sizes by rank" tight numbers=${[1, 2]} head=${["Rank file", "Size", "Blocks"]} rows=${manifest.files.slice(0, RANKS).map((/** @type {any} */ file) => [html`<code>${file.name}</code>`, size(file.size), count(file.blocks.length)])} />
          ${manifest.files.length > RANKS && html`<p class="small dim">and ${plural(manifest.files.length - RANKS, "more file")}: <code>ratchet checkpoints show</code> lists all.</p>`}</div></div></details></div>`;
}
