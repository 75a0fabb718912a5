// @ts-check
/** The lineage of checkpoints as rails over steps, with what each save cost below, on the same steps. */
import { classes, html, useEffect, useRef, useState } from "../dom.js";
import { count, duration, number, size } from "../format.js";
import { causeText, causeTone } from "../meaning.js";
import { elsewhere } from "../route.js";
import { layOut, scaleOf } from "../rails.js";

const GUTTER = 92;
const RIGHT = 28;
const RAIL = 38;
const STRIP = 46;
const ROOM = 18;

/** @typedef {{mark: string, word: string, tone: string}} Sign */
/** @type {Record<string, Sign>} */
export const SIGNS = {
  pinned: { mark: "⚑", word: "pinned", tone: "held" }, best: { mark: "★", word: "best", tone: "wait" }, bestHere: { mark: "★", word: "best on this page", tone: "wait" },
  stored: { mark: "↑", word: "in the object store", tone: "good" }, verified: { mark: "✓", word: "verified", tone: "good" },
  damaged: { mark: "!", word: "damaged", tone: "bad" }, quarantined: { mark: "■", word: "quarantined", tone: "bad" },
  deleted: { mark: "○", word: "deleted", tone: "quiet" }, finished: { mark: "◆", word: "the final one", tone: "good" },
};

/**
 * ``whole``: the best of all stored ones; else of those that one page lists.
 * @typedef {{id: string, whole: boolean}} Best
 */

/** What is to be said of a checkpoint, in the order of SIGNS. @param {Api.Checkpoint} one @param {Best | null} best */
export const signsOf = (one, best) => [
  one.pinned && "pinned", best !== null && one.id === best.id && (best.whole ? "best" : "bestHere"), one.uri && one.uploaded_at && "stored", one.verification === "ok" && "verified",
  one.verification === "damaged" && "damaged", one.state === "quarantined" && "quarantined", one.state === "deleted" && "deleted", one.finished && "finished",
].filter(Boolean).map((key) => SIGNS[/** @type {string} */ (key)]);

/** @param {{current: HTMLElement | null}} ref @param {number} first */
function useWidth(ref, first) {
  const [width, setWidth] = useState(first);
  useEffect(() => {
    const place = ref.current;
    if (!place) return undefined;
    const sized = new ResizeObserver(() => setWidth(place.clientWidth || first));
    sized.observe(place);
    return () => sized.disconnect();
  }, []);
  return width;
}

/**
 * @param {{job: Api.Job, items: Api.Checkpoint[], attempts: Api.Attempt[], forks: {fork: string, checkpoint: string}[], selected: string | null, best: Best | null,
 *          hrefOf: (id: string) => string}} props
 */
