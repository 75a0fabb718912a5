// @ts-check
/** Small parts that all pages use. */
import { TokenNeeded } from "../api.js";
import { classes, html, useEffect, useRef, useState } from "../dom.js";
import { phaseTone } from "../meaning.js";

/** @param {{phase: string}} props */
export const Phase = ({ phase }) => html`<span class=${classes("badge", phaseTone(phase))}>${phase}</span>`;

/** @param {{tone: string, children: any, title?: string}} props */
export const Badge = ({ tone, children, title }) => html`<span class=${classes("badge", tone)} title=${title}>${children}</span>`;

/**
 * A card with a heading.
 * @param {{title?: any, aside?: any, tone?: string, flush?: boolean, children: any, id?: string}} props
 */
export const Card = ({ title, aside, tone, flush, children, id }) => html`
  <section class=${classes("card", tone && `tone ${tone}`, flush && "flush")} id=${id}>
    ${title && html`<header><h2>${title}</h2>${aside && html`<small>${aside}</small>`}</header>`}
    ${children}
  </section>`;

/** @param {{job: Api.Job}} props */
export const Warnings = ({ job }) => job.warnings?.length > 0 && html`<${Card} title="Warnings of the submission" tone="wait">${job.warnings.map((one) => html`<p class="small"><code>${one.pointer}</code> ${one.detail}</p>`)}</${Card}>`;

/** Terms and values in a row. @param {{items: [any, any, string?][]}} props - term, value, title */
export const Facts = ({ items }) => html`
  <dl class="facts">${items.map(([term, value, title]) => html`<div title=${title}><dt>${term}</dt><dd>${value}</dd></div>`)}</dl>`;

/** @param {{share: number | null, label: string, tone?: string}} props - share: 0 to 1 */
export const Bar = ({ share, label, tone }) => html`
  <div class=${classes("bar", tone)} role="progressbar" aria-label=${label} aria-valuemin="0" aria-valuemax="100"
    aria-valuenow=${share === null ? undefined : Math.round(100 * share)}>
    <span style=${{ width: `${100 * Math.min(1, share ?? 0)}%` }}></span></div>`;

/** What is shown when there is nothing to show. @param {{children: any}} props */
export const Empty = ({ children }) => html`<div class="empty">${children}</div>`;

/** An error above what is shown, or in its place. @param {{error: Error | null}} props */
export const Trouble = ({ error }) =>
  error && !(error instanceof TokenNeeded) && html`<p class="notice bad" role="status">${error.message}</p>`;

/** In the place of a page or tab that could not be loaded or drawn. @param {{error: Error}} props */
export const Broken = ({ error }) => html`<div class="stack"><${Trouble} error=${new Error(`This page failed: ${error.message}`)} />
  <p><button type="button" onClick=${() => location.reload()}>Load it again</button></p></div>`;

/** A button that copies a text. ``label``: for screen readers, if the button's own text does not say what. @param {{text: string, children: any, label?: string}} props */
export function Copy({ text, children, label }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`<button type="button" class="plain" onClick=${copy} aria-label=${label}>${copied ? "copied" : children}</button>`;
}

/** A command line with a button that copies it. @param {{line: string}} props */
export const Command = ({ line }) => html`<div class="command"><code>${line.split(" ").map((one) => html`<span>${one}</span> `)}</code><${Copy} text=${line} label=${`Copy: ${line}`}>copy</${Copy}></div>`;

/** @param {string} text */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without TLS on another machine browsers have no clipboard for pages.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/**
 * A table with a caption for screen readers. ``rows``: of cells; ``numbers``: columns that are aligned to the right; ``stacked``: on a
 * phone a row's cells stand below one another, without the head.
 * @param {{caption: string, head: any[], rows: any[][], numbers?: number[], tight?: boolean, stacked?: boolean}} props
 */
export const Table = ({ caption, head, rows, numbers = [], tight, stacked }) => html`
  <div class="scroll" tabindex="0" role="region" aria-label=${caption}><table role="table" class=${classes(tight && "tight", stacked && "queue")}>
    <caption class="hidden">${caption}</caption>
    <thead><tr>${head.map((cell, n) => html`<th scope="col" class=${numbers.includes(n) ? "number" : ""}>${cell}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${row.map((cell, n) => html`<td class=${numbers.includes(n) ? "number" : ""}>${cell}</td>`)}</tr>`)}</tbody>
  </table></div>`;

/**
 * A modal dialog while it is rendered. ``onClose``: it was closed, also by Escape.
 * @param {{title: string, onClose: () => void, children: any}} props
 */
export function Dialog({ title, onClose, children }) {
  const ref = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => {
    const shown = ref.current;
    if (shown && !shown.open) shown.showModal();
    return () => shown?.close();
  }, []);
  return html`<dialog ref=${ref} aria-label=${title} onCancel=${(/** @type {Event} */ event) => { event.preventDefault(); onClose(); }}>
    <div class="stack"><h2>${title}</h2>${children}</div></dialog>`;
}

/**
 * A choice of a few, as buttons side by side.
 * @param {{label: string, options: [string, string][], value: string, onChange: (value: string) => void}} props
 */
export const Choice = ({ label, options, value, onChange }) => html`
  <span class="group" role="group" aria-label=${label}>
    ${options.map(([key, text]) => html`<button type="button" aria-pressed=${String(key === value)} onClick=${() => onChange(key)}>${text}</button>`)}
  </span>`;
