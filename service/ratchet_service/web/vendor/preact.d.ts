/** The part of Preact that the pages use. */
export function h(type: unknown, props: object | null, ...children: unknown[]): unknown;
export function render(tree: unknown, parent: Element): void;
export const Fragment: unknown;
