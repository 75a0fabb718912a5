// @ts-check
/** Actions on jobs and checkpoints. Each shows the command line that does the same. */
import { Unreachable, change, read } from "../api.js";
import { html, useEffect, useState } from "../dom.js";
import { count, quoted } from "../format.js";
import { ACTIVE, ENDED, RESUMABLE } from "../meaning.js";
import { go, link } from "../route.js";
import { Command, Dialog } from "./basics.js";
import { notify } from "./frame.js";

/**
 * ``send``: does it, and returns what is announced; empty: nothing. ``ready``: whether there is something to do. ``fields``: inputs, by name. ``danger``: it ends or deletes something.
 * @typedef {{key: string, title: string, explain: string, danger?: boolean, fields?: Field[], ready?: (values: Record<string, string>) => boolean,
 *            line: (values: Record<string, string>) => string, send: (values: Record<string, string>) => Promise<string>}} Action
 * @typedef {{name: string, label: string, value?: string, type?: string, optional?: boolean, hint?: string, options?: () => Promise<[string, string][]>}} Field
 */


/** @param {Api.Job} job @param {string} name @param {string} done @returns {(values: Record<string, string>) => Promise<string>} */
const post = (job, name, done) => async () => {
  await change("POST", `v1/jobs/${job.id}/${name}`);
  return done;
};

/**
 * The actions that make sense in the job's phase, in the order in which they are shown.
 * @param {Api.Job} job @returns {Action[]}
 */
export function jobActions(job) {
  const active = ACTIVE.includes(job.phase);
  const ended = ENDED.includes(job.phase);
  /** @type {(Action | false)[]} */
  const found = [
    active && {
      key: "checkpoint", title: "Checkpoint now", explain: "Save at the end of the present step. Training continues.",
      line: () => `ratchet checkpoint ${job.id}`, send: post(job, "checkpoint", "A checkpoint was requested."),
    },
    active && {
      key: "preempt", title: "Preempt", explain: "Save, stop the ranks, and queue the job again: what a preemption of the machine does.",
      line: () => `ratchet preempt ${job.id}`, send: post(job, "preempt", "The job saves, stops and is queued again."),
    },
    !ended && job.phase !== "SUSPENDED" && {
      key: "suspend", title: "Suspend", explain: "Save and stop. The job holds no resources until it is resumed.",
      line: () => `ratchet suspend ${job.id}`, send: post(job, "suspend", "The job saves and stops."),
    },
    RESUMABLE.includes(job.phase) && {
      key: "resume", title: "Resume", explain: "Continue from the last checkpoint. With another number of ranks the hook's state is redistributed, now and on later resumes, and the resume is not exact.",
      fields: [
        { name: "ranks", label: "Ranks per node", type: "number", optional: true, hint: `now ${job.spec.world?.ranks_per_node ?? "auto"}` },
        { name: "step", label: "From", optional: true, hint: "the last checkpoint", options: () => storedSteps(job) },
      ],
      line: ({ ranks, step }) => `ratchet resume ${job.id}${step ? ` --from-step ${step}` : ""}${ranks ? ` --world ${ranks} --on-hook-mismatch redistribute` : ""}`,
      send: async ({ ranks, step }) => {
        const body = { ...(step && { from_step: Number(step) }), ...(ranks && { world: { ranks_per_node: Number(ranks) }, on_hook_mismatch: "redistribute" }) };
        await change("POST", `v1/jobs/${job.id}/resume`, body);
        return "The job is queued and continues from its checkpoint.";
      },
    },
    !!job.last_checkpoint && forkAction(job, job.last_checkpoint),
    {
      key: "priority", title: "Priority", explain: "Jobs of higher priority start first, and may stop others where the service allows it.",
      fields: [{ name: "priority", label: "Priority", type: "number", value: String(job.priority) }],
      line: ({ priority }) => `ratchet label ${job.id} --priority ${priority}`,
      send: async ({ priority }) => {
        await change("PATCH", `v1/jobs/${job.id}`, { priority: Number(priority) });
        return `The priority is ${priority}.`;
      },
    },
    {
      key: "labels", title: "Labels", explain: "Labels as key=value, one per line. They replace the present ones.",
      fields: [{ name: "labels", label: "Labels", type: "lines", value: Object.entries(job.labels).map(([key, value]) => `${key}=${value}`).join("\n"), optional: true }],
      ready: ({ labels }) => labelChanges(job, labels).length > 0,
      line: ({ labels }) => `ratchet label ${job.id}${labelChanges(job, labels).map((part) => ` ${quoted(part)}`).join("")}`,
      send: async ({ labels }) => {
        const next = parseLabels(labels);
        const gone = Object.keys(job.labels).filter((key) => !Object.hasOwn(next, key)).map((key) => [key, null]);
        await change("PATCH", `v1/jobs/${job.id}`, { labels: { ...next, ...Object.fromEntries(gone) } });
        return "The labels were changed.";
      },
    },
    !ended && {
      key: "cancel", title: "Cancel", danger: true, explain: "Stop the job for good. Its checkpoints stay, so that it can be resumed or forked.",
      line: () => `ratchet cancel ${job.id}`, send: post(job, "cancel", "The job is being cancelled."),
    },
  ];
  return /** @type {Action[]} */ (found.filter(Boolean));
}

