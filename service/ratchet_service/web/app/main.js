// @ts-check
/** The pages by their addresses. A report has the page of one job. */
import { Broken, Empty } from "./components/basics.js";
import { Frame, useCaller } from "./components/frame.js";
import { html, render, useEffect, useErrorBoundary, useState } from "./dom.js";
import { recorded } from "./recorded.js";
import { link, useRoute } from "./route.js";

/** @type {Record<string, () => Promise<{default: any}>>} */
const PAGES = {
  jobs: () => import("./pages/jobs.js"),
  job: () => import("./pages/job.js"),
  queue: () => import("./pages/queue.js"),
  compare: () => import("./pages/compare.js"),
  fleet: () => import("./pages/fleet.js"),
  team: () => import("./pages/team.js"),
};

function App() {
  const route = useRoute();
  const caller = useCaller();
  const [section = "jobs", id] = route.path;
  if (recorded && id !== recorded.job.id) {
    return html`<${Frame} section="" caller=${null}><${Empty}><p>Not in this report. It has only <a href=${link(["jobs", recorded.job.id])}>${recorded.job.name}</a>.</p></${Empty}></${Frame}>`;
  }
  const name = section === "jobs" && id ? "job" : Object.hasOwn(PAGES, section) && section !== "job" ? section : "jobs";
  return html`<${Frame} section=${section} caller=${caller}><${Page} key=${name} name=${name} route=${route} caller=${caller} /></${Frame}>`;
}

/** A page's module is loaded when it is first shown. @param {{name: string, route: any, caller: Api.Caller | null}} props */
function Page({ name, route, caller }) {
  const [found, setFound] = useState(/** @type {{page: any} | null} */ (null));
  const [failed, setFailed] = useState(/** @type {Error | null} */ (null));
  const [error] = useErrorBoundary((/** @type {any} */ wrong) => console.error(wrong));
  useEffect(() => {
    PAGES[name]().then((module) => setFound({ page: module.default }), setFailed);
  }, [name]);
  if (error || failed) return html`<${Broken} error=${/** @type {Error} */ (error ?? failed)} />`;
  return found && html`<${found.page} route=${route} caller=${caller} />`;
}

if (recorded && !location.hash) location.replace(link(["jobs", recorded.job.id]));
render(html`<${App} />`, /** @type {Element} */ (document.getElementById("app")));
