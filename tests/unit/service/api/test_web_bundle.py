"""The scripts that are made of the modules of the web pages."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ratchet_service.api.routes.pages import CHUNKS, WITHOUT
from ratchet_service.api.web_bundle import bundle, report_page
from tests.support.docs import ROOT

WEB = ROOT / "service" / "ratchet_service" / "web"
TESTS = ROOT / "tests" / "web"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node: apt-get install nodejs")
needs_acorn = pytest.mark.skipif(
    NODE is None or not (TESTS / "node_modules" / "acorn").is_dir(), reason="needs node and npm ci in tests/web"
)


def node(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    assert NODE is not None
    return subprocess.run([NODE, *arguments], input=text, capture_output=True, text=True, timeout=120)


def write(folder: Path, modules: dict[str, str]) -> Path:
    for name, text in modules.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def compared(web: Path, scripts: list[str]) -> subprocess.CompletedProcess[str]:
    modules = {path.relative_to(web).as_posix(): path.read_text() for path in web.rglob("*.js")}
    return node(str(TESTS / "bundle_ast.js"), text=json.dumps({"modules": modules, "scripts": scripts}))


def inline_scripts(page: str) -> list[tuple[dict[str, str | None], str]]:
    found: list[tuple[dict[str, str | None], str]] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag == "script":
                found.append((dict(attrs), ""))

        def handle_data(self, data: str) -> None:
            if self.lasttag == "script" and found and data.strip():
                found[-1] = (found[-1][0], found[-1][1] + data)

    Parser(convert_charrefs=False).feed(page)
    return found


@needs_acorn
def test_scripts_of_the_pages_say_what_the_modules_say_and_lack_none() -> None:
    chunks = bundle(WEB, CHUNKS, WITHOUT)
    done = compared(WEB, [*chunks.values(), inline_scripts(report_page(WEB))[1][1]])
    assert done.returncode == 0, done.stderr
    *parts, report = json.loads(done.stdout)
    together = [name for part in parts for name in part] + list(WITHOUT)
    assert sorted(together) == sorted(
        path.relative_to(WEB).as_posix() for path in (*(WEB / "app").rglob("*.js"), *(WEB / "vendor").glob("*.js"))
    )
    assert {*WITHOUT} < set(report) < set(together) and "app/pages/job/metrics.js" in report


@needs_acorn
@pytest.mark.parametrize(
    "text",
    [
        "export const text = `a\n  /** b */\n`;",
        'export const text = "/** a */ b";',
        "export const text = `\n// a\n`;",
        "export const text = `a\n  b`;",
    ],
)
def test_comparison_of_scripts_with_modules_finds_text_that_was_taken_for_a_comment(tmp_path: Path, text: str) -> None:
    done = compared(write(tmp_path, {"a.js": text}), list(bundle(tmp_path, {"main.js": ["a.js"]}).values()))
    assert done.returncode != 0 and "a.js" in done.stderr


MODULES: dict[str, str] = {
    "app/start.js": """
import { double as twice, text } from "./shared.js";
import shared from "./shared.js";
import { again } from "./passed_on.js";
console.log(twice(again), text, shared());
/** @type {any} */ const later = import("./later.js");
later.then(({ default: Page, answer }) => console.log(new Page().name, answer()));
// import("./nothing.js") is left out, as every comment
import("./left_out.js").catch((error) => console.log(error.message));
""",
    "app/shared.js": """
/** Doubles. @param {number} n */
export const double = (n) => 2 * n;
export const text = "</script><!-- import";
let calls = 0;
export default function () { calls += 1; return calls; }
""",
    "app/passed_on.js": 'export { seven as again } from "./deep/seven.js";\n',
    "app/deep/seven.js": "const n = 7;\nexport {\n  n as seven,\n};\n",
    "app/later.js": """
