"""Reads what a script does from its syntax tree; the script is never imported or run."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ratchet_client.init.analysis.import_origins import (
    ACCELERATORS,
    LIGHTNING_CLI,
    LIGHTNING_TRAINERS,
    OLD_LIGHTNING_TRAINERS,
    Origins,
    is_hugging_face_trainer,
    makes_a_session,
)
from ratchet_client.init.analysis.tracker_calls import find_doubles
from ratchet_client.init.script_facts import Facts, Framework, HookUse, Option, Place
from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.script.module_imports import Import, find_imports, module_files, relative_import_files
from ratchet_contract.script.unmanaged_script import is_unmanaged
from ratchet_hooks.specs.registry import HOOKS

_MAX_FILES: Final = 60
_MAX_DEPTH: Final = 20
_MAX_BYTES: Final = 2 << 20
"""Maximum size of one file; parsing a larger one takes minutes."""
_SAVERS: Final = {
    "save": 1, "save_file": 1, "save_model": 1, "save_pretrained": 0, "save_checkpoint": 0, "save_state": 0,
}  # fmt: skip
"""Functions, with the position of the path among their arguments."""
_HOOK_TYPES: Final = {
    "ALLREDUCE": "allreduce_hook", "FP16_COMPRESS": "fp16_compress_hook", "BF16_COMPRESS": "bf16_compress_hook",
    "QUANTIZE_PER_TENSOR": "quantization_pertensor_hook", "QUANTIZE_PER_CHANNEL": "quantization_perchannel_hook",
    "POWER_SGD": "powerSGD_hook", "POWER_SGD_RANK2": "powerSGD_hook", "BATCHED_POWER_SGD": "batched_powerSGD_hook",
    "BATCHED_POWER_SGD_RANK2": "batched_powerSGD_hook", "NOOP": "noop_hook",
}  # fmt: skip
_POWERSGD_ARGUMENTS: Final = (
    "process_group", "matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate", "use_error_feedback",
    "warm_start", "orthogonalization_epsilon", "random_seed", "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
)  # fmt: skip
"""Arguments of torch's ``PowerSGDState``, in order."""
_SPECS: Final = {entry.spec.__name__: entry.name for entry in HOOKS.values()}
"""Hook names by the names of their spec classes."""


def read_script(script: Path, code: Path) -> Facts:
    """Return the facts about ``script`` and modules below its directory or ``code`` that it imports. No code is run. If
    modules could not be read, ``Facts.is_partial`` is True. Raise ``NotFound`` or ``Refused`` if the script cannot be read."""
    facts, certain, seen = Facts(), set[str](), set[Path]()
    waiting, roots = deque([script]), list(dict.fromkeys([script.parent, code]))
    while waiting:
        file = waiting.popleft()
        if file in seen:
            continue
        seen.add(file)
        try:
            if len(seen) > _MAX_FILES:
                raise Refused("too many files")
            tree = _parse(file)
            shown = file.relative_to(code).as_posix() if file.is_relative_to(code) else file.name
            imported, relative = _read(facts, tree, file, shown, main=file == script)
        except (NotFound, Refused):
            if file == script:
                raise
            facts.is_partial = True
            facts.lacks_own = facts.lacks_own or file.parent == script.parent
            continue
        facts.files.append(file)
        if facts.session is None or file.parent == script.parent:
            waiting += [f for f in relative if any(f.is_relative_to(root) for root in roots)]
        for one in imported:
            found = [f for root in roots for f in module_files(one.name, root)]
            waiting += found
            if one.is_required and not found:
                facts.modules.add(one.top_package)
                (certain if one.is_top_level else facts.perhaps).add(one.top_package)
    facts.perhaps -= certain
    return facts


def _read(facts: Facts, tree: ast.Module, file: Path, shown: str, *, main: bool) -> tuple[list[Import], list[Path]]:
    """Add the facts about ``file`` and return its imports and the files of its relative imports. ``shown``, ``main``: as for
    ``_Reader``. Raise ``Refused`` if it is nested too deeply."""
    try:
        _Reader(facts, tree, shown, main=main).read()
        return list(find_imports(tree)), relative_import_files(tree, file)
    except (RecursionError, MemoryError):
        raise Refused(f"{file} is nested too deeply to be read") from None


