// @ts-check
/** A button that copies a text. */
import { html, useState } from "../dom.js";
import { copyText } from "./basics.js";

/** @param {{text: string, children: any}} props */
export function Copy({ text, children }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`<button type="button" class="plain" onClick=${copy}>${copied ? "copied" : children}</button>`;
}
