// @ts-check
/** What the job was asked to be, what the service decided, what differs from another job, and the software that it ran with. */
import { Badge, Card, Command, Copy, Empty, Trouble, Warnings } from "../../components/basics.js";
import { classes, html, useState } from "../../dom.js";
import { count, plural } from "../../format.js";
import { useLive } from "../../live.js";
import { recorded } from "../../recorded.js";
import { link, setQuery } from "../../route.js";
import { save } from "../../api.js";
import { differences, leaves, rounded, scalar, yaml, yamlLines } from "../../yaml.js";

/** @param {{job: Api.Job, route: import("../../route.js").Route}} props */
export default function Spec({ job, route }) {
  const other = recorded ? "" : route.query.get("with") ?? job.forked_from?.split("/")[0] ?? "";
  const { data: base, error } = useLive(other && other !== job.id ? `v1/jobs/${encodeURIComponent(other)}` : null, { every: null });
  const changed = base ? differences(base.spec, job.spec) : [];
  return html`<div class="stack">
    <${Warnings} job=${job} />
    <div class="main-side">
      <div class="stack"><${Text} job=${job} changed=${new Set(changed.map((one) => one.path))} /></div>
      <div class="stack">
        <${Decided} job=${job} />
        <${Software} job=${job} base=${base} />
        ${!recorded && html`<${Against} other=${other} base=${base} error=${error} changed=${changed} />`}
      </div></div></div>`;
}

/** @param {{job: Api.Job, changed: Set<string>}} props */
function Text({ job, changed }) {
  const [whole, setWhole] = useState(false);
  const text = yaml(job.spec);
  const hidden = (job.spec.secret_env ?? []).length > 0;
  const warned = /** @type {Record<string, string>} */ (Object.fromEntries((job.warnings ?? []).map((one) => [one.pointer, one.detail])));
  const lines = yamlLines(job.spec);
  const kept = lines.filter((one) => (one.end && (one.key === "-" || !/^(null|\[]|{})$/.test(one.end))) || one.path === "/checkpoint/every_steps" || within(changed, one.path) || Object.hasOwn(warned, one.path));
  const set = lines.filter((one) => kept.some((other) => `${other.path}/`.startsWith(`${one.path}/`)));
  return html`<${Card} title="Spec" flush aside=${html`<${Copy} text=${text}>copy as YAML</${Copy}><${Copy} text=${JSON.stringify(job.spec, null, 2)}>copy as JSON</${Copy}>
      <button type="button" class="plain" onClick=${() => save(new Blob([text], { type: "application/yaml" }), `${job.name}.yaml`)}>save</button>`}>
    <div class="scroll yaml" tabindex="0" role="region" aria-label="Spec as YAML">${(whole ? lines : set).map((one) => {
      const auto = one.end === "auto" ? decided(job, one.path) : null;
      return html`<div class=${classes("yamlline", within(changed, one.path) && "changed")} title=${Object.hasOwn(warned, one.path) ? warned[one.path] : undefined}><span style=${{ paddingLeft: `${1.2 * one.indent}rem` }}><span class="key">${one.key}</span> <span class=${valueClass(one.end)}>${one.end}</span>
        ${auto !== null && html` <span class="became">→ ${auto}</span>`}${changed.has(one.path) && html` <span class="became">changed</span>`}${Object.hasOwn(warned, one.path) && html` <span class="word wait">warning</span>`}</span></div>`;
    })}</div>
    ${set.length < lines.length && html`<p class="edge"><button type="button" class="plain" onClick=${() => setWhole(!whole)}>${whole ? "Hide" : "Show"} ${plural(lines.length - set.length, "line")} without a value</button></p>`}
    ${rounded(job.spec) && html`<p class="edge"><span class="word wait">An integer of 2⁵³ or more is rounded here.</span> The command line shows it exactly: <code>ratchet get ${job.id} --json</code></p>`}
    <div class="stack again">${hidden && html`<p class="small"><span class="word wait">The values of secret_env are not shown.</span> Replace each ******** in the saved file, or the service refuses it.</p>`}<p class="dim small">Save the spec as a file, then submit it again:</p><${Command} line=${`ratchet submit ${/^[\w.-]+$/.test(job.name) ? job.name : "job"}.yaml`} />
      ${job.last_checkpoint && html`<p class="dim small">A new job with the state of its last checkpoint:</p><${Command} line=${`ratchet fork ${job.id} --checkpoint ${job.last_checkpoint}`} />`}</div></${Card}>`;
}

/** Whether ``path`` or a part that holds it is among ``paths``. @param {Set<string>} paths @param {string} path */
const within = (paths, path) => path.split("/").some((_, n, parts) => n > 0 && paths.has(parts.slice(0, n + 1).join("/")));

/** @param {string} text */
const valueClass = (text) => (text.startsWith('"') ? "string" : /^-?\d/.test(text) ? "num" : /^null$/.test(text) ? "none" : /^(true|false|auto)$/.test(text) ? "literal" : "");

/** Where ``auto`` is decided by the service or by the attempt: elsewhere it is a text of the job. Each with its name in ``resolved``. @type {Record<string, string | null>} */
const AUTO = {
  "/world/device": "device", "/ddp/backend": "backend", "/checkpoint/every_steps": null, "/checkpoint/first": null, "/checkpoint/staging": null,
  "/trial/end_at": null,
};

/** What ``auto`` at ``path`` became; null: it is only a text there. @param {Api.Job} job @param {string} path */
export function decided(job, path) {
  if (!Object.hasOwn(AUTO, path)) return null;
  const name = AUTO[path];
  const found = name && /** @type {Record<string, any> | null} */ (job.resolved)?.[name];
  return found ? String(found) : "decided when it runs";
}

