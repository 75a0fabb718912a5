// @ts-check
/** Checkpoints as a graph over steps: which rail each one is on, and from which it descends. Pure functions. */

/**
 * ``from``: the step that it descends from; ``parent``: the node of that step, if it is shown; ``gap``: something between them is not.
 * @typedef {{id: string, step: number, rail: number, item: Api.Checkpoint, parent: Node | null, from: number, gap: boolean}} Node
 */

/** @param {{step: number, attempt: number | null} | null} base */
const keyOf = (base) => (base && base.attempt !== null ? `${base.step} ${base.attempt}` : "");

/**
 * Rail 0 is the current line. Each abandoned branch has a rail of its own below it, the first one that is free over its steps.
 * @param {Api.Checkpoint[]} checkpoints
 * @returns {{nodes: Node[], rails: number}}
 */
export function layOut(checkpoints) {
  const sorted = [...checkpoints].sort((a, b) => a.step - b.step || a.attempt - b.attempt);
  /** @type {Map<string, Node>} */
  const known = new Map();
  /** @type {Node[]} */
  const nodes = [];
  /** @type {Node[][]} */
  const branches = [];
  /** @type {Map<Node, Node[]>} */
  const branchOf = new Map();
  /** @type {Node | null} */
  let line = null;
  for (const item of sorted) {
    const parent = known.get(keyOf(item.parent)) ?? null;
    const node = { id: item.id, step: item.step, rail: 0, item, parent, from: item.parent?.step ?? 0, gap: !parent && Boolean(item.parent?.step) };
    if (item.lineage === "current") {
      if (!node.parent && line) node.parent = line;
      line = node;
    } else {
      const before = /** @type {Node[] | undefined} */ (parent && branchOf.get(parent));
      // Without its parent, which retention has deleted, it continues the newest branch of its attempt.
      const same = before && before[before.length - 1] === parent ? before : parent ? undefined : branches.findLast((branch) => branch[branch.length - 1].item.attempt === item.attempt);
      if (same) {
        node.parent = same[same.length - 1];
        same.push(node);
        branchOf.set(node, same);
      } else {
        const fresh = [node];
        branches.push(fresh);
        branchOf.set(node, fresh);
      }
    }
    known.set(keyOf(item), node);
    nodes.push(node);
  }
  /** @type {number[]} */
  const ends = [];
  for (const branch of branches) {
    const begin = branch[0].from;
    let rail = ends.findIndex((end) => end < begin);
    if (rail < 0) rail = ends.length;
    ends[rail] = branch[branch.length - 1].step;
    for (const node of branch) node.rail = rail + 1;
  }
  return { nodes, rails: 1 + ends.length };
}

/**
 * Places of steps between ``left`` and ``right``: to scale where that leaves ``room`` between neighbours, else at even distances.
 * @param {number[]} steps @param {number} left @param {number} right @param {number} room
 * @returns {{x: (step: number) => number, even: boolean}}
 */
export function scaleOf(steps, left, right, room) {
  const sorted = [...new Set(steps)].sort((a, b) => a - b);
  const last = sorted.length - 1;
  if (last < 1) return { x: () => (left + right) / 2, even: false };
  const whole = sorted[last] - sorted[0];
  const closest = Math.min(...sorted.slice(1).map((step, n) => step - sorted[n]));
  const even = (closest / whole) * (right - left) < room;
  const at = (/** @type {number} */ n) => left + ((right - left) * n) / last;
  const x = (/** @type {number} */ step) => {
    if (!even) return left + ((right - left) * (step - sorted[0])) / whole;
    const n = sorted.findIndex((one) => one >= step);
    if (n < 0) return right;
    if (n === 0 || sorted[n] === step) return at(n);
    return at(n - 1) + (at(n) - at(n - 1)) * ((step - sorted[n - 1]) / (sorted[n] - sorted[n - 1]));
  };
  return { x: (step) => Math.min(right, Math.max(left, x(step))), even };
}
