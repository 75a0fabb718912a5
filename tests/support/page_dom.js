// Runs the script of the page `/` against a real service: its own fetch, and of a browser's document no more than the page uses.
// node page_dom.js URL FRAGMENT [TOKEN]: prints, as JSON, what the page shows once it shows something that has the text UNTIL
// (a variable of the environment), or what it showed last.
"use strict";
const vm = require("node:vm");

const [url, fragment, token] = process.argv.slice(2);
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/"/g, "&quot;");

class Node {
  constructor(tag) { Object.assign(this, { tag, attributes: {}, children: [], listeners: {}, value: "" }); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener(name, call) { this.listeners[name] = call; }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  set textContent(text) { this.children = [text]; }
  get textContent() { return this.children.map((child) => (child instanceof Node ? child.textContent : child)).join(""); }
  get outerHTML() {
    const attributes = Object.entries(this.attributes).map(([name, value]) => ` ${name}="${escaped(value)}"`).join("");
    return `<${this.tag}${attributes}>${this.children.map((c) => (c instanceof Node ? c.outerHTML : escaped(c))).join("")}</${this.tag}>`;
  }
  all() { return [this, ...this.children.flatMap((child) => (child instanceof Node ? child.all() : []))]; }
}

const places = { main: new Node("main"), trouble: new Node("span") };
const stored = {};
const timers = [];
const requests = [];
const context = vm.createContext({
  document: {
    hidden: false,
    getElementById: (id) => places[id],
    createElement: (tag) => new Node(tag),
    createElementNS: (_, tag) => new Node(tag),
    addEventListener: () => {},
  },
  addEventListener: () => {},
  location: { hash: fragment },
  sessionStorage: { getItem: (key) => stored[key] ?? null, setItem: (key, value) => { stored[key] = value; } },
  fetch: (path, options) => { requests.push(path); return fetch(new URL(path, url + "/"), options); },
  setTimeout: (call) => timers.push(setTimeout(call, 100)),
  clearTimeout: () => {},
  encodeURIComponent, console, TypeError, Error,
});

function done() {
  const tags = places.main.all().map((node) => ({ tag: node.tag, attributes: node.attributes, text: node.textContent }));
  console.log(JSON.stringify({ text: places.main.textContent, html: places.main.outerHTML, trouble: places.trouble.textContent, tags, stored, requests }));
  process.exit(0);
}

(async () => {
  const page = await (await fetch(url + "/")).text();
  vm.runInContext(page.match(/<script>([^]*)<\/script>/)[1], context);
  const end = Date.now() + 30000;
  let used = false;
  while (Date.now() < end && !places.main.textContent.includes(process.env.UNTIL)) {
    const form = places.main.all().find((node) => node.tag === "form");
    if (form && token && !used) {
      used = true;
      places.main.all().find((node) => node.tag === "input").value = ` ${token} `;
      form.listeners.submit({ preventDefault: () => {} });
    }
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  done();
})();
