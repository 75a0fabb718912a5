// @ts-check
/**
 * Compares scripts that the service makes of the pages' modules with the modules: `{modules: {path: text}, scripts: [text]}` on stdin;
 * a script may import from those before it. Of each module, the syntax trees must be the same but for imports and exports, which must
 * connect the same variables, and for templates of ``html``, which must show the same. No module may see a variable of another one
 * that it does not import. Prints the paths of the modules in each script; fails with what differs.
 */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import path from "node:path";
import { parse } from "acorn";
import { analyze } from "eslint-scope";
import htm from "../../service/ratchet_service/web/vendor/htm.js";

/** What a template of ``html`` shows, with the numbers of its values. */
function shown(quasis) {
  const values = quasis.slice(1).map((_, n) => ({ value: n, toString: () => `\0${n}\0` }));
  return htm.call((...parts) => parts, quasis.map((one) => one.value.cooked), ...values) ?? null;
}

/** A value as JSON would have it, without what only says where something is. `change` may replace a node. */
function plain(node, change) {
  if (Array.isArray(node)) return node.map((one) => plain(one, change));
  if (typeof node === "bigint" || node instanceof RegExp) return String(node);
  if (node === null || typeof node !== "object") return node;
  if (node.type === "TaggedTemplateExpression" && node.tag.name === "html") return { shown: plain(shown(node.quasi.quasis), change), values: plain(node.quasi.expressions, change) };
  const changed = change(node);
  if (changed !== undefined) return changed;
  return Object.fromEntries(Object.entries(node).filter(([key]) => !["start", "end", "range", "raw"].includes(key) && typeof value !== "function").map(([key, value]) => [key, plain(value, change)]));
}

const tree = (text) => parse(text, { ecmaVersion: 2023, sourceType: "module", ranges: true });
const isRegistry = (node) => node?.type === "MemberExpression" && node.object.name === "$modules";

function fromModule(name, text) {
  const resolve = (source) => path.join(path.dirname(name), source.value);
  const [imports, exports, rest] = [[], [], []];
  for (const node of tree(text).body) {
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
  return { imports, exports: new Map(exports), text: JSON.stringify(plain(rest, later)) };
}

/** A module in a script: ``lent``: its variables that others see, by their names there; ``renamed``: others' variables by their names in it. */
function fromScript(node) {
  const call = node.declarations?.[0].init ?? node.expression;
  const body = call.callee.body.body.filter((one) => one.type !== "EmptyStatement");
  const returned = body.at(-1)?.type === "ReturnStatement" ? body.pop().argument.elements.map((one) => one.name) : [];
  const rest = body.map((one) => (one.declarations?.[0].id.name === "$default" ? { default: one.declarations[0].init } : one));
  const later = (node) => {
    if (node.type !== "CallExpression" || node.callee.type !== "MemberExpression") return undefined;
    const { object, property } = node.callee;
    if (object.name === "Promise" && property.name === "resolve" && isRegistry(node.arguments[0])) return { later: node.arguments[0].property.value };
    if (object.type === "ImportExpression") return { later: node.arguments[0].body.property.value };
    const left = object.name === "Promise" && property.name === "reject" && node.arguments[0].arguments[0].value.match(/^(\S+) is left out$/);
    return left ? { later: left[1] } : undefined;
  };
  const lent = new Map((node.declarations?.[0].id.elements ?? []).map((one, n) => [one.name, returned[n]]));
  const renamed = new Map(call.callee.params.map((one, n) => [one.name, call.arguments[n].name]));
  return { function: call.callee, lent, renamed, text: JSON.stringify(plain(rest, later)) };
}

const { modules, scripts } = JSON.parse(readFileSync(0, "utf8"));
const read = Object.fromEntries(Object.entries(modules).map(([name, text]) => [name, fromModule(name, text)]));

/** The variable that a module exports under a name: where it is declared, and what it is called there. */
function origin(name, outside) {
  const inside = read[name].exports.get(outside);
  const from = read[name].imports.find(([local]) => local === inside);
  return from ? origin(from[1], from[2]) : `${name} ${inside}`;
}

const called = new Map(); // the variables that modules lend, by what they are called in the scripts
const found = scripts.map((script) => {
  const program = tree(script);
  const scopes = analyze(program, { ecmaVersion: 2023, sourceType: "module" });
  const outer = scopes.globalScope.childScopes[0];
  const names = [];
  if (program.body[0].type !== "ImportDeclaration") called.clear();
  for (const node of program.body.slice(2 - Number(program.body[0].type === "ImportDeclaration"))) {
    if (node.type === "EmptyStatement") continue;
    if (isRegistry(node.expression?.left)) {
      const name = node.expression.left.property.value;
      const members = node.expression.right.properties.map((one) => [one.key.name, called.get(one.value.name)]);
      assert.deepEqual(members, [...read[name].exports.keys()].map((outside) => [outside, origin(name, outside)]), name);
      continue;
    }
    const part = fromScript(node);
    const name = Object.keys(read).find((one) => read[one].text === part.text && !names.includes(one));
    assert(name, `none of ${Object.keys(read).filter((one) => !names.includes(one))} is: ${part.text.slice(0, 2000)}`);
    names.push(name);
    const exported = [...read[name].exports.values()];
    for (const [outside, inside] of part.lent) {
      assert(exported.includes(inside) && !called.has(outside), `${name} lends ${inside} as ${outside}`);
      called.set(outside, `${name} ${inside}`);
    }
    for (const [local, source, of] of read[name].imports) {
      assert.equal(called.get(part.renamed.get(local) ?? local), origin(source, of), `${local} in ${name}`);
    }
    const imported = read[name].imports.map(([local]) => local);
    const seen = scopes.acquire(part.function).through.filter((one) => outer.set.has(one.identifier.name)).map((one) => one.identifier.name);
    assert.deepEqual(seen.filter((one) => one !== "$modules" && !imported.includes(one)), [], `${name} sees variables of other modules`);
  }
  return names;
});
console.log(JSON.stringify(found));