export function Lineage({ job, items, attempts, forks, selected, best, hrefOf }) {
  const ref = useRef(/** @type {HTMLElement | null} */ (null));
  const outer = useWidth(ref, 900);
  // Where the figure is wider than the page, the selected checkpoint or else the newest one is seen first.
  useEffect(() => {
    const box = ref.current?.firstElementChild;
    if (!box) return;
    const chosen = box.querySelector('[aria-current="true"]');
    box.scrollLeft = chosen ? box.scrollLeft + chosen.getBoundingClientRect().left - box.getBoundingClientRect().left - box.clientWidth / 2 : box.scrollWidth;
  }, [outer]);
  const { nodes, rails } = layOut(items);
  const steps = nodes.map((node) => node.step);
  const wide = Math.max(outer, GUTTER + RIGHT + ROOM * new Set(steps).size);
  const { x, even } = scaleOf(steps, GUTTER + 16, wide - RIGHT, ROOM);
  const [root, start] = job.forked_from?.split("/") ?? [];
  const top = 34 + (forks.length ? 16 : 0);
  const y = (/** @type {number} */ rail) => top + rail * RAIL;
  const axis = y(rails - 1) + 30;
  const strips = axis + 46;
  const ends = attempts.filter((one) => one.cause && one.last_step >= steps[0] && one.last_step <= steps[steps.length - 1]);
  const saves = /** @type {[string, (one: Api.Checkpoint) => number | null, (value: any) => string, string][]} */ ([
    ["pause", (one) => one.stall, duration, "held"], ["save time", (one) => one.seconds, duration, "busy"], ["size", (one) => one.size, size, "quiet"],
  ]);
  const mostOf = (/** @type {(one: Api.Checkpoint) => number | null} */ of) => Math.max(...items.map((one) => of(one) ?? 0), 1e-9);
  const baseOf = (/** @type {number} */ n) => strips + (n + 1) * STRIP - 8;
  const height = strips + saves.length * STRIP + 4;
  const { thick, at } = bars(nodes, x);
  return html`<figure class="chart lineage" ref=${ref}><div class="scroll" tabindex="0" role="region" aria-label="Lineage over steps">
    <svg class="rails" width=${wide} height=${height} role="group" aria-label=${`${items.length} checkpoints over steps; the table below has the same facts`}>
      ${nodes.map((node) => html`<path key=${`edge ${node.id}`} class=${classes("edge", node.rail ? "quiet" : "busy", node.gap && "gap")} d=${edge(node, x, y)} />`)}
      ${labels(steps, x).map(([step, at]) => html`<text x=${at} y=${axis} text-anchor="middle">${count(step)}</text>`)}
      ${ends.map((one) => html`<path key=${`end ${one.number}`} class=${causeTone(one.cause)} fill="var(--tone)" d=${`M${x(one.last_step)} ${axis + 9}l5 9h-10z`}><title>Attempt ${one.number} ended at step ${one.last_step}: ${causeText(one.cause)}</title></path>`)}
      ${saves.map(([name, of, text, tone], n) => {
        const [most, base] = [mostOf(of), baseOf(n)];
        return html`<g key=${name} class=${tone}>
          <line x1=${GUTTER} x2=${wide - 8} y1=${base} y2=${base} stroke="var(--line)" />
          ${nodes.map((node) => {
            const value = of(node.item);
            const high = ((STRIP - 14) * (value ?? 0)) / most;
            return value !== null && html`<rect x=${at(node)} y=${base - Math.max(1, high)} width=${thick} height=${Math.max(1, high)} rx="1.5" fill="var(--tone)" opacity=${node.id === selected || (!selected && !node.rail) ? 1 : 0.5}><title>${name} at step ${node.step}: ${text(value)}</title></rect>`;
          })}</g>`;
      })}
      ${forks.map((fork, n) => {
        const before = forks.slice(0, n).filter((one) => one.checkpoint === fork.checkpoint).length;
        const node = nodes.find((one) => one.id === fork.checkpoint);
        return node && html`<a key=${fork.fork} href=${elsewhere(["jobs", fork.fork])} role=${elsewhere(["jobs"]) ? undefined : "img"} aria-label=${`Fork ${fork.fork} from step ${node.step}`}><path class="edge held" d=${`M${x(node.step)} ${y(node.rail)}C${x(node.step) + 4} ${top - 26} ${x(node.step) + 8} ${top - 30} ${x(node.step) + 16} ${top - 34}`} /><text x=${x(node.step) + 19 + 26 * Math.min(before, 2)} y=${top - 31} class="held toned">fork</text></a>`;
      })}
      ${nodes.map((node) => html`<${Mark} key=${node.id} node=${node} x=${x(node.step)} y=${y(node.rail)} chosen=${node.id === selected} signs=${signsOf(node.item, best)} href=${hrefOf(node.id)} />`)}
    </svg></div>
    <svg class="rails names" width=${GUTTER - 4} height=${height} aria-hidden="true">
      <text x="0" y=${y(0) + 4} class="strong">current line</text>${rails > 1 && html`<text x="0" y=${y(1) + 4}>abandoned</text>`}
      <text x="0" y=${axis}>step</text><text x="0" y=${axis + 20}>ends</text>
      ${saves.map(([name, of, text], n) => html`<g key=${name}><text x="0" y=${baseOf(n) - 16} class="strong">${name}</text><text x="0" y=${baseOf(n) - 3}>up to ${text(mostOf(of))}</text></g>`)}</svg>
    <figcaption>
      <span class="row" style=${{ gap: ".35rem", flexWrap: "nowrap" }}><span class="dot busy"></span>current line</span>${rails > 1 && html`<span class="row" style=${{ gap: ".35rem", flexWrap: "nowrap" }}><span class="dot quiet"></span>abandoned: left by a resume from an earlier step</span>`}
      ${Object.values(SIGNS).filter((sign) => items.some((one) => signsOf(one, best).includes(sign))).map((sign) => html`<span class=${sign.tone}><span class="word">${sign.mark}</span> ${sign.word}</span>`)}
      ${ends.length > 0 && html`<span>▲ an attempt ended</span>`}
      ${nodes.some((node) => node.gap) && html`<span>dashed: checkpoints between are not shown</span>`}
      ${even && html`<span>Steps are at even distances, not to scale.</span>`}
      ${root && html`<span>Forked from <a href=${elsewhere(["jobs", root, "checkpoints"], { checkpoint: start })}>${job.forked_from}</a></span>`}
    </figcaption></figure>`;
}

