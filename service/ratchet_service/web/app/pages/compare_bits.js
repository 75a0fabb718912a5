// @ts-check
/** Two jobs' checkpoints, bit for bit. */
import { read } from "../api.js";
import { Badge, Card, Command, Facts, Table } from "../components/basics.js";
import { html, useEffect, useRef, useState } from "../dom.js";
import { count } from "../format.js";
import { link } from "../route.js";

const ROWS = 10;

/** Asks only on a click: the service reads whole checkpoints. @param {{sides: {id: string, letter: string, job: Api.Job}[]}} props */
export function Bits({ sides: [a, b] }) {
  const [found, setFound] = useState(/** @type {Api.Comparison | null} */ (null));
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  const stop = useRef(/** @type {AbortController | null} */ (null));
  useEffect(() => () => stop.current?.abort(), []);
  const ask = async () => {
    stop.current = new AbortController();
    setBusy(true);
    setError("");
    try {
      setFound((await read(`v1/jobs/${a.id}/compare/${b.id}`, { signal: stop.current.signal })).data);
    } catch (problem) {
      if (stop.current.signal.aborted) return;
      setFound(null);
      setError(/** @type {Error} */ (problem).message);
    }
    setBusy(false);
  };
  return html`<${Card} title="Bit for bit" tone=${found ? (found.identical ? "good" : "bad") : undefined} aside="every tensor and every rank's state">
    <div class="stack">
      <div class="row"><button type="button" class="primary" disabled=${busy} onClick=${ask}>${busy ? "Comparing …" : found ? "Compare again" : "Compare tensors bit for bit"}</button>
        <span class="small dim">The service reads the checkpoints of the first common step at which the jobs differ, or of the newest common step.</span></div>
      ${error && html`<p class="notice bad" role="alert">${error}</p>`}
      <div role="status">${found && html`<${Result} found=${found} a=${a} b=${b} />`}</div>
      <${Command} line=${`ratchet compare ${a.id} ${b.id}`} />
    </div></${Card}>`;
}

/** @param {{found: Api.Comparison, a: {letter: string, id: string}, b: {letter: string, id: string}}} props */
function Result({ found, a, b }) {
  const [all, setAll] = useState(false);
  const shown = all ? found.differences : found.differences.slice(0, ROWS);
  const place = (/** @type {{letter: string, id: string}} */ side, /** @type {string} */ id) => html`${side.letter} <a href=${link(["jobs", side.id, "checkpoints"])}><code>${id}</code></a>`;
  return html`<div class="stack" style=${{ gap: ".7rem" }}>
    <p><${Badge} tone=${found.identical ? "good" : "bad"}>${found.identical ? "identical" : "different"}</${Badge}> <strong>${found.identical
      ? `All ${count(found.tensors)} tensors and every rank's state have the same bits at step ${count(found.step)}.`
      : `${count(found.different)} tensors or values differ at step ${count(found.step)}.`}</strong></p>
    <${Facts} items=${[["Compared", html`${place(a, found.checkpoint_id)} <span class="dim">with</span> ${place(b, found.with_checkpoint_id)}`],
      ["Tensors", count(found.tensors)],
      ...(found.identical ? [] : [["Equal through", found.equal_through === null ? "no common checkpoint before" : `step ${count(found.equal_through)}`],
        ...(found.first_step !== null ? [["First difference after", `step ${count(found.first_step)}${found.first_part ? `: ${found.first_part}` : ""}`]] : [])])]} />
    ${found.advice && html`<p class="notice wait sentence">${found.advice}</p>`}
    ${found.differences.length > 0 && html`<${Table} caption="Differences, causes before consequences" tight head=${["Component", "Rank", "Place", "Difference"]}
      rows=${shown.map((one) => [one.component, one.rank ?? "all", html`<code>${one.place}</code>`, one.detail])} />`}
    ${found.different > shown.length && html`<p class="small dim">${shown.length < found.differences.length && html`<button type="button" class="plain" onClick=${() => setAll(true)}>Show ${count(found.differences.length)}</button> `}${count(found.different - shown.length)} more differences are left out.</p>`}
    ${found.unsaved.length > 0 && html`<p class="small">Changed by training, but in no checkpoint, so not compared: <code>${found.unsaved.join(", ")}</code></p>`}</div>`;
}
