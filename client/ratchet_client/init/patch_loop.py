"""``ratchet init --patch`` of an ordinary training loop under DistributedDataParallel: a ``Session`` in the place of the process
group, ``session.prepare`` in that of DDP, ``session.epochs`` in that of ``range``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from ratchet_client.init import carried_variables, progress_bars
from ratchet_client.init.epoch_loops import Function, Loop, Loops, bind
from ratchet_client.init.origins import DDP
from ratchet_client.init.patching import Patching
from ratchet_client.init.rank_variables import RankVariables
from ratchet_client.init.source_edits import Scope

_GROUP: Final = ("torch.distributed", "torch.distributed.distributed_c10d")
_INIT: Final = frozenset(f"{module}.init_process_group" for module in _GROUP)
_DESTROY: Final = frozenset(f"{module}.destroy_process_group" for module in _GROUP)
_SPAWN: Final = frozenset(f"torch.multiprocessing.{name}" for name in ("spawn", "spawn.spawn", "start_processes"))
_LOADERS: Final = frozenset({"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"})
_SCALERS: Final = frozenset({"torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.amp.grad_scaler.GradScaler"})
_ORDER: Final = ("model", "optimizer", "scheduler", "scaler", "loader")
_KEYS: Final = (
    "bucket_cap_mb",
    "static_graph",
    "gradient_as_bucket_view",
    "find_unused_parameters",
    "broadcast_buffers",
)
"""Of DDP, that the spec has under ``ddp``."""
_NOT_NEEDED: Final = ("device_ids", "output_device", "dim")


class _Unknown(Exception):
    """What cannot be changed; it has been said why."""


def patch(patching: Patching) -> bool:
    """Whether the script is of this kind. Changed is all of it, or nothing."""
    models = patching.calls(DDP)
    if models:
        change = _Change(patching, models)
        before = patching.source.noted()
        try:
            change.make()
        except _Unknown:
            patching.source.forget(before)
            change.outline()
    return bool(models)


class _Change:
    def __init__(self, patching: Patching, models: list[ast.Call]) -> None:
        self._patching, self._source = patching, patching.source
        self._models, self._starts = models, patching.calls(_INIT)
        self._loops = Loops(self._source).found()
        self._variables = RankVariables(patching)
        self._seeing: list[Scope] = []  # functions that are given the session
        bound = patching.bound()
        self._session = "session" if "session" not in bound else "ratchet_session"
        self._class = "Session" if "Session" not in bound else "RatchetSession"

    def make(self) -> None:
        """Raises ``_Unknown``."""
        self._refuse()
        (model,), (loop,), (start,) = self._models, self._loops, self._starts
        made = self._source.statement(model)
        assert isinstance(made, ast.Assign) and isinstance(made.targets[0], ast.Name)
        name, where = made.targets[0].id, self._source.scope(model)
        self._begin(start, where)
        end = self._way(where, self._source.scope(loop.node), loop.node)
        if end.lineno < made.lineno or not set(self._blocks(made)) <= set(self._blocks(end)):
            self._leave(made, "the loop over epochs does not stand behind it in the same block, or one within")
        self._model(name, model, made, end)
        self._prepare(name, made, end, loop)
        self._tell(loop)
        loop.change(self._source, self._session)
        for call in self._patching.calls(_DESTROY):
            if isinstance(self._source.statement(call), ast.Expr):
                self._source.remove(self._source.statement(call))
        self._ranks()
        renamed = "" if self._class == "Session" else f" as {self._class}"
        self._patching.add_import(f"from ratchet import Session{renamed}", [])

    def outline(self) -> None:
        """What the change consists of, at the places of which nothing was said."""
        said = {remark.line for remark in self._patching.remarks}
        places: list[tuple[ast.expr | ast.stmt, str]] = [
            *((call, "session = Session() takes its place (from ratchet import Session)") for call in self._starts),
            *((call, "session.prepare takes the module without DDP, optimizer, scheduler and DataLoader, and gives them back")
              for call in self._models),
            *((loop.node, "the loop goes over session.epochs(n)") for loop in self._loops),
        ]  # fmt: skip
        for node, text in places:
            if node.lineno not in said:
                self._patching.leave(node, text)

        for loop in self._loops:
            self._tell(loop)

    def _tell(self, loop: Loop) -> None:
        """What a resume does not go on with."""
        carried_variables.tell(self._patching, loop, f"{self._session}.prepare")
        progress_bars.tell(self._patching, loop, self._session)

    # --- what cannot be changed ----------------------------------------------------------------------------------------

    def _leave(self, node: ast.expr | ast.stmt, text: str) -> None:
        self._patching.leave(node, text)
        raise _Unknown

    def _refuse(self) -> None:
        """Raises ``_Unknown``, all reasons said."""
        leave, before = self._patching.leave, len(self._patching.remarks)
        for call in self._patching.calls(_SPAWN):
            leave(call, "it starts its ranks itself, as Ratchet and torchrun do: call the function once, without it")
        for what, calls in (("DistributedDataParallel", self._models), ("init_process_group", self._starts)):
            for call in calls if len(calls) > 1 else ():
                leave(call, f"one of {len(calls)} calls of {what}: a job has one process group and one model")
        model = self._models[0]
        if not self._starts:
            leave(
                model,
                "init_process_group is not called in this file: session = Session() takes its place, in front of this",
            )
        made = self._source.statement(model)
        named = isinstance(made, ast.Assign) and len(made.targets) == 1 and isinstance(made.targets[0], ast.Name)
        if not named or getattr(made, "value", None) is not model:
            leave(
                model,
                "DistributedDataParallel(...) is not what a name is given: session.prepare takes the module without it",
            )
        if not self._loops:
            leave(model, "no loop over epochs around a loop over batches was found: it goes over session.epochs(n), "
                  "or over session.steps(n) where it counts steps")  # fmt: skip
        for loop in self._loops:
            if len(self._loops) > 1:
                leave(loop.node, f"one of {len(self._loops)} loops that train: a job has one, over session.epochs(n)")
            elif why := loop.unknown("session"):
                leave(loop.node, why)
        if len(self._patching.remarks) > before:
            raise _Unknown

    # --- the session ---------------------------------------------------------------------------------------------------

    def _begin(self, start: ast.Call, where: Scope) -> None:
        """``session = Session()`` for the scope ``where``."""
        statement, scope = self._source.statement(start), self._source.scope(start)
        if not isinstance(statement, ast.Expr):
            self._leave(start, "not a statement of its own: session = Session() takes its place")
        call, place = self._only_call(scope), statement
        if scope is not where and call is not None and self._source.scope(call) is where:  # setup()
            place = self._source.statement(call)
        elif scope is not where:
            self._way(scope, where, self._body(where)[0])
        self._leave_out(where, scope, place)
        block = self._source.siblings(place)
        needing = [s for s in block[: block.index(place)] if self._variables.needs_session(s, self._gone)]
        begun, made = (needing or [place])[0], f"{self._session} = {self._class}()  # starts the process group"
        self._made = self._source.scope(place), begun.lineno
        if begun is statement:
            self._source.replace(statement, made)
        else:
            self._source.insert(made, before=begun)
            self._source.remove(statement)

    def _leave_out(self, where: Scope, starts: Scope, place: ast.stmt) -> None:
        """Find what goes with the process group and DDP: their arguments, and choices of a device."""
        home, block = self._source.scope(place), self._source.siblings(place)
        known = [s for s in self._statements(home) if s.lineno > place.lineno or s in block]
        known += [] if where is home else self._statements(where)
        devices = [s for s in known if self._variables.device(s)]
        self._devices = [s for s in devices if not set(self._source.ancestors(s)) & set(devices)]
        known += [] if starts in (where, home) else self._statements(starts)
        self._set = [
            s for s in known
            if self._variables.sets_device(s) and not set(self._source.ancestors(s)) & set(devices)
        ]  # fmt: skip
        model, start = self._models[0], self._starts[0]
        keywords = [k for k in model.keywords if k.arg != "module"]
        self._gone = [*self._devices, *self._set, *start.args, *start.keywords, *model.args[1:], *keywords]

    def _ranks(self) -> None:
        """Of the session what is read from the environment. The last of the changes."""
        for statement in self._devices:
            self._source.replace(statement, f"{self._variables.device(statement)} = {self._session}.device")
        for statement in self._set:
            self._source.remove(statement)
        gone = {id(n) for one in self._gone for n in ast.walk(one)}
        for statement in [n for n in ast.walk(self._source.tree) if isinstance(n, ast.stmt)]:
            if self._variables.is_unused(statement, self._gone) and self._source.is_free(statement):
                self._source.remove(statement)
                gone |= {id(n) for n in ast.walk(statement)}
        home, line = self._made
        for read, attribute in self._variables.reads():
            if id(read) in gone:
                continue
            scope = self._source.scope(read)
            seen = scope in self._seeing or (scope is home and read.lineno >= line)
            if seen and self._variables.is_whole(read) and self._source.is_free(read):
                self._source.replace(read, f"{self._session}.{attribute}")
            else:
                text = f"torchrun sets it, and python does not: {self._session}.{attribute} has it"
                self._patching.leave(read, f"{ast.unparse(read)}: {text}")

    def _way(self, origin: Scope, target: Scope, there: ast.stmt) -> ast.stmt:
        """The statement of ``origin`` by which ``there`` in ``target`` is reached. Its function is given the session. Raises
        ``_Unknown``."""
        if origin is target:
            return there
        call = self._only_call(target)
        if call is None or not isinstance(target, ast.FunctionDef) or self._source.scope(call) is not origin:
            self._leave(there, "the session that it needs is made in another function, from which no single plain call leads "
                               "here: hand it on")  # fmt: skip
        assert call is not None and isinstance(target, ast.FunctionDef)
        typed = any(a.annotation for a in (*target.args.posonlyargs, *target.args.args))
        self._source.insert_parameter(target, f"{self._session}: {self._class}" if typed else self._session)
        self._source.insert_argument(call, self._session)
        self._seeing.append(target)
        return self._source.statement(call)

    def _only_call(self, function: Scope) -> ast.Call | None:
        """Of a function of the module: the one place of the file where it is called, and named at all."""
        if not isinstance(function, Function) or function not in self._source.tree.body or function.decorator_list:
            return None
        uses = [n for n in ast.walk(self._source.tree) if isinstance(n, ast.Name) and n.id == function.name]
        parent = next(self._source.ancestors(uses[0])) if len(uses) == 1 else None
        return parent if isinstance(parent, ast.Call) and parent.func is uses[0] else None

    # --- model and devices ---------------------------------------------------------------------------------------------

    def _model(self, name: str, call: ast.Call, made: ast.stmt, end: ast.stmt) -> None:
        module = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "module"), None)
        if module is None or isinstance(module, ast.Starred):
            self._leave(call, "which module it is given is not seen: session.prepare takes it")
        assert module is not None
        for keyword in call.keywords:
            text = ast.unparse(keyword)
            if keyword.arg in _KEYS:
                self._patching.leave(keyword.value, f"{text} goes into the spec: ddp: {{{keyword.arg}: ...}}")
            elif keyword.arg not in (*_NOT_NEEDED, "module"):
                self._patching.leave(
                    keyword.value, f"{text} of DistributedDataParallel is left out: Ratchet has no such setting"
                )
        if isinstance(module, ast.Name) and module.id == name:
            self._source.remove(made)
        else:
            self._source.replace(call, self._source.expression(module))
        for node in self._between(made, end):
            if isinstance(node, ast.Attribute) and node.attr == "module" and _is_name(node.value, name):
                self._source.replace(node, name)  # it is put into DDP behind this
            elif isinstance(node, ast.Attribute) and node.attr == "register_comm_hook":
                self._patching.leave(
                    node, "taken out: the hook of a job is set in the spec (hook), and kept over restarts"
                )
                self._source.remove(self._source.statement(node))

    def _between(self, first: ast.stmt, last: ast.stmt) -> Iterator[ast.AST]:
        """All of what stands behind ``first`` in its block, up to the statement that has ``last``."""
        block = self._source.siblings(first)
        for statement in block[block.index(first) + 1 :]:
            if last in list(ast.walk(statement)):
                return
            yield from ast.walk(statement)

    # --- what is prepared ----------------------------------------------------------------------------------------------

    def _prepare(self, model: str, made: ast.stmt, end: ast.stmt, loop: Loop) -> None:
        """``model, ... = session.prepare(model, ...)`` behind the last of what it takes, in front of the loop."""
        taken: dict[str, list[str]] = {kind: [] for kind in _ORDER}
        taken["model"], last, loaders = [model], made, self._loaders(loop)
        for statement in self._statements(self._source.scope(made)):
            if not isinstance(statement, ast.Assign) or statement is made or statement.lineno >= end.lineno:
                continue
            target, kind = statement.targets[0], self._kind(statement.value)
            if kind is None or (kind == "loader" and not any(_is_name(target, name) for name in loaders)):
                continue
            block = self._blocks(statement)[0]
            if len(statement.targets) > 1 or not isinstance(target, ast.Name) or block not in self._blocks(end):
                self._leave(
                    statement,
                    f"{ast.unparse(target)} is made in a block of its own: session.prepare takes each {kind} of the training",
                )
            assert isinstance(target, ast.Name)
            taken[kind] = [*(name for name in taken[kind] if name != target.id), target.id]
            last = max(last, statement, key=lambda s: s.lineno)
        if len(taken["loader"]) != 1 or loaders != set(taken["loader"]):
            self._leave(loop.node, "the DataLoader that it goes over is not seen to be made and given a name in the function of "
                                   "the model: session.prepare takes it, and gives back the one to train over. Batches that come "
                                   "otherwise: `for step in session.steps(n)`, a batch each")  # fmt: skip
        listed = ", ".join(name for names in taken.values() for name in names)
        line = f"{listed} = {self._session}.prepare({listed})"
        if last in self._source.siblings(end):
            self._source.insert(line, behind=last)
        else:
            self._source.insert(line, before=end)
        known = {name for names in taken.values() for name in names}
        self._stepped(loop, known)

    def _stepped(self, loop: Loop, known: set[str]) -> None:
        """Say what else is stepped in the loop: a scheduler of one's own, an average of the weights."""
        for node in ast.walk(loop.node):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("step", "update_parameters")
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id not in known
                and self._source.scope(loop.node) is self._source.scope(self._models[0])
            ):
                text = f"{node.func.value.id}: where the training depends on its state, give it to session.prepare, too"
                self._patching.leave(node, text, needed=False)

    def _loaders(self, loop: Loop) -> set[str]:
        """Names of what the passes go over, in the function of the model; "" for one that has none."""
        found: set[str] = set()
        function = self._source.scope(loop.node)
        call = None if function is self._source.scope(self._models[0]) else self._only_call(function)
        for loader in [one.loader for one in loop.passes]:
            if call is not None and isinstance(function, Function) and isinstance(loader, ast.Name):
                loader = bind(function, call).get(loader.id)
            found.add(loader.id if isinstance(loader, ast.Name) else "")
        return found

    def _kind(self, value: ast.expr) -> str | None:
        origins = self._patching.origins.of(value.func) if isinstance(value, ast.Call) else set()
        if origins & _LOADERS:
            return "loader"
        if origins & _SCALERS:
            return "scaler"
        if any(origin.startswith("torch.optim.lr_scheduler.") for origin in origins):
            return "scheduler"
        ours = any(origin.startswith("torch.optim.") and "swa_utils" not in origin for origin in origins)
        return "optimizer" if ours else None

    # --- the tree ------------------------------------------------------------------------------------------------------

    def _body(self, scope: Scope) -> list[ast.stmt]:
        assert not isinstance(scope, ast.Lambda)
        return scope.body

    def _statements(self, scope: Scope) -> list[ast.stmt]:
        """Those of this function itself, in the order of the file."""
        found = [
            n for n in ast.walk(scope) if isinstance(n, ast.stmt) and n is not scope and self._source.scope(n) is scope
        ]
        return sorted(found, key=lambda s: s.lineno)

    def _blocks(self, statement: ast.stmt) -> list[int]:
        """The blocks of its function that it stands in, from the innermost."""
        scope = self._source.scope(statement)
        chain = [statement, *(n for n in self._source.ancestors(statement) if isinstance(n, ast.stmt))]
        return [id(self._source.siblings(s)) for s in chain if s is not scope and self._source.scope(s) is scope]


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