import shared from "./shared.js";
export default class Page { name = "page"; }
export async function never() {}
export const answer = () => shared();
""",
    "app/left_out.js": "export const x = 1;\n",
}
PRINTED = "14 </script><!-- import 1\napp/left_out.js is left out\npage 2\n"


@needs_node
@pytest.mark.parametrize(
    "chunks", [{"main.js": ["app/start.js"]}, {"main.js": ["app/start.js"], "more.js": ["app/later.js"]}]
)
def test_scripts_do_what_the_modules_do_and_share_one_state(tmp_path: Path, chunks: dict[str, list[str]]) -> None:
    made = bundle(write(tmp_path / "web", MODULES), chunks, ["app/left_out.js"])
    write(tmp_path / "made", made | {"package.json": '{"type": "module"}'})
    assert list(made) == list(chunks) and "Doubles" not in "".join(made.values())
    done = node(str(tmp_path / "made" / "main.js"))
    assert sorted(done.stdout.splitlines()) == sorted(PRINTED.splitlines()), done.stderr


@needs_node
def test_script_of_another_version_of_the_pages_is_refused(tmp_path: Path) -> None:
    chunks = {"main.js": ["app/start.js"], "more.js": ["app/later.js"]}
    old = bundle(write(tmp_path / "web", MODULES), chunks, ["app/left_out.js"])
    new = bundle(
        write(tmp_path / "web", {"app/passed_on.js": "export const again = 8;\n"}), chunks, ["app/left_out.js"]
    )
    write(
        tmp_path / "made", {"main.js": old["main.js"], "more.js": new["more.js"], "package.json": '{"type": "module"}'}
    )
    done = node(str(tmp_path / "made" / "main.js"))
    assert done.returncode != 0 and "does not provide an export named" in done.stderr


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('import * as all from "./b.js";', "a.js:2: .*import \\* as all"),
        ('import "./b.js";', "a.js:2: .*form"),
        ('import b, { one } from "./b.js";', "a.js:2: .*form"),
        ('import { one } from "./nothing.js";', "a.js:2: there is no module ./nothing.js"),
        ('import { one } from "preact";', "a.js:2: there is no module preact"),
        ('import { two } from "./b.js";', "a.js:2: b.js exports no two"),
        ('import b from "./b.js";', "a.js:2: b.js exports no default"),
        ("export let n = 1;", "a.js:2: .*export let"),
        ("export var n = 1;", "a.js:2: .*export var"),
        ("export const { n } = {};", "a.js:2: .*export const {"),
        ("export function* n() {}", "a.js:2: .*function\\*"),
        ('export * from "./b.js";', "a.js:2: .*export \\*"),
        ("export default { n: 1 };", "a.js:2: .*export default {"),
        ("const n = import.meta.url;", "a.js:2: .*import.meta"),
        ('const n = import("./b.js" + x);', "a.js:2: .*form"),
        ('const n = import("./nothing.js");', "a.js:2: there is no module ./nothing.js"),
        ('import { c } from "./c.js";', "modules import one another: a.js -> c.js -> a.js"),
    ],
)
def test_syntax_that_is_not_known_is_refused_with_file_and_line(tmp_path: Path, text: str, error: str) -> None:
    modules = {
        "a.js": f"/** A. */\n{text}\n",
        "b.js": "export const one = 1;\n",
        "c.js": 'import { a } from "./a.js";\nexport const c = 1;\n',
    }
    with pytest.raises(ValueError, match=error):
        bundle(write(tmp_path, modules), {"main.js": ["a.js"]})


def test_module_that_two_later_scripts_need_is_refused(tmp_path: Path) -> None:
    modules = {
        "a.js": "",
        "b.js": 'import { d } from "./d.js";\n',
        "c.js": 'import { d } from "./d.js";\n',
        "d.js": "export const d = [];\n",
    }
    with pytest.raises(ValueError, match=r"c.js:1: more.js and job.js need d.js: import it in main.js"):
        bundle(write(tmp_path, modules), {"main.js": ["a.js"], "job.js": ["b.js"], "more.js": ["c.js"]})


def test_report_is_one_file_that_runs_only_its_own_script_and_has_room_for_data(tmp_path: Path) -> None:
    web = write(
        tmp_path,
        MODULES
        | {
            "app/main.js": MODULES["app/start.js"],
            "style.css": "p { color: red }",
            "vendor/uPlot.css": "",
            "icon.svg": "<svg/>",
        },
    )
    page = report_page(web)
    (data, nothing), (kind, script) = inline_scripts(page)
    assert (data, nothing) == ({"type": "application/json", "id": "recorded"}, "") and kind == {"type": "module"}
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'; " in page
    assert page.count("<script") == 2 and page.count("</script") == 2 and " src=" not in page
    if NODE is not None:
        done = node("--input-type=module", text=script)
        assert done.stdout.startswith("14 </script><!-- import 1\n"), done.stderr
