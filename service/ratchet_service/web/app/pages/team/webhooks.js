// @ts-check
/** Where jobs' events are sent: for admins. */
import { change } from "../../api.js";
import { ActionButton } from "../../components/actions.js";
import { Badge, Card, Copy, Dialog, Empty, Facts, Table, Trouble } from "../../components/basics.js";
import { html, useState } from "../../dom.js";
import { ago, count, moment, number, plural, quoted } from "../../format.js";
import { useLive, useNow } from "../../live.js";
import { link } from "../../route.js";

/** @typedef {import("../../components/actions.js").Action} Action */

/** A webhook with its new secret; null: of a repeated request. @typedef {Api.Webhook & {secret: string | null}} Made */

/** Types of events, one per line, as a list. @param {string | undefined} text */
const lines = (text) => (text ?? "").split(/\s+/).filter(Boolean);

/** @param {(made: Made) => void} onMade @returns {Action} */
const addAction = (onMade) => ({
  key: "add", title: "Add a webhook", explain: "From now on, events that match are sent to the URL.",
  fields: [
    { name: "url", label: "URL", hint: "https://host/path" },
    { name: "format", label: "Format", optional: true, hint: "standard: signed JSON", options: async () => [["slack", "slack: a text for Slack's incoming webhooks"]] },
    { name: "types", label: "Types of events, one per line, such as job.failed or job.*; without any: ends of jobs and alarms", type: "lines", optional: true },
    { name: "owner", label: "Only jobs of this owner", optional: true },
    { name: "label", label: "Only jobs with this label", optional: true, hint: "key=value" },
  ],
  line: ({ url, format, types, owner, label }) => `ratchet webhook add ${quoted(url || "URL")}${lines(types).map((one) => ` --type ${quoted(one)}`).join("")}${owner ? ` --owner ${quoted(owner)}` : ""}${label ? ` --label ${quoted(label)}` : ""}${format ? " --slack" : ""}`,
  send: async ({ url, format, types, owner, label }) => {
    onMade(await change("POST", "v1/webhooks", { url, ...(format && { format }), ...(lines(types).length > 0 && { types: lines(types) }), ...(owner && { owner }), ...(label && { label }) }));
    return "";
  },
});

/** @param {Api.Webhook} hook @param {(made: Made) => void} onMade @returns {Action[]} */
function actionsOf(hook, onMade) {
  const path = `v1/webhooks/${encodeURIComponent(hook.id)}`;
  const line = (/** @type {string} */ name) => () => `ratchet webhook ${name} ${hook.id}`;
  const enable = (/** @type {boolean} */ enabled, /** @type {string} */ said) => async () => {
    await change("PATCH", path, { enabled });
    return said;
  };
  return [
    {
      key: "test", title: "Send a test", explain: "Send an event of the type webhook.test now. The result comes within 10 seconds.", line: line("test"),
      send: async () => {
        const result = await change("POST", `${path}/test`);
        if (!result.delivered) throw new Error(`Not accepted: ${result.error ?? `status ${result.answer}`}`);
        return `Accepted with status ${result.answer} in ${number(result.seconds)} s.`;
      },
    },
    hook.enabled
      ? { key: "disable", title: "Disable", explain: "Send nothing until it is enabled again. Events that happen meanwhile are sent then.", line: line("disable"), send: enable(false, "The webhook is disabled.") }
      : { key: "enable", title: "Enable", explain: "Continue with the first event that was not delivered, with all tries again.", line: line("enable"), send: enable(true, "The webhook is enabled.") },
    ...(hook.format === "slack" ? [] : [{
      key: "rotate", title: "New secret", explain: "Make a new secret, which is shown once. The old one signs too for 24 hours.", line: line("rotate"),
      send: async () => {
        onMade(await change("POST", `${path}/rotate`));
        return "";
      },
    }]),
    {
      key: "rm", title: "Delete", danger: true, explain: "Delete the webhook with its deliveries. What was not delivered is not sent.", line: line("rm"),
      send: async () => {
        await change("DELETE", path);
        return "The webhook is deleted.";
      },
    },
  ];
}

