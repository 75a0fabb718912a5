// @ts-check
/** Hooks that keep what is shown up to date. A hidden page asks for nothing, and a report once. */
import { Problem, TokenNeeded, isFinal, read, serverNow, token } from "./api.js";
import { useCallback, useEffect, useRef, useState } from "./dom.js";
import { recorded } from "./recorded.js";

/** Milliseconds between two polls of a visible page. */
export const EVERY = 2000;

/** @template T @typedef {{data: T | null, error: Error | null, refresh: () => void}} Live */
/** @template T @typedef {(path: string, options?: {etag?: string, signal?: AbortSignal}) => Promise<{data: T, etag: string}>} Load */

/**
 * Read ``path`` again every ``every`` milliseconds while the page is visible. ``data`` stays what it was when the service does
 * not answer for a while; ``error`` says so. Without a path nothing is read. ``load``: reads it, the one that was given first with a path.
 * @template {string} P @template [T=import("./types").Answer<P>] @param {P | null} path
 * @param {{every?: number | null, load?: Load<T>}} [options] - null: read once
 * @returns {Live<T>}
 */
export function useLive(path, { every = EVERY, load = read } = {}) {
  const [state, setState] = useState({ path: /** @type {string | null} */ (null), data: /** @type {any} */ (null), error: /** @type {Error | null} */ (null) });
  const again = useRef(() => {});
  useEffect(() => {
    if (path === null) return undefined;
    const stop = new AbortController();
    let timer = 0;
    let etag = "";
    let text = "";
    let pause = every ?? EVERY;
    const poll = async () => {
      clearTimeout(timer);
      if (document.hidden) return;
      let next = every;
      try {
        const found = await load(path, { etag, signal: stop.signal });
        etag = found.etag;
        pause = every ?? EVERY;
        const now = found.data === null ? text : JSON.stringify(found.data);
        if (now !== text || !text) {
          text = now;
          setState({ path, data: found.data, error: null });
        } else setState((old) => (old.error ? { ...old, error: null } : old));
      } catch (error) {
        if (stop.signal.aborted) return;
        const wrong = /** @type {Error} */ (error);
        if (wrong instanceof TokenNeeded && wrong.used !== token()) return; // a request with the new token is on its way
        if (wrong instanceof TokenNeeded) window.dispatchEvent(new CustomEvent("token-needed", { detail: wrong }));
        setState((old) => ({ path, data: old.path === path ? old.data : null, error: wrong }));
        pause = Math.max(every ?? 0, Math.min(2 * pause, 15_000));
        next = wrong instanceof TokenNeeded ? null : isFinal(wrong) ? every && 5 * every : Math.max(pause, wrong instanceof Problem ? 1000 * wrong.wait : 0);
      }
      clearTimeout(timer); // of a poll that overlapped
      if (next !== null && !recorded) timer = window.setTimeout(poll, next);
    };
    again.current = poll;
    const seen = () => void (document.hidden ? clearTimeout(timer) : poll());
    const signedIn = () => void poll();
    document.addEventListener("visibilitychange", seen);
    window.addEventListener("signed-in", signedIn);
    poll();
    return () => {
      stop.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
      window.removeEventListener("signed-in", signedIn);
    };
  }, [path, every]);
  const refresh = useCallback(() => again.current(), []);
  return state.path === path ? { data: state.data, error: state.error, refresh } : { data: null, error: null, refresh };
}

/** What was read before, until an answer to a changed request is here. @template T @param {Live<T>} live @returns {Live<T>} */
export function useKept(live) {
  const kept = useRef(/** @type {T | null} */ (null));
  if (live.data) kept.current = live.data;
  return { ...live, data: live.data ?? kept.current };
}

/** The service's time in milliseconds, again every second while the page is visible: for ages. */
export function useNow() {
  const [now, setNow] = useState(serverNow());
  useEffect(() => {
    if (recorded) return undefined;
    const timer = setInterval(() => document.hidden || setNow(serverNow()), 1000);
    return () => clearInterval(timer);
  }, []);
  return now;
}
