// @ts-check
/** Differences between specs: pure functions. */

/**
 * A value's leaves by their path, as in ``--set``: ``hook.name``. A list is one leaf unless it has objects. An empty object is no leaf.
 * @param {any} value @param {string} [path] @returns {[string, any][]}
 */
export function leaves(value, path = "") {
  if (value === null || typeof value !== "object") return [[path, value]];
  if (Array.isArray(value) && !value.some((one) => one !== null && typeof one === "object")) return [[path, value]];
  const entries = Object.entries(value);
  if (!entries.length && Array.isArray(value)) return [[path, value]];
  return entries.flatMap(([key, inner]) => leaves(inner, path ? `${path}.${key}` : key));
}

/**
 * The keys whose values are not the same in all specs, each with one JSON text per spec; ``null`` where the key is missing.
 * @param {any[]} specs @param {string[]} [without] - keys that are left out @returns {{key: string, values: string[]}[]}
 */
export function differences(specs, without = []) {
  const maps = specs.map((spec) => new Map(leaves(spec)));
  const keys = [...new Set(maps.flatMap((map) => [...map.keys()]))].filter((key) => !without.includes(key)).sort();
  return keys.map((key) => ({ key, values: maps.map((map) => JSON.stringify(map.get(key) ?? null)) }))
    .filter(({ values }) => values.some((value) => value !== values[0]));
}
