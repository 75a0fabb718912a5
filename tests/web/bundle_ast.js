// @ts-check
/**
 * Compares scripts that the service makes of the pages' modules with the modules: `{modules: {path: text}, scripts: [text]}` on stdin.
 * Of each module, the syntax trees must be the same but for imports and exports, which must connect the same names, and for margins in
 * templates of ``html``, which do not show. Prints the paths of the modules in each script; fails with what differs.
 */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import path from "node:path";
import { parse } from "acorn";

/** A value as JSON would have it, without what only says where something is. `change` may replace a node. */
function plain(node, change) {
  if (Array.isArray(node)) return node.map((one) => plain(one, change));
  if (typeof node === "bigint" || node instanceof RegExp) return String(node);
  if (node === null || typeof node !== "object") return node;
  if (node.type === "TaggedTemplateExpression" && node.tag.name === "html") for (const one of node.quasi.quasis) one.value = one.value.raw.replace(/[ \t]*\n\s*/g, "\n");
  const changed = change(node);
  if (changed !== undefined) return changed;
  return Object.fromEntries(Object.entries(node).filter(([key]) => key !== "start" && key !== "end").map(([key, value]) => [key, plain(value, change)]));
}

const tree = (text) => parse(text, { ecmaVersion: 2023, sourceType: "module" }).body;
const isRegistry = (node) => node?.type === "MemberExpression" && node.object.name === "$modules";
const sorted = (list) => list.map((one) => JSON.stringify(one)).sort();

function fromModule(name, text) {
  const resolve = (source) => path.join(path.dirname(name), source.value);
  const [imports, exports, rest] = [[], [], []];
  for (const node of tree(text)) {
    if (node.type === "ImportDeclaration") {
      for (const one of node.specifiers) imports.push([one.local.name, resolve(node.source), one.imported?.name ?? "default"]);
    } else if (node.type === "ExportNamedDeclaration" && node.declaration) {
      const names = node.declaration.id ? [node.declaration.id.name] : node.declaration.declarations.map((one) => one.id.name);
      exports.push(...names.map((one) => [one, one]));
      rest.push(node.declaration);
    } else if (node.type === "ExportNamedDeclaration") {
      for (const one of node.specifiers) exports.push([one.exported.name, one.local.name]);
      if (node.source) imports.push(...node.specifiers.map((one) => [one.local.name, resolve(node.source), one.local.name]));
    } else if (node.type === "ExportDefaultDeclaration") {
      const id = node.declaration.id?.name;
      exports.push(["default", id ?? "$default"]);
      rest.push(id ? node.declaration : { default: { ...node.declaration, type: node.declaration.type.replace("Declaration", "Expression") } });
    } else rest.push(node);
  }
  const later = (node) => (node.type === "ImportExpression" ? { later: resolve(node.source) } : undefined);
  return { imports: sorted(imports), exports: sorted(exports), rest: plain(rest, later) };
}

function fromScript(body) {
  const [imports, exports, rest] = [[], [], []];
  for (const node of body) {
    const [first] = node.declarations ?? [];
    if (isRegistry(first?.init)) {
      for (const one of first.id.properties) imports.push([one.value.name, first.init.property.value, one.key.name]);
    } else if (node.type === "ReturnStatement") for (const one of node.argument.properties) exports.push([one.key.name, one.value.name]);
    else rest.push(first?.id.name === "$default" ? { default: first.init } : node);
  }
  const later = (node) => {
    if (node.type !== "CallExpression" || node.callee.type !== "MemberExpression") return undefined;
    const { object, property } = node.callee;
    if (object.name === "Promise" && property.name === "resolve" && isRegistry(node.arguments[0])) return { later: node.arguments[0].property.value };
    if (object.type === "ImportExpression") return { later: node.arguments[0].body.property.value };
    const left = object.name === "Promise" && property.name === "reject" && node.arguments[0].arguments[0].value.match(/^(\S+) is left out$/);
    return left ? { later: left[1] } : undefined;
  };
  return { imports: sorted(imports), exports: sorted(exports), rest: plain(rest, later) };
}

const { modules, scripts } = JSON.parse(readFileSync(0, "utf8"));
const found = scripts.map((script) => tree(script).filter((node) => isRegistry(node.expression?.left)).map((node) => {
  const name = node.expression.left.property.value;
  assert.deepEqual(fromScript(node.expression.right.callee.body.body), fromModule(name, modules[name]), name);
  return name;
}));
console.log(JSON.stringify(found));