/** The newest steps that a resume can begin from. @param {Api.Job} job @returns {Promise<[string, string][]>} */
async function storedSteps(job) {
  const { data } = await read(`v1/jobs/${job.id}/checkpoints?limit=100`);
  return data.items.filter((one) => one.state === "committed" && one.lineage === "current").map((one) => [String(one.step), `step ${count(one.step)}`]);
}

/** @param {Api.Job} job @param {string} checkpoint @returns {Action} */
export const forkAction = (job, checkpoint) => ({
  key: "fork", title: "Fork", explain: `A new job begins with the state of ${checkpoint}. This one stays as it is.`,
  fields: [{ name: "name", label: "Name", value: `${job.name}-fork` }],
  line: ({ name }) => `ratchet fork ${job.id} --checkpoint ${checkpoint} --name ${quoted(name ?? "")}`,
  send: async ({ name }) => {
    const made = await change("POST", `v1/jobs/${job.id}/fork`, { checkpoint_id: checkpoint, name });
    go(link(["jobs", made.id]));
    return `${made.name} was submitted.`;
  },
});

/** @param {string} text @returns {Record<string, string>} */
function parseLabels(text) {
  const lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
  return Object.fromEntries(lines.map((line) => [line.split("=", 1)[0], line.includes("=") ? line.slice(line.indexOf("=") + 1) : ""]));
}

/** @param {Api.Job} job @param {string} text */
function labelChanges(job, text) {
  const next = parseLabels(text ?? "");
  const set = Object.entries(next).filter(([key, value]) => !Object.hasOwn(job.labels, key) || job.labels[key] !== value).map(([key, value]) => `${key}=${value}`);
  return [...set, ...Object.keys(job.labels).filter((key) => !Object.hasOwn(next, key)).map((key) => `${key}-`)];
}

/** A button that opens the action's dialog. @param {{action: Action, onDone?: () => void, plain?: boolean}} props */
export function ActionButton({ action, onDone, plain }) {
  const [open, setOpen] = useState(false);
  return html`<button type="button" class=${plain ? "plain" : action.danger ? "danger" : ""} onClick=${() => setOpen(true)}>${action.title}</button>
    ${open && html`<${ActionDialog} action=${action} onClose=${() => setOpen(false)} onDone=${onDone} />`}`;
}

/** Asks, shows the command line, and does it. @param {{action: Action, onClose: () => void, onDone?: () => void}} props */
export function ActionDialog({ action, onClose, onDone }) {
  const [values, setValues] = useState(Object.fromEntries((action.fields ?? []).map((field) => [field.name, field.value ?? ""])));
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState("");
  const submit = async (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    setBusy(true);
    setError("");
    try {
      const said = await action.send(values);
      if (said) notify(said);
      onDone?.();
      onClose();
    } catch (problem) {
      setError(problem instanceof Unreachable ? "No answer came. It is not known whether it was done: press again, it is done once." : /** @type {Error} */ (problem).message);
      setBusy(false);
    }
  };
  const set = (/** @type {string} */ name) => (/** @type {any} */ event) => setValues({ ...values, [name]: event.target.value });
  return html`<${Dialog} title=${action.title} onClose=${onClose}>
    <p class="dim">${action.explain}</p>
    <form onSubmit=${submit}>
      ${(action.fields ?? []).map((field) => html`<label class="field" key=${field.name}>${field.label}
        ${field.type === "lines"
          ? html`<textarea rows="5" value=${values[field.name]} onInput=${set(field.name)}></textarea>`
          : field.options
          ? html`<${Options} field=${field} value=${values[field.name]} onChange=${set(field.name)} />`
          : html`<input type=${field.type ?? "text"} value=${values[field.name]} placeholder=${field.hint ?? ""} required=${!field.optional} onInput=${set(field.name)} />`}</label>`)}
      ${error && html`<p class="notice bad" role="alert">${error}</p>`}
      <${Command} line=${action.line(values)} />
      <div class="row end"><button type="button" onClick=${onClose}>Back</button>
        <button class=${action.danger ? "danger" : "primary"} disabled=${busy || action.ready?.(values) === false}>${action.title}</button></div>
    </form></${Dialog}>`;
}

/** A choice whose options are read when the dialog opens. @param {{field: Field, value: string, onChange: (event: any) => void}} props */
function Options({ field, value, onChange }) {
  const [found, setFound] = useState(/** @type {[string, string][]} */ ([]));
  useEffect(() => void field.options?.().then(setFound, () => {}), []); // without them the first one is left, as the service says when it is sent
  return html`<select value=${value} onChange=${onChange}><option value="">${field.hint}</option>${found.map(([key, text]) => html`<option value=${key}>${text}</option>`)}</select>`;
}