/** @param {{job: Api.Job}} props */
function Decided({ job }) {
  const spec = leaves(job.spec);
  const open = new Map(Object.entries({ device: "/world/device", backend: "/ddp/backend", python: "/python" }).map(([name, path]) => /** @type {[string, any]} */ ([name, spec.get(path)])).filter(([, value]) => value === "auto" || value === null));
  const rows = Object.entries(job.resolved ?? {}).filter(([, value]) => value !== null);
  return html`<${Card} title="Decided at submission">
    <dl class="pairs">${rows.map(([name, value]) => html`<div><dt>${name.replaceAll("_", " ")}</dt>
      <dd>${open.has(name) && html`<span class="dim">${open.get(name) === "auto" ? "auto" : "not set"} → </span>`}${name.endsWith("digest") ? html`<code title=${value}>${String(value).slice(0, 12)}…</code> <${Copy} text=${String(value)}>copy</${Copy}>` : html`<code>${String(value)}</code>`}</dd></div>`)}</dl></${Card}>`;
}

/** @param {{other: string, base: Api.Job | null, error: Error | null, changed: {path: string, before: any, after: any}[]}} props */
function Against({ other, base, error, changed }) {
  const shown = (/** @type {any} */ value) => (value === undefined ? html`<span class="dim">not set</span>` : value !== null && typeof value === "object" ? html`<pre>${yaml(value).trim() || JSON.stringify(value)}</pre>` : html`<code>${scalar(value)}</code>`);
  return html`<${Card} title="Changes">
    <div class="stack" style=${{ gap: ".6rem" }}>
      <label class="field">Against the job<span class="row" style=${{ gap: ".4rem", flexWrap: "nowrap" }}><input class="grow" type="text" placeholder="job id" value=${other} onChange=${(/** @type {any} */ event) => setQuery({ with: event.target.value.trim() })} /></span></label>
      <${Trouble} error=${error} />
      ${base && (changed.length
        ? html`<p class="small dim">${plural(changed.length, "value")} changed from <a href=${link(["jobs", base.id, "spec"])}>${base.name}</a>:</p>
          <dl class="diff">${changed.map((one) => html`<div><dt><code>${one.path.slice(1).replaceAll("/", ".")}</code></dt>
            <dd><span class="old"><span class="hidden">before: </span><span aria-hidden="true">−</span> ${shown(one.before)}</span><span class="new"><span class="hidden">now: </span><span aria-hidden="true">+</span> ${shown(one.after)}</span></dd></div>`)}</dl>`
        : html`<p class="small">The spec equals that of <a href=${link(["jobs", base.id, "spec"])}>${base.name}</a>.</p>`)}
      ${!other && html`<p class="small dim">Enter a job's id to see what differs.</p>`}
    </div></${Card}>`;
}

/** @param {{job: Api.Job, base: Api.Job | null}} props */
function Software({ job, base }) {
  const found = job.environment;
  const [wanted, setWanted] = useState("");
  if (!found) return html`<${Card} title="Software"><${Empty}><p>Not known yet. The first attempt that trains records it.</p></${Empty}></${Card}>`;
  const others = new Set(base?.environment?.packages ?? []);
  const differ = base?.environment && base.environment.digest !== found.digest ? found.packages.filter((/** @type {string} */ one) => !others.has(one)) : [];
  const torch = found.packages.find((/** @type {string} */ one) => one.startsWith("torch=="));
  const packages = found.packages.filter((/** @type {string} */ one) => one.toLowerCase().includes(wanted.toLowerCase()));
  const { git } = found;
  return html`<${Card} title="Software of the newest attempt that trained">
    <dl class="pairs">
      <div><dt>Ratchet</dt><dd><code>${found.ratchet}</code></dd></div><div><dt>Python</dt><dd><code>${found.python}</code></dd></div>
      ${torch && html`<div><dt>PyTorch</dt><dd><code>${torch.slice(7)}</code></dd></div>`}
      <div><dt>Git commit</dt><dd>${git?.commit ? html`<code>${git.commit.slice(0, 12)}</code> <${Copy} text=${git.commit}>copy</${Copy}> ${git.changed ? html`<${Badge} tone="wait">${plural(git.changed, "file")} changed</${Badge}>` : html`<${Badge} tone="good">no change</${Badge}>`}` : html`<span class="dim">${git?.reason ?? "not known"}</span>`}</dd></div>
      <div><dt>Digest</dt><dd><code title=${found.digest}>${found.digest.slice(0, 12)}…</code> <${Copy} text=${found.digest}>copy</${Copy}></dd></div></dl>
    ${base?.environment && html`<p class="small" style=${{ marginTop: ".5rem" }}>${differ.length ? html`<span class="word wait">${plural(differ.length, "package")} differ</span> from ${base.name}: ${differ.slice(0, 10).join(", ")}${differ.length > 10 ? " …" : ""}` : html`<span class="word good">The packages are those of</span> ${base.name}.`}</p>`}
    <details style=${{ marginTop: ".6rem" }}><summary class="small">${plural(found.packages.length, "package")}</summary>
      <div class="stack" style=${{ gap: ".4rem", marginTop: ".4rem" }}><div class="row"><input class="grow" type="search" aria-label="Find a package" placeholder="find a package" value=${wanted} onInput=${(/** @type {any} */ event) => setWanted(event.target.value)} /><${Copy} text=${found.packages.join("\n")}>copy all</${Copy}></div>
        <pre class="packages" tabindex="0">${packages.join("\n") || "none"}</pre><p class="dim small">${count(packages.length)} of ${count(found.packages.length)}</p></div></details></${Card}>`;
}
