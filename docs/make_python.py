"""Writes ``python.md`` from signatures, docstrings and ``examples/reference``: ``python docs/make_python.py``. Tests compare."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import ratchet
from ratchet_contract.script.public_names import PUBLIC
from ratchet_worker import task
from ratchet_worker.session import session

PAGE: Final = Path(__file__).with_name("python.md")
EXAMPLES: Final = Path(__file__).parents[1] / "examples" / "reference"
HEAD: Final = """\
# Python reference

`import ratchet` gives all public names; each is imported when it is first used, so that the client needs no torch:

{names}

Training code uses [`Session`](#session) or [`Task`](#task), with [`TrainLoader`](#trainloader) for its data; scripts and
notebooks use [`Client`](#client) and the [`Job`](#job) that it returns. [python-client.md](python-client.md) introduces the
client, and [adoption.md](adoption.md) compares Session and Task. For scripts with Lightning, `ratchet.lightning` has
`SessionStrategy` and `SessionLogger` ([integrations.md](integrations.md#scripts-as-ratchet-jobs)).

This page is made from the code by `python docs/make_python.py`. The examples are parts of
[`examples/reference`](../examples/reference) and of the docstrings; tests run them. In the examples, `job_id` is the id of a job
that has ended, `directory` a directory, and `key` any text.
"""
COMMON: Final = {
    "job": "a `Job`, the job's id, or its name. If several jobs have the name, the name means the one that has not ended. "
    "Raises `AmbiguousName` if that is not exactly one job, and `NotFound` if no job has the name",
    "spec": "the path of a YAML or JSON file, a mapping, or a `JobSpec`",
    "checkpoint_id": "`id` of a checkpoint that `checkpoints` yields, such as `step-000000000120.a0001`",
    "owner": "name of an owner; None: all owners, or in `create_token` the caller",
    "webhook_id": "id of a webhook, such as `wh-k3v9x2m1q7ab`",
    "page_size": "number of items that one request asks for; the iterator yields all items in any case",
    "rank": "only this rank; None: all ranks",
    "attempt": 'number of an attempt, or `"all"`. None: the newest attempt (all attempts in `events`)',
    "tail": "number of lines: only the last lines of each rank",
    "grep": "only lines that contain this text",
    "since": "only what happened, or was written, since this time (RFC 3339)",
    "upload": "True: send the directory `code.path` of this machine. False: do not send it. None: send it if the service is on "
    "another machine and the directory exists here",
    "note": "function that receives sentences about files that are left out, and about the progress of a large upload",
}
"""Arguments that several methods of the client have."""
FIRST: Final[dict[str, tuple[str, ...]]] = {
    "Session": (
        "__init__", "prepare", "epochs", "enumerate", "wrap", "register", "ignore", "restore", "batches", "steps", "log",
        "alert",
        "checkpoint", "evaluation",
    ),
    "RatchetClient": ("__init__", "submit", "plan", "job", "jobs", "view", "wait", "poll", "series", "metrics", "logs", "events"),
}  # fmt: skip
"""By class: the order in which a script calls them; others follow as they are written."""
SOURCES: Final = {
    "Session": ("train.py epochs.py own_logging.py", "session"),
    "TrainLoader": ("loader.py", "data", "again", "alone"), "Client": ("client.py", "client"),
    "Job": ("client.py", "job"),
}  # fmt: skip
"""Files of ``EXAMPLES``, and what objects of the class are called there."""
OR: Final = """\
A script that counts its steps itself, and uses a `TrainLoader`:
"""
_LONG: Final = 12
"""Lines of an example; of a longer loop the head is shown."""


def page() -> str:
    names = ", ".join(f"`{name}`" for name in PUBLIC)
    parts = [
        HEAD.format(names=names),
        _class("Session"),
        _script("epochs.py"),
        OR,
        _script("train.py"),
    ]
    parts += [_part_of(session, "The rules:"), *_methods("Session")]
    parts += [_class("TrainLoader"), *_methods("TrainLoader"), *_task()]
    rows = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in COMMON.items())
    parts += [_class("Client"), f"Arguments that several methods take:\n\n| argument | meaning |\n|---|---|\n{rows}"]
    return "\n".join([*parts, *_methods("Client"), _class("Job"), *_methods("Job"), _errors()])


def public(cls: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties in the order of ``FIRST``, then of the source."""
    found = {
        name: member
        for base in reversed(cls.__mro__)
        for name, member in vars(base).items()
        if (inspect.isfunction(member) or isinstance(member, property)) and (name == "__init__" or name[0] != "_")
    }
    order = FIRST.get(cls.__name__, ())
    yield from ((name, found[name]) for name in order)
    yield from ((name, member) for name, member in found.items() if name not in order)


def text_of(cls: type, name: str, member: Any) -> str:
    """Its docstring; of a method of ``Job`` that has none, the client's. A constructor's stands with its class."""
    said = member.__doc__ if name != "__init__" else f"{inspect.getdoc(cls)}\n\n{member.__doc__ or ''}"
    if not said and cls is ratchet.Job:
        said = getattr(ratchet.Client, name).__doc__
    return inspect.cleandoc(said or "")


def arguments(member: Any) -> list[str]:
    return list(inspect.signature(member).parameters)[1:]


def _class(name: str) -> str:
    return f"## {name}\n\n{_prose(inspect.getdoc(getattr(ratchet, name)) or '')}\n"


def _part_of(module: ModuleType, beginning: str) -> str:
    """A paragraph of the module's docstring and the list behind it."""
    paragraphs = (module.__doc__ or "").split("\n\n")
    first = next(n for n, paragraph in enumerate(paragraphs) if paragraph.startswith(beginning))
    return f"{paragraphs[first]}\n\n{paragraphs[first + 1]}\n".replace("``", "`")


def _methods(title: str) -> Iterator[str]:
    cls = getattr(ratchet, title)
    members = [(name, member) for name, member in public(cls) if not (cls is ratchet.Job and name == "__init__")]
    rows = [
        (name, inspect.signature(member.fget).return_annotation, " ".join(_prose(text_of(cls, name, member)).split()))
        for name, member in members
        if isinstance(member, property) and member.fget is not None
    ]
    if rows:
        yield _table(("attribute", "type", "what it is"), rows)
    for name, member in members:
        if isinstance(member, property):
            continue
        said = inspect.cleandoc(member.__doc__ or "") if name == "__init__" else text_of(cls, name, member)
        called = title if name == "__init__" else f"{title}.{name}"
        yield (
            "\n\n".join(
                filter(
                    None,
                    [
                        f"### {called}",
                        f"`{_signature(title, name, member)}`",
                        _prose(said),
                        _example(title, name, inspect.cleandoc(member.__doc__ or "")),
                    ],
                )
            )
            + "\n"
        )


def _signature(title: str, name: str, member: Any) -> str:
    signature = inspect.signature(member)
    parts, star = [], False
    for parameter in list(signature.parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f" = {_value(parameter.default)}"
        parts.append(f"{prefix}{parameter.name}: {parameter.annotation}{default}")
    end = "" if name == "__init__" else f" -> {signature.return_annotation}"
    return f"{title if name == '__init__' else name}({', '.join(parts)}){end}"


def _value(default: Any) -> str:
    if isinstance(default, frozenset):
        return "TERMINAL"
    return default.__name__ if inspect.isfunction(default) else repr(default)


def _prose(text: str) -> str:
    """Without the examples, as Markdown."""
    paragraphs = [part for part in text.split("\n\n") if not part.lstrip().startswith(">>>")]
    return "\n\n".join(paragraphs).replace("``", "`").strip()


def _example(title: str, name: str, said: str) -> str:
    """From the docstring, else where ``examples/reference`` calls it. Raises ``LookupError`` where neither has one."""
    if doctest := "\n\n".join(part for part in said.split("\n\n") if part.startswith(">>>")):
        return f"```pycon\n{doctest}\n```"
    files, *variables = SOURCES[title]
    wanted = {title} if name == "__init__" else {f"{variable}.{name}" for variable in variables}
    for file in files.split():
        source = (EXAMPLES / file).read_text()
        for statement in _statements(ast.parse(source)):
            if any(_is_call(inner, wanted) for inner in _own(statement)):
                return _shown(file, source, statement)
    raise LookupError(f"no example of {title}.{name}: call {' or '.join(sorted(wanted))} in examples/reference/{files}")


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.stmt))


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement without the statements within it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [inner for inner in ast.iter_child_nodes(node) if not isinstance(inner, ast.stmt)]


def _is_call(node: ast.AST, wanted: set[str]) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("ratchet.") in wanted


def _shown(file: str, source: str, node: ast.stmt) -> str:
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    if len(lines) > _LONG:
        lines = [lines[0], f"{' ' * (node.col_offset + 4)}..."]
    text = inspect.cleandoc("\n" + "\n".join(lines)) if node.col_offset else "\n".join(lines)
    return f"<!-- not run: a part of examples/reference/{file}, which a test runs -->\n```python\n{text}\n```"


def errors() -> Iterator[tuple[str, type[ratchet.RatchetError]]]:
    for name in PUBLIC:
        cls = getattr(ratchet, name)
        if isinstance(cls, type) and issubclass(cls, ratchet.RatchetError):
            yield name, cls


def _errors() -> str:
    about = (
        "Every error has a `detail`, which describes the problem and the cure, and a `code`, which never changes "
        "([api.md](api.md#errors)). A more specific `code` may replace the default."
    )
    rows = [(name, cls.code, " ".join(_prose(cls.__doc__ or "").split())) for name, cls in errors()]
    return f"## Errors\n\n{about}\n\n{_table(('error', 'default `code`', 'when'), rows)}"


def _script(file: str) -> str:
    text = (EXAMPLES / file).read_text()
    return f"<!-- not run: examples/reference/{file}, which a test runs -->\n```python\n{text}```\n"


def _task() -> Iterator[str]:
    yield f"{_class('Task')}\nA complete example:\n"
    yield _script("classifier.py")
    yield _part_of(task, "What Ratchet does")
    for name, member in public(ratchet.Task):
        if name != "__init__":
            yield f"### Task.{name}\n\n`{_signature('Task', name, member)}`\n\n{_prose(text_of(ratchet.Task, name, member))}\n"
    for name in ("Parts", "TaskContext"):
        fields = dataclasses.fields(getattr(ratchet, name))
        yield f"#{_class(name)}"
        yield _table(("field", "type", "default"), [(field.name, field.type, _default(field)) for field in fields])


def _table(head: tuple[str, str, str], rows: list[tuple[str, Any, str]]) -> str:
    """Name and type as code."""
    lines = [f"| `{name}` | `{kind}` | {text} |".replace(" | None`", "`, or None") for name, kind, text in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|---|---|---|", *lines]) + "\n"


def _default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    return "required" if field.default_factory is dataclasses.MISSING else f"`{field.default_factory()!r}`"


if __name__ == "__main__":
    PAGE.write_text(page())
