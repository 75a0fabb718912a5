// @ts-check
/** The frame of every page: navigation, sign-in, and notices of what an action did. */
import { TokenNeeded, read, setToken, token } from "../api.js";
import { classes, html, useEffect, useState } from "../dom.js";
import { moment, plural } from "../format.js";
import { recorded } from "../recorded.js";
import { elsewhere, link } from "../route.js";
import { Dialog } from "./basics.js";

/** @type {[string, string][]} */
const PAGES = [["jobs", "Jobs"], ["queue", "Queue"], ["fleet", "Fleet"], ["team", "Team"]];
const THEME = "ratchet.theme";

/** @param {string} text @param {"good" | "bad"} [tone] */
export function notify(text, tone = "good") {
  window.dispatchEvent(new CustomEvent("notice", { detail: { text, tone } }));
}

/** Who the caller is, once per sign-in: name, roles and whether tokens are needed at all. Nobody in a report. */
export function useCaller() {
  const [caller, setCaller] = useState(/** @type {Api.Caller | null} */ (null));
  useEffect(() => {
    if (recorded) return undefined;
    let timer = 0;
    const ask = () => {
      clearTimeout(timer);
      read("v1/whoami").then(({ data }) => setCaller(data), (error) => {
        setCaller(null);
        if (!(error instanceof TokenNeeded)) timer = window.setTimeout(ask, 5000);
      });
    };
    ask();
    window.addEventListener("signed-in", ask);
    return () => {
      clearTimeout(timer);
      window.removeEventListener("signed-in", ask);
    };
  }, []);
  return caller;
}

/** @param {{section: string, caller: Api.Caller | null, children: any}} props */
export function Frame({ section, caller, children }) {
  return html`
    <a class="skip" href="#content" onClick=${(/** @type {Event} */ event) => { event.preventDefault(); document.getElementById("content")?.focus(); }}>Skip to the content</a>
    <header class="top"><div>
      <a class="brand" href=${elsewhere(["jobs"])}><svg viewBox="0 0 32 32" aria-hidden="true"><rect width="32" height="32" rx="7" fill="var(--busy)"/><path d="M8 22 L8 10 L14 16 L14 10 L20 16 L20 10 L26 16" fill="none" stroke="var(--card)" stroke-width="3" stroke-linejoin="round" stroke-linecap="round"/></svg>Ratchet</a>
      ${!recorded && html`<nav aria-label="Pages">${PAGES.map(([key, text]) => html`<a href=${link([key])} aria-current=${key === section ? "page" : undefined}>${text}</a>`)}</nav>`}
      <span class="grow"></span>
      <span class="row small">
        ${!recorded && html`<a class="dim" href="docs">REST API</a>`}
        <${Theme} />
        ${caller && html`<span class="dim">${caller.owner}</span>`}
        ${token() && html`<button class="plain" type="button" onClick=${signOut}>Sign out</button>`}
      </span>
    </div></header>
    <main class="page" id="content" tabindex="-1"><${Made} />${children}</main>
    <${SignIn} /><${Notices} />`;
}

/** Of a report: when and where it was made, and what it lacks. */
function Made() {
  if (!recorded) return null;
  const { job, made_at: at, service, ratchet, left_out: missing } = recorded;
  return html`<details class="notice quiet made small"><summary>Report of <strong>${job.name}</strong>, made <time dateTime=${at}>${moment(at)}</time> from ${service}, Ratchet ${ratchet}. Ages are as of then. ${plural(missing.length, "part")} left out</summary>
    <ul>${missing.map((text) => html`<li>${text}</li>`)}</ul></details>`;
}

function signOut() {
  setToken("");
  location.reload();
}

function Theme() {
  const [theme, setTheme] = useState((recorded ? null : localStorage.getItem(THEME)) ?? "auto");
  useEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    if (!recorded) localStorage.setItem(THEME, theme); // files have no storage in some browsers
    window.dispatchEvent(new Event("theme-changed"));
  }, [theme]);
  const next = /** @type {Record<string, string>} */ ({ auto: "dark", dark: "light", light: "auto" })[theme] ?? "auto";
  return html`<button class="plain" type="button" onClick=${() => setTheme(next)} aria-label=${`Theme: ${theme}. Change to ${next}`}>${/** @type {Record<string, string>} */ ({ auto: "◐", dark: "☾", light: "☀" })[theme]}</button>`;
}

/** Asks for a token when a request was refused for want of one. */
function SignIn() {
  const [problem, setProblem] = useState(/** @type {Error | null} */ (null));
  const [odd, setOdd] = useState(false);
  useEffect(() => {
    const needed = (/** @type {any} */ event) => {
      // A late refusal of the token that was replaced meanwhile asks for nothing.
      if ((event.detail.used ?? token()) === token()) setProblem((old) => old ?? event.detail);
    };
    window.addEventListener("token-needed", needed);
    return () => window.removeEventListener("token-needed", needed);
  }, []);
  if (!problem) return null;
  const enter = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const given = String(new FormData(/** @type {HTMLFormElement} */ (event.target)).get("token")).trim();
    setOdd(!/^[\x21-\x7e]+$/.test(given));
    if (!/^[\x21-\x7e]+$/.test(given)) return; // a header cannot have other characters
    setToken(given);
    setProblem(null);
    window.dispatchEvent(new Event("signed-in"));
  };
  return html`<${Dialog} title="Sign in" onClose=${() => {}}>
    ${odd ? html`<p class="notice bad" role="alert">A token has only letters, digits and signs, without spaces.</p>` : token() && html`<p class="notice bad">${problem.message}</p>`}
    <form onSubmit=${enter}>
      <label class="field">API token<input type="password" name="token" required autocomplete="current-password" /></label>
      <p class="dim small">An administrator of this service creates one with <code>ratchet token create</code>. This tab keeps it until it is closed.</p>
      <div class="row end"><button class="primary">Sign in</button></div>
    </form></${Dialog}>`;
}

function Notices() {
  const [notices, setNotices] = useState(/** @type {{key: number, text: string, tone: string}[]} */ ([]));
  useEffect(() => {
    const add = (/** @type {any} */ event) => {
      const one = { key: Date.now() + Math.random(), ...event.detail };
      setNotices((old) => [...old, one]);
      setTimeout(() => setNotices((old) => old.filter((other) => other.key !== one.key)), one.tone === "bad" ? 12_000 : 5000);
    };
    window.addEventListener("notice", add);
    return () => window.removeEventListener("notice", add);
  }, []);
  return html`<div class="toasts" role="status" aria-live="polite">
    ${notices.map((one) => html`<div key=${one.key} class=${classes("notice", one.tone)}>${one.text}</div>`)}</div>`;
}