export default function Webhooks() {
  const [made, setMade] = useState(/** @type {Made | null} */ (null));
  const { data, error, refresh } = useLive("v1/webhooks", { every: 5000 });
  return html`<${Trouble} error=${error} />
    ${data && html`<div class="row spread"><span class="dim">${data.items.length ? plural(data.items.length, "webhook") : ""}</span><${ActionButton} action=${addAction(setMade)} onDone=${refresh} /></div>`}
    ${data?.items.map((hook) => html`<${One} key=${hook.id} hook=${hook} refresh=${refresh} onMade=${setMade} />`)}
    ${data?.items.length === 0 && html`<section class="card"><${Empty}><h2>No webhook yet</h2><p>A webhook sends events of jobs to another program, or to a channel of Slack.</p></${Empty}></section>`}
    ${made?.format === "standard" && html`<${Dialog} title="The secret of the webhook" onClose=${() => setMade(null)}>
      ${made.secret
        ? html`<p>Receivers verify signatures with it. It is shown this once.</p><div class="command"><code>${made.secret}</code><${Copy} text=${made.secret} label="Copy the secret">copy</${Copy}></div>`
        : html`<p class="notice wait">The first answer was lost, and with it the secret. Make a new one.</p>`}
      <div class="row end"><button type="button" class="primary" onClick=${() => setMade(null)}>Done</button></div></${Dialog}>`}`;
}

/** @param {{hook: Api.Webhook, refresh: () => void, onMade: (made: Made) => void}} props */
function One({ hook, refresh, onMade }) {
  const [open, setOpen] = useState(hook.failures > 0);
  const [tone, words] = !hook.enabled ? ["bad", "disabled"] : hook.failures ? ["wait", `failing: ${plural(hook.failures, "failure")} in a row`] : ["good", "enabled"];
  const filter = [hook.owner && `owner ${hook.owner}`, hook.label].filter(Boolean).join(", ");
  return html`<${Card} title=${html`<span class="value">${hook.url}</span>`} aside=${html`<${Badge} tone=${tone}>${words}</${Badge}>`}>
    <div class="stack">
      ${!hook.enabled && html`<p class="notice bad small">${hook.disabled_reason}${hook.disabled_at ? `, ${moment(hook.disabled_at)}` : ""}</p>`}
      <${Facts} items=${[
        ["Format", hook.format], ["Jobs", filter || "all"], ["Jobs held back", count(hook.pending)], ["Created", html`<span title=${hook.created_at}>${moment(hook.created_at)} by ${hook.created_by}</span>`],
        ...(hook.new_after ? [["New events wait until", moment(hook.new_after)]] : []),
        ...(hook.old_secret_until ? [["Old secret signs until", moment(hook.old_secret_until)]] : []), ["Id", html`<code>${hook.id}</code>`],
      ]} />
      <p class="small value"><span class="dim">Events:</span> ${hook.types.join(", ")}</p>
      <div class="row actions">${actionsOf(hook, onMade).map((action) => html`<${ActionButton} key=${action.key} action=${action} onDone=${refresh} />`)}</div>
      <details open=${open} onToggle=${(/** @type {any} */ event) => setOpen(event.target.open)}><summary class="small">Last deliveries</summary>${open && html`<${Deliveries} id=${hook.id} />`}</details></div></${Card}>`;
}

/** @type {Record<string, string>} */
const TONES = { delivered: "good", retrying: "wait", waiting: "wait", failed: "bad", dropped: "quiet" };

/** @param {{id: string}} props */
function Deliveries({ id }) {
  const { data, error } = useLive(`v1/webhooks/${encodeURIComponent(id)}/deliveries`, { every: 5000 });
  const now = useNow();
  return html`<${Trouble} error=${error} />
    ${data && (data.items.length
      ? html`<div class="inset"><${Table} caption="Last deliveries, the newest event first" tight stacked head=${["Event", "Job", "Status", "Tries", "Answer", "Changed"]}
          rows=${data.items.map((one) => [one.type, html`<a href=${link(["jobs", one.job_id])}><code>${one.job_id}</code></a>`,
            html`<${Badge} tone=${TONES[one.status] ?? "quiet"}>${one.status}</${Badge}>`, html`<span class="small nowrap">${one.tries === 1 ? "1 try" : `${count(one.tries)} tries`}</span>`,
            html`<span class="small value">${one.error ?? (one.answer ? `status ${one.answer}` : "")}${one.next_try ? html` <span class="dim">next try ${moment(one.next_try)}</span>` : ""}</span>`, html`<span class="small dim nowrap" title=${one.at}>${ago(one.at, now)}</span>`])} /></div>`
      : html`<p class="small dim">Nothing was sent yet, but for tests.</p>`)}`;
}