def _parse(file: Path) -> ast.Module:
    """Return the syntax tree of ``file``. Raise ``NotFound`` if it cannot be read, ``Refused`` if it is too large or not valid
    Python."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise Refused(f"{file} is larger than {_MAX_BYTES >> 20} MiB: too much to be read as a script")
        return ast.parse(file.read_bytes(), str(file))
    except (RecursionError, MemoryError):
        raise Refused(f"{file} is nested too deeply to be read") from None
    except OSError as error:
        raise NotFound(f"cannot read {file}: {error.strerror or error}") from None
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise Refused(f"{file}{line} is not valid Python: {reason}") from None


class _Reader:
    """Reads one file and adds what it finds to ``facts``. ``file``: its name in the facts. ``main``: it is the script itself."""

    def __init__(self, facts: Facts, tree: ast.Module, file: str, *, main: bool) -> None:
        self.facts, self.tree, self.file, self.main = facts, tree, file, main
        self.names: dict[str, ast.expr] = {}
        self.origins = Origins(tree)
        often: set[str] = set()
        self.renamed: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                often |= {name} & set(self.names)
                self.names[name] = node.value
            elif isinstance(node, ast.ImportFrom):
                self.renamed |= {alias.asname or alias.name: alias.name for alias in node.names}
        for name in often:
            del self.names[name]

    def read(self) -> None:
        """Add the facts that the calls, classes and device strings of the file show."""
        calls: dict[str, Callable[[ast.Call], None]] = {
            "Session": self._session, "managed_ddp": self._managed, "DistributedDataParallel": self._ddp,
            "register_comm_hook": self._hook, "register_ddp_comm_hook": self._hook_type,
            "init_process_group": self._backend, "spawn": self._spawn, "add_argument": self._argument, "open": self._open,
            "write_text": self._method_write, "write_bytes": self._method_write, "mkdir": self._method_write,
            "makedirs": self._write, "SummaryWriter": self._write, "load": self._load, "cuda": self._cuda_call,
            "loadtxt": self._load, "read_csv": self._load, "load_file": self._load, "read_text": self._method_read,
        }  # fmt: skip
        calls |= dict.fromkeys(_SAVERS, self._save)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                self._framework(node)
                name = self._name(node.func)
                if name in calls:
                    calls[name](node)
            elif isinstance(node, ast.ClassDef):
                self._bases(node)
                if self.main:
                    self._class(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda:"):
                self.facts.cuda.append(self._place(node, node.value))
        self.facts.trackers += [
            self._place(node, text) for node, text in find_doubles(self.tree, self.origins, self._value)
        ]

    # --- helpers -------------------------------------------------------------------------------------------------------

    def _name(self, function: ast.expr) -> str:
        """Return the last name in the expression ``function``, like ``save`` for ``torch.save``. For a name from ``from ...
        import ... as``, return the original name. Return "" if the expression is neither a name nor an attribute."""
        if isinstance(function, ast.Attribute):
            return function.attr
        return self.renamed.get(function.id, function.id) if isinstance(function, ast.Name) else ""

    def _place(self, node: ast.expr, value: str | None = None) -> Place:
        return Place(self.file, node.lineno, ast.unparse(node), value)

    def _value(self, node: ast.expr | None) -> ast.expr | None:
        """Return the expression that a name with a single ``=`` assignment stands for; any other ``node`` unchanged."""
        seen: set[str] = set()
        while isinstance(node, ast.Name) and node.id in self.names and node.id not in seen:
            seen.add(node.id)
            node = self.names[node.id]
        return node

    def _text(self, node: ast.expr | None, depth: int = 0) -> str | None:
        """Return the text of an expression such as ``Path("out") / name``, or only its literal beginning; None if it is unknown.
        A call of ``with_suffix`` is ignored. ``depth``: the depth of the recursion."""
        node = self._value(node)
        if depth > _MAX_DEPTH:  # path = path / "more"
            return None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.Call) and self._name(node.func) in ("Path", "join", "with_suffix", "str"):
            of_method = isinstance(node.func, ast.Attribute) and node.func.attr == "with_suffix"
            return self._text(node.func.value if of_method else _first(node), depth + 1)  # type: ignore[attr-defined]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            return self._text(node.left, depth + 1)
        if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
            return str(node.values[0].value)
        return None

    # --- calls ------------------------------------------------------------------------------------------------

    def _session(self, node: ast.expr) -> None:
        """Record ``node`` as the place of the Session, unless one is recorded or the file counts as unmanaged."""
        if not is_unmanaged(ast.unparse(self.tree).encode()):
            self.facts.session = self.facts.session or self._place(node)

    def _managed(self, node: ast.Call) -> None:
        """Record a call of ``managed_ddp``, and the hook that its argument ``spec`` describes, if there is one."""
        self.facts.managed = self.facts.managed or self._place(node)
        given = node.args[1] if len(node.args) > 1 else next((k.value for k in node.keywords if k.arg == "spec"), None)
        spec = self._value(given)
        if isinstance(spec, ast.Call) and (name := _SPECS.get(self._name(spec.func))):
            self.facts.hooks.append(HookUse(self._place(node), name, *_literals(spec.keywords)))
        elif spec is not None:
            self.facts.hooks.append(HookUse(self._place(node), f"the spec {ast.unparse(spec)}", {}, {}))

    def _ddp(self, node: ast.Call) -> None:
        self.facts.ddp = self.facts.ddp or self._place(node)

    def _framework(self, node: ast.Call) -> None:
        """Record ``node`` if it creates a Session through an integration, a LightningCLI, or a framework's Trainer or
        Accelerator."""
        origins, given = self.origins.origins_of(node.func), {k.arg: k.value for k in node.keywords}
        place = self._place(node)
        if any(map(makes_a_session, origins)):
            self._session(node)
        if origins & LIGHTNING_CLI:
            self.facts.lightning_cli = self.facts.lightning_cli or place
        if origins & (LIGHTNING_TRAINERS | OLD_LIGHTNING_TRAINERS):
            devices, saves = given.get("devices"), given.get("enable_checkpointing")
            shown = None if devices is None else ast.unparse(self._value(devices) or devices)
            self.facts.frameworks.append(
                Framework(
                    "Lightning's Trainer", place, shown, self._text(given.get("accelerator")) == "cpu",
                    not (isinstance(saves, ast.Constant) and saves.value is False),
                )
            )  # fmt: skip
        elif origins & ACCELERATORS:
            self.facts.frameworks.append(Framework("Accelerate", place))
        elif any(map(is_hugging_face_trainer, origins)):
            self.facts.frameworks.append(Framework("the Trainer of transformers", place, saves=self._trainer_saves()))

    def _bases(self, node: ast.ClassDef) -> None:
        """Record the base classes of ``node`` that create a Session, and those that are Trainers of Hugging Face."""
        for base in node.bases:
            if any(map(makes_a_session, self.origins.origins_of(base))):
                self._session(base)
            if any(map(is_hugging_face_trainer, self.origins.origins_of(base))):
                place = self._place(base)
                self.facts.frameworks.append(
                    Framework("the Trainer of transformers", place, saves=self._trainer_saves())
                )

    def _trainer_saves(self) -> bool:
        """Return False if the file gives exactly one ``save_strategy`` to ``TrainingArguments``, and it is "no". Otherwise return
        True, since the Trainer saves by default."""
        given = [
            self._text(keyword.value)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and self._name(node.func).endswith("TrainingArguments")
            for keyword in node.keywords
            if keyword.arg == "save_strategy"
        ]
        return given != ["no"]

    def _spawn(self, node: ast.Call) -> None:
        self.facts.spawn = self.facts.spawn or self._place(node)

    def _hook(self, node: ast.Call) -> None:
        """Record the hook that ``register_comm_hook(state, hook)`` registers, with the arguments of its ``PowerSGDState``."""
        given = {k.arg: k.value for k in node.keywords if k.arg}
        hook = self._value(given.get("hook", node.args[1] if len(node.args) > 1 else None))
        state = self._value(given.get("state", node.args[0] if node.args else None))
        if isinstance(hook, ast.Call):  # fp16_compress_wrapper(powerSGD_hook)
            name = f"{self._name(hook.func)}({', '.join(self._name(a) for a in hook.args)})"
        else:
            name = self._name(hook) if hook is not None else "?"
        parameters: dict[str, Any] = {}
        unread: dict[str, str] = {}
        if isinstance(state, ast.Call) and self._name(state.func) == "PowerSGDState":
            positional = zip(_POWERSGD_ARGUMENTS, state.args, strict=False)
            keywords = [ast.keyword(arg=name, value=value) for name, value in positional] + state.keywords
            parameters, unread = _literals(keywords)
        elif state is not None and "powersgd" in name.lower():
            unread = {"the state": ast.unparse(state)}
        self.facts.hooks.append(HookUse(self._place(node), name, parameters, unread))

    def _hook_type(self, node: ast.Call) -> None:
        """Record the built-in hook that ``register_ddp_comm_hook(comm_hook_type, ...)`` registers, under the name of its Python
        function."""
        kind = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "comm_hook_type"), None)
        name = self._name(kind) if kind is not None else "?"
        parameters = {"matrix_approximation_rank": 2} if name.endswith("RANK2") else {}
        self.facts.hooks.append(HookUse(self._place(node), _HOOK_TYPES.get(name, name), parameters, {}))

    def _backend(self, node: ast.Call) -> None:
        given = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "backend"), None)
        self.facts.backends.append(self._place(node, self._text(given)))

    def _save(self, node: ast.Call) -> None:
        """Record a call that saves a checkpoint, if its path is a positional argument."""
        position = _SAVERS[self._name(node.func)]
        if len(node.args) > position:
            place = self._place(node, self._text(node.args[position]))
            self.facts.saves.append(place)
            self.facts.writes.append(place)

    def _write(self, node: ast.Call) -> None:
        self.facts.writes.append(self._place(node, self._text(_first(node))))

    def _method_write(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            self.facts.writes.append(self._place(node, self._text(node.func.value)))

    def _method_read(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            self.facts.reads.append(self._place(node, self._text(node.func.value)))

    def _load(self, node: ast.Call) -> None:
        if ast.unparse(node.func) == "evaluate.load":
            return  # Hugging Face's function loads a metric by its name, not a file
        self.facts.reads.append(self._place(node, self._text(_first(node))))

    def _open(self, node: ast.Call) -> None:
        """Record a call of ``open`` or of a method ``open`` as a read or a write of its path."""
        method = isinstance(node.func, ast.Attribute)
        path = node.func.value if isinstance(node.func, ast.Attribute) else _first(node)
        # ``x.open(...)`` is taken for that of a ``Path``, also if ``x`` is a module like ``gzip``.
        modes = [*node.args[0 if method else 1 :], *(k.value for k in node.keywords if k.arg == "mode")]
        mode = self._text(modes[0]) if modes else "r"
        (self.facts.reads if mode and mode[0] == "r" else self.facts.writes).append(self._place(node, self._text(path)))

    def _cuda_call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and not (node.args or node.keywords):
            self.facts.cuda.append(self._place(node))

    def _argument(self, node: ast.Call) -> None:
        """Record an ``add_argument`` call as an option, which may be required."""
        flags = tuple(a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
        more = {k.arg: k.value for k in node.keywords}
        if not flags:
            return
        if flags[0].startswith("-"):
            wanted = more.get("required")
            required = isinstance(wanted, ast.Constant) and wanted.value is True
        else:
            loose = more.get("nargs")
            required = "default" not in more and not (isinstance(loose, ast.Constant) and loose.value in ("?", "*"))
        default = more.get("default")
        value = None if not isinstance(default, ast.Constant) else str(default.value)
        self.facts.options.append(Option(flags, required, value))

    def _class(self, node: ast.ClassDef) -> None:
        """Record the first class with the methods ``build`` and ``loss`` as the task, with the parameters of its constructor."""
        methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
        if not {"build", "loss"} <= set(methods) or self.facts.task is not None:
            return
        start = methods.get("__init__")
        names = tuple(a.arg for a in (*start.args.args[1:], *start.args.kwonlyargs)) if start else ()
        self.facts.task = (node.name, names)


def _first(node: ast.Call) -> ast.expr | None:
    return node.args[0] if node.args else None


def _literals(keywords: list[ast.keyword]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of the keyword arguments that are literals, and the source text of the others, each by name.
    ``process_group`` and ``**`` are left out."""
    values: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for keyword in keywords:
        if keyword.arg in (None, "process_group"):
            continue
        try:
            values[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except ValueError:
            unread[str(keyword.arg)] = ast.unparse(keyword.value)
    return values, unread