/** @param {import("../rails.js").Node} node @param {(step: number) => number} x @param {(rail: number) => number} y */
function edge(node, x, y) {
  const [to, down] = [x(node.step), y(node.rail)];
  const from = node.parent ? x(node.parent.step) : node.from ? Math.max(GUTTER, x(node.from) - (node.rail ? 0 : 16)) : GUTTER;
  const up = y(node.parent ? node.parent.rail : 0);
  if (up === down) return `M${from} ${down}H${to}`;
  const bend = Math.min(26, to - from);
  return `M${from} ${up}C${from + bend * 0.7} ${up} ${from + bend * 0.3} ${down} ${from + bend} ${down}H${to}`;
}

/**
 * Where bars stand: those of one step side by side, the rail of the current line first.
 * @param {import("../rails.js").Node[]} nodes @param {(step: number) => number} x
 */
function bars(nodes, x) {
  /** @type {Map<number, import("../rails.js").Node[]>} */
  const of = new Map();
  for (const node of [...nodes].sort((a, b) => a.rail - b.rail)) of.set(node.step, [...(of.get(node.step) ?? []), node]);
  const places = [...of.keys()].map(x).sort((a, b) => a - b);
  const closest = Math.min(40, ...places.slice(1).map((place, n) => place - places[n]));
  const most = Math.max(1, ...[...of.values()].map((group) => group.length));
  const thick = Math.max(2, Math.min(14, (0.75 * closest) / most - 1));
  const at = (/** @type {import("../rails.js").Node} */ node) => {
    const group = of.get(node.step) ?? [node];
    return x(node.step) + (group.indexOf(node) - group.length / 2) * (thick + 1) + 0.5;
  };
  return { thick, at };
}

/** Steps whose labels do not touch. @param {number[]} steps @param {(step: number) => number} x @returns {[number, number][]} */
function labels(steps, x) {
  /** @type {[number, number][]} */
  const found = [];
  for (const step of [...new Set(steps)]) {
    const before = found[found.length - 1];
    if (!before || x(step) - before[1] > 14 + 7 * count(step).length) found.push([step, x(step)]);
  }
  return found;
}

/** @param {{node: import("../rails.js").Node, x: number, y: number, chosen: boolean, signs: Sign[], href: string}} props */
function Mark({ node, x, y, chosen, signs, href }) {
  const one = node.item;
  const words = [`step ${one.step}`, `attempt ${one.attempt}`, one.reason, one.lineage, ...signs.map((sign) => sign.word), ...(one.metric === null ? [] : [`metric ${number(one.metric)}`])].join(", ");
  const tone = one.verification === "damaged" || one.state === "quarantined" ? "bad" : node.rail ? "quiet" : "busy";
  const above = signs.filter((sign) => ["⚑", "★", "↑", "◆"].includes(sign.mark));
  return html`<a href=${href} class=${classes("node", tone)} aria-label=${words} aria-current=${chosen ? "true" : undefined}><title>${words}</title>
    <rect x=${x - 9} y=${y - 16} width="18" height="32" fill="transparent" />
    ${chosen && html`<circle cx=${x} cy=${y} r="11.5" fill="none" stroke="var(--tone)" stroke-width="2" />`}
    ${one.state === "quarantined" ? html`<rect x=${x - 7} y=${y - 7} width="14" height="14" rx="2" fill="var(--tone)" />`
      : one.state === "deleted" ? html`<circle cx=${x} cy=${y} r="5" fill="var(--card)" stroke="var(--tone)" stroke-width="1.5" stroke-dasharray="2 2" />`
        : html`<circle cx=${x} cy=${y} r="7" fill="var(--tone)" />`}
    ${one.verification && html`<text x=${x} y=${y + 3.8} text-anchor="middle" class="inside">${one.verification === "ok" ? "✓" : "!"}</text>`}
    ${above.map((sign, n) => html`<text x=${x + (n - (above.length - 1) / 2) * 10} y=${y - 12} text-anchor="end" class=${`${sign.tone} toned`}>${sign.mark}</text>`)}</a>`;
}
