"""Puts the modules of the web pages together into few scripts: a bundler for exactly the syntax that the pages use."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Final, NamedTuple

from ratchet_service.api.web_tokens import compact, without_comments

_SYNTAX: Final = re.compile(
    r"""
    (?:^|(?<=[;}]))(?:
        import\s*(?:(?P<whole>\w+)\s*|\{(?P<names>[^}]*)\}\s*)from\s*"(?P<source>[^"]+)";?
      | export\s*\{(?P<listed>[^}]*)\}(?:\s*from\s*"(?P<origin>[^"]+)")?;?
      | export[ ]default[ ](?=(?:async[ ])?(?:function|class)[ ](?P<main>\w+))
      | (?P<value>export[ ]default)(?=[ ]\w)
      | export[ ](?=(?:async[ ]function|function|class|const)[ ](?P<declared>\w+))
      | (?P<unknown>(?:import|export)\b(?!\().*)
    )
    | \bimport\("(?P<later>[^"]+)"\)
    | \b(?P<computed>import\s*[.(].*)
    """,
    re.MULTILINE | re.VERBOSE,
)
"""What is rewritten in a module without comments."""
_STYLE_SPACE: Final = re.compile(r"\s*([{};,>])\s*|(?<=:)\s+|[ \t]*\n\s*")
_LATER: Final = re.compile(r'\bimport\("([^"]+)"\)')
_MARKUP: Final = re.compile(r"<(?=!--|/?script)", re.IGNORECASE)
_REPORT_ENTRY: Final = "app/main.js"
_REPORT_WITHOUT: Final = (
    "app/pages/jobs.js",
    "app/pages/queue.js",
    "app/pages/compare.js",
    "app/pages/fleet.js",
    "app/pages/team.js",
)
_REPORT: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src {script_source}; \
style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>Ratchet</title>
<link rel="icon" href="data:image/svg+xml;base64,{icon}">
<style>{style}</style>
</head>
<body>
<div id="app"><noscript>This report needs JavaScript.</noscript></div>
<script type="application/json" id="recorded"></script>
<script type="module">{script}</script>
</body>
</html>
"""


class _Import(NamedTuple):
    """``name``: what ``source`` exports; ``local``: what it is called in the module."""

    source: str
    name: str
    local: str
    line: int


@dataclass
class _Module:
    """A module without its imports and exports. ``exports``: what they are called inside. ``later``: modules that it loads
    when it needs them."""

    body: str = ""
    exports: dict[str, str] = field(default_factory=dict)
    imports: list[_Import] = field(default_factory=list)
    later: list[str] = field(default_factory=list)


def bundle(web: Path, chunks: Mapping[str, Collection[str]], without: Collection[str] = ()) -> dict[str, str]:
    """Return the text of each chunk, an ES module. It has the modules that ``chunks`` names for it (paths below ``web``), those
    that they import, and those that they load later, except ``without`` and what other chunks name. Later chunks use the first
    one's modules. What is loaded later from the same chunk runs when the chunk begins. Each module is a function, which returns
    what others import. Comments and white space are left out.

    Raises ``ValueError`` with file and line for syntax that the pages do not use, and for modules that import one another.
    """
    read = cache(lambda path: _parse(web, path))
    first = next(iter(chunks))
    named = {path for paths in chunks.values() for path in paths}
    homes: dict[str, str] = {}
    for name, paths in chunks.items():
        for path in _in_order(read, paths, {*named, *without}):
            homes.setdefault(path, name)
    for path, home in homes.items():
        for source, wanted, _, line in read(path).imports:
            if wanted not in read(source).exports:
                raise ValueError(f"{path}:{line}: {source} exports no {wanted}")
            if homes[source] not in (home, first):
                raise ValueError(f"{path}:{line}: {home} and {homes[source]} need {source}: import it in {first}")

    lazy = {later for path in homes for later in read(path).later if later not in without}
    names = _names(read, homes, lazy)

    def loaded(path: str, home: str) -> str:
        if path in without:
            return f'Promise.reject(new Error("{path} is left out"))'
        return (
            f'Promise.resolve($modules["{path}"])'
            if homes[path] in (home, first)
            else f'import("./{homes[path]}").then(() => $modules["{path}"])'
        )

    def scope(path: str, home: str) -> str:
        module = read(path)
        body = _LATER.sub(lambda found: loaded(found[1], home), module.body)
        own = {names[path, outside]: inside for outside, inside in module.exports.items() if (path, outside) in names}
        renamed = {one.local: names[_origin(read, one.source, one.name)] for one in module.imports}
        renamed = {local: name for local, name in renamed.items() if local != name}
        text = f"(({','.join(renamed)})=>{{\n{body}"
        text += f"\nreturn[{','.join(own.values())}]}})" if own else "\n})"
        text = (f"const[{','.join(own)}]=" if own else ";") + text + f"({','.join(renamed.values())});\n"
        if path in lazy:
            members = ",".join(f"{outside}:{names[_origin(read, path, outside)]}" for outside in module.exports)
            text += f'$modules["{path}"]={{{members}}};\n'
        return text

    # in the name of what chunks share, so that a page from before an upgrade of the service fails to load one from after it
    version = "v" + hashlib.sha256("".join(read(path).body for path in homes).encode()).hexdigest()[:8]
    borrowed: dict[str, set[str]] = {name: set() for name in chunks}
    for path, home in homes.items():
        origins = {_origin(read, one.source, one.name) for one in read(path).imports}
        origins |= {_origin(read, path, outside) for outside in read(path).exports} if path in lazy else set()
        borrowed[home] |= {names[one] for one in origins if homes[one[0]] == first}
    heads = {
        name: f'import{{{",".join([f"{version} as $modules", *sorted(borrowed[name])])}}}from"./{first}";\n'
        for name in chunks
    }
    lent = sorted(set[str]().union(*(borrowed[name] for name in chunks if name != first)))
    heads[first] = f"const $modules={{}};\nexport{{{','.join([f'$modules as {version}', *lent])}}};\n"
    return {
        name: heads[name] + "".join(scope(path, name) for path, home in homes.items() if home == name)
        for name in chunks
    }


def report_page(web: Path) -> str:
    """Return the page that shows one job without a service: one file, which may load nothing. The job's data are to be put into
    its element ``recorded`` as JSON, with ``<`` written as ``\\u003c``."""
    [script] = bundle(web, {"report.js": [_REPORT_ENTRY]}, _REPORT_WITHOUT).values()
    script = _MARKUP.sub(r"\\x3c", script)  # the same character in strings, templates and regular expressions
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    icon = base64.b64encode((web / "icon.svg").read_bytes()).decode()
    return _REPORT.format(script_source=f"'sha256-{digest}'", icon=icon, style=style(web), script=script)


def style(web: Path) -> str:
    """Return the style sheets as one, without comments and white space."""
    text = "\n".join((web / name).read_text(encoding="utf-8") for name in ("vendor/uPlot.css", "style.css"))
    return _STYLE_SPACE.sub(r"\1", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


def _in_order(read: Callable[[str], _Module], entries: Collection[str], elsewhere: Collection[str]) -> list[str]:
    """Return what belongs to the chunk of ``entries``: what a module imports before it, and what it loads later before that."""
    found: dict[str, None] = {}
    for entry in entries:
        roots, orders = [entry], list[dict[str, None]]()
        for root in roots:
            order: dict[str, None] = {}
            _visit(read, root, (), order)
            orders.append(order)
            roots += {later: None for path in order for later in read(path).later if later not in {*roots, *elsewhere}}
        for order in reversed(orders):
            found |= order
    return list(found)


def _visit(read: Callable[[str], _Module], path: str, above: tuple[str, ...], order: dict[str, None]) -> None:
    """Put ``path`` into ``order``, after all that it imports. Raises ``ValueError`` if that is the module itself."""
    if path in above:
        raise ValueError(f"modules import one another: {' -> '.join((*above[above.index(path) :], path))}")
    if path not in order:
        for source in dict.fromkeys(one.source for one in read(path).imports):
            _visit(read, source, (*above, path), order)
        order[path] = None


def _origin(read: Callable[[str], _Module], path: str, outside: str) -> tuple[str, str]:
    """Return the module that declares what ``path`` exports as ``outside``, and what it is called there."""
    inside = read(path).exports[outside]
    for one in read(path).imports:
        if one.local == inside:
            return _origin(read, one.source, one.name)
    return path, outside


def _names(read: Callable[[str], _Module], paths: Collection[str], lazy: Collection[str]) -> dict[tuple[str, str], str]:
    """Return a name for each export that another module needs, unique in all scripts: its own if that is free."""
    wanted = {_origin(read, one.source, one.name): None for path in paths for one in read(path).imports}
    wanted |= {_origin(read, path, outside): None for path in paths if path in lazy for outside in read(path).exports}
    names: dict[tuple[str, str], str] = {}
    for n, (path, outside) in enumerate(wanted):
        names[path, outside] = f"${n}" if outside == "default" or outside in names.values() else outside
    return names


def _parse(web: Path, path: str) -> _Module:
    """Return the module ``path``. Raises ``ValueError`` with file and line for syntax that the pages do not use."""
    text = without_comments((web / path).read_text(encoding="utf-8"))
    module = _Module()

    def rewrite(found: re.Match[str]) -> str:
        line = text.count("\n", 0, found.start()) + 1

        def target(name: str) -> str:
            resolved = normpath(join(dirname(path), name))
            if not name.startswith(".") or not (web / resolved).is_file():
                raise ValueError(f"{path}:{line}: there is no module {name}")
            return resolved

        def imported(source: str, pairs: list[tuple[str, str]]) -> str:
            module.imports += [_Import(target(source), name, local, line) for name, local in pairs]
            return ""

        if refused := found["unknown"] or found["computed"]:
            raise ValueError(f"{path}:{line}: the bundle of the web pages does not know this form: {refused}")
        if found["source"]:
            return imported(
                found["source"], [("default", found["whole"])] if found["whole"] else _pairs(found["names"])
            )
        if found["listed"] is not None:
            pairs = _pairs(found["listed"])
            module.exports |= {outside: inside for inside, outside in pairs}
            return imported(found["origin"], [(inside, inside) for inside, _ in pairs]) if found["origin"] else ""
        if found["later"]:
            module.later.append(target(found["later"]))
            return f'import("{module.later[-1]}")'
        if found["value"]:
            module.exports["default"] = "$default"
            return "const $default ="
        if name := found["main"] or found["declared"]:
            module.exports["default" if found["main"] else name] = name
        return ""  # the word before a declaration

    module.body = compact(_SYNTAX.sub(rewrite, text))
    return module


def _pairs(names: str) -> list[tuple[str, str]]:
    """Return the names in ``a, b as c`` with what they are called after ``as``."""
    parts = [part.strip() for part in names.split(",") if part.strip()]
    return [(part.split(" as ")[0].strip(), part.split(" as ")[-1].strip()) for part in parts]
