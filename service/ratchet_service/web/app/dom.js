// @ts-check
/** Preact with htm's templates: ``html`<p>${text}</p>` ``. Text is always a text node, never markup. */
import htm from "../vendor/htm.js";
import { Fragment, h, render } from "../vendor/preact.js";

export { Fragment, render };
export {
  useCallback, useEffect, useErrorBoundary, useId, useLayoutEffect, useMemo, useReducer, useRef, useState,
} from "../vendor/hooks.js";

/** @type {(strings: TemplateStringsArray, ...values: any[]) => any} */
export const html = htm.bind(h);

/** @typedef {any} Vnode */

/**
 * Join class names, without those that are false or empty.
 * @param {...(string | false | null | undefined)} names
 */
export const classes = (...names) => names.filter(Boolean).join(" ");
