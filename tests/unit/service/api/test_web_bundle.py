"""The scripts that are made of the modules of the web pages."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ratchet_service.api.routes.pages import CHUNKS, WITHOUT
from ratchet_service.api.web_bundle import bundle, report_page
from ratchet_service.api.web_tokens import compact, without_comments
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


TEXTS = {
    "comment in a template": "`a\n  /** b */\n// c\n`",
    "comment in a string": "\"/** a */ b\" + '// \\'c'",
    "margin in a template": "`a\n  b  \n\n c`",
    "template in a template": "`a  ${{ a: `  b  ${[1].map((n) => `${n}  ${`}`}`)}` }.a}  \\` \\${ $`",
    "regular expression": '"a/b".replace(/[/"`]\\//g, 8 / 2 / 1).split(/`/)',
    "signs": "[1 + +1, 1 - -1, 1 - - -1, 1 .toFixed(1), (() => { let n = 1; return n++ + ++n / 1 })()]",
    "lines": "[(() => { let n = 1\nn\n++\nn\nreturn n })(), ((a) => {\n  return a\n    ?.b\n})({ b: typeof\n1 })]",
}


@needs_node
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_texts_and_signs_stay_what_they_are_without_comments_and_white_space(tmp_path: Path, text: str) -> None:
    program = f"/* a */\nconst value = /* ` */ {text} // ` b\n/** c\n */\nconsole.log( JSON.stringify( value ) )\n"
    short = compact(program)
    assert len(short) < len(program) - 20 and "/* a */" not in short and "// ` b" not in short
    assert without_comments(program).count("\n") == program.count("\n")
    outputs = [node("--input-type=module", text=one) for one in (program, without_comments(program), short)]
    assert outputs[0].stdout and {one.stdout for one in outputs} == {outputs[0].stdout}, outputs[2].stderr


def test_template_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="a template has no end: `b"):
        compact("const a = `b;")


TEMPLATES = """import htm from "../htm.js";
const html = htm.bind((...parts) => parts), a = 1, b = { c: 2 };
console.log(JSON.stringify([html`
  <p
    class="a  b"
    ...${b}
    title=${a}
    hidden
  >  one
    two ${a}
    ${html` <b> ${a}  </b>
    <i/>`} three
    <b>four</b> five
  </p>
`, html`<p>a > b
  c</p>`, html`
  <${a} /> `]));
"""


@needs_node
def test_templates_of_markup_show_the_same_without_margins(tmp_path: Path) -> None:
    web = write(tmp_path, {"package.json": '{"type": "module"}', "htm.js": (WEB / "vendor" / "htm.js").read_text()})
    write(web, {"a/long.js": TEMPLATES, "a/short.js": compact(TEMPLATES)})
    long, short = (node(str(web / "a" / name)) for name in ("long.js", "short.js"))
    without_margins = re.sub(r"\\n +", r"\\n", long.stdout)  # as HTML shows them: a line break in a text is a space
    assert "three" in long.stdout and short.stdout == without_margins, short.stderr
    assert compact(TEMPLATES).count("\n") < 9 and TEMPLATES.count("\n") == 17


@needs_acorn
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("`a  b`", "`a b`"),
        ("<p>c d</p>", "<p>c  d</p>"),
        ("e=1", "e=2"),
        ("return[e]", "return[g]"),
        ("size+i", "g+size"),
        ("const[e]", "const[size]"),
    ],
)
def test_comparison_of_scripts_with_modules_finds_differences(tmp_path: Path, old: str, new: str) -> None:
    modules = {
        "a.js": """
import { e } from "./b.js";
const i = e;
export const f = [`a  b`, html`<p>c d</p>`, size + i];
""",
        "b.js": "export const e = 1;\nconst g = 2;\n",
    }
    web = write(tmp_path, modules)
    [script] = bundle(web, {"main.js": ["a.js"]}).values()
    assert compared(web, [script]).returncode == 0
    assert script.count(old) == 1, script
    done = compared(web, [script.replace(old, new)])
    assert done.returncode != 0 and "AssertionError" in done.stderr, done.stdout


@needs_acorn
def test_comparison_finds_a_variable_of_another_module_in_place_of_the_browser_s(tmp_path: Path) -> None:
    modules = {
        "a.js": 'import { name } from "./b.js";\nimport { c } from "./c.js";\nconsole.log(name, c());\n',
        "b.js": "export const name = 1;\n",
        "c.js": "export const c = () => name;\n",
    }
    web = write(tmp_path, modules)
    done = compared(web, list(bundle(web, {"main.js": ["a.js"]}).values()))
    assert done.returncode != 0 and "c.js sees variables of other modules" in done.stderr


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
