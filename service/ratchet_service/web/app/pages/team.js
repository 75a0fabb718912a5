// @ts-check
/** What a team looks after together: who changed what, and for admins where events are sent. */
import { html } from "../dom.js";
import { link } from "../route.js";
import Audit from "./team/audit.js";
import Webhooks from "./team/webhooks.js";

/** @param {{route: import("../route.js").Route, caller: Api.Caller | null}} props */
export default function Team({ route, caller }) {
  const tab = route.path[1] ?? "audit";
  const tabs = [["audit", "Audit log"], ...(caller?.scopes.includes("webhooks:write") ? [["webhooks", "Webhooks"]] : [])];
  return html`<div class="stack"><h1>Team</h1>
    <nav class="tabs" aria-label="Parts of the team's page">${tabs.map(([key, text]) => html`<a href=${link(["team", ...(key === "audit" ? [] : [key])])} aria-current=${key === tab ? "page" : undefined}>${text}</a>`)}</nav>
    ${tab === "webhooks" ? html`<${Webhooks} />` : html`<${Audit} query=${route.query} caller=${caller} />`}</div>`;
}
