"""``ratchet init --patch`` of a training loop under DistributedDataParallel: a ``Session`` replaces the process group, DDP and
the loop's ``range``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from ratchet_client.init.analysis import carried_variables, progress_bars, stateful_objects
from ratchet_client.init.analysis.epoch_loops import Function, Loop, bind
from ratchet_client.init.analysis.import_origins import DDP, LOADERS
from ratchet_client.init.analysis.last_number import set_last_number
from ratchet_client.init.analysis.rank_variables import RankVariables
from ratchet_client.init.analysis.script_source import Patching
from ratchet_client.init.analysis.source_edits import Scope
from ratchet_client.init.analysis.step_loops import StepLoop, training_loops

_GROUP: Final = ("torch.distributed", "torch.distributed.distributed_c10d")
_INIT: Final = frozenset(f"{module}.init_process_group" for module in _GROUP)
_DESTROY: Final = frozenset(f"{module}.destroy_process_group" for module in _GROUP)
_SPAWN: Final = frozenset(f"torch.multiprocessing.{name}" for name in ("spawn", "spawn.spawn", "start_processes"))
_SCALERS: Final = frozenset({"torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.amp.grad_scaler.GradScaler"})
_ORDER: Final = ("model", "optimizer", "scheduler", "scaler", "loader", "generator")
_KEYS: Final = (
    "bucket_cap_mb",
    "static_graph",
    "gradient_as_bucket_view",
    "find_unused_parameters",
    "broadcast_buffers",
)
"""Arguments of DDP that the spec has under ``ddp``."""
_SAME: Final = ("parameters", "train", "eval", "to", "cuda")
_NOT_NEEDED: Final = ("device_ids", "output_device", "dim")


class _Unknown(Exception):
    """Raised, after a remark with the reason, if the script cannot be patched; ``patch`` catches it."""


def patch(patching: Patching) -> bool:
    """Record the edits that make a script with DistributedDataParallel use a Session, or only add remarks if that is not
    possible. Return False if it does not call DDP."""
    models = patching.calls(DDP)
    if models:
        change = _Change(patching, models)
        before = patching.source.checkpoint()
        try:
            change.apply()
        except _Unknown:
            patching.source.rollback(before)
            change.outline()
    return bool(models)


class _Change:
    """The patch of one script. ``models``: the calls of DistributedDataParallel in it, at least one."""

    def __init__(self, patching: Patching, models: list[ast.Call]) -> None:
        self._patching, self._source = patching, patching.source
        self._models, self._starts = models, patching.calls(_INIT)
        self._loops = training_loops(patching)
        self._variables = RankVariables(patching)
        self._seeing: list[Scope] = []  # functions that receive the session as a parameter
        bound = patching.bound_names()
        self._session = "session" if "session" not in bound else "ratchet_session"
        self._class = "Session" if "Session" not in bound else "RatchetSession"

    def apply(self) -> None:
        """Record all edits, and add remarks. Raise ``_Unknown``, perhaps after some edits, if the script cannot be patched."""
        self._raise_if_unsupported()
        (loop,), (start,), model = self._loops, self._starts, self._models[0]
        made = self._source.statement(model)
        assert isinstance(made, ast.Assign) and isinstance(made.targets[0], ast.Name)
        name, where = made.targets[0].id, self._source.scope(model)
        end = self._path_to(where, self._source.scope(loop.node), loop.node)
        self._insert_session(start, where, end)
        made = self._before(made, end)
        if end.lineno < made.lineno:
            self._add_remark(model, "the loop does not stand after it in the same block, or one within")
        prepared = self._prepare(name, made, end, loop)
        loop.change(self._patching, self._session)
        carried_variables.save_carried(self._patching, loop, self._session, prepared)
        set_last_number(self._patching, loop)
        self._shuffled(loop)
        if any(isinstance(one, ast.Break) for one in loop.exits):
            self._source.insert(f"{self._session}.finish()  # the loop may end early", behind=loop.node)
        self._bars(loop)
        for call in self._patching.calls(_DESTROY):
            if isinstance(self._source.statement(call), ast.Expr):
                self._source.remove(self._source.statement(call))
        self._ranks()
        renamed = "" if self._class == "Session" else f" as {self._class}"
        self._patching.add_import(f"from ratchet import Session{renamed}", [], self._made[1])

    def _shuffled(self, loop: Loop | StepLoop) -> None:
        """Add an optional remark if the script has a DistributedSampler but never calls ``set_epoch``: the patch then changes the
        order of the samples. Does nothing for a loop over steps."""
        samplers = self._patching.calls(frozenset({
            "torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler",
        }))  # fmt: skip
        sets = any(isinstance(n, ast.Attribute) and n.attr == "set_epoch" for n in ast.walk(self._source.tree))
        if isinstance(loop, Loop) and samplers and not sets:
            text = f"without set_epoch all epochs had one order; {self._session}.epochs calls it: their orders differ from now on"
            self._patching.add_remark(samplers[0], text, needed=False)

    def outline(self) -> None:
        """Add remarks that outline the change to make by hand."""
        said = {remark.line for remark in self._patching.remarks}
        places: list[tuple[ast.expr | ast.stmt, str]] = [
            *((call, "session = Session() takes its place (from ratchet import Session)") for call in self._starts),
            *((call, "session.prepare takes the module without DDP, optimizer, scheduler and DataLoader, and gives them back")
              for call in self._models),
            *((loop.node, "the loop goes over session.epochs(n)") for loop in self._loops if isinstance(loop, Loop)),
            *((loop.node, "the loop goes over session.steps(n)") for loop in self._loops if isinstance(loop, StepLoop)),
        ]  # fmt: skip
        for node, text in places:
            if node.lineno not in said:
                self._patching.add_remark(node, text)

        for loop in self._loops:
            carried_variables.add_remarks(self._patching, loop, self._session)
            self._bars(loop)

    def _bars(self, loop: Loop | StepLoop) -> None:
        """Add the remarks of ``progress_bars`` on a loop over epochs. Does nothing for a loop over steps."""
        if isinstance(loop, Loop):
            progress_bars.add_remarks(self._patching, loop, self._session)

    # --- unsupported scripts ----------------------------------------------------------------------------------------

    def _add_remark(self, node: ast.expr | ast.stmt, text: str) -> None:
        """Add a needed remark at ``node``, then raise ``_Unknown``; never returns."""
        self._patching.add_remark(node, text)
        raise _Unknown

    def _raise_if_unsupported(self) -> None:
        """Add a remark for each reason, visible without an edit, why the script cannot be patched. Raise ``_Unknown`` if one is
        needed."""
        leave, before = self._patching.add_remark, len(self._patching.remarks)
        for call in self._patching.calls(_SPAWN):
            leave(
                call,
                "it starts its ranks itself, as Ratchet and torchrun do: call the function once, without it",
                needed=not self._is_called_too(call),
            )
        alone = len(self._models) == 1 or self._are_branches()
        for what, calls in (
            ("DistributedDataParallel", [] if alone else self._models),
            ("init_process_group", self._starts),
        ):
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
            leave(model, "found no loop over epochs around a loop over batches: it must use session.epochs(n), "
                  "or session.steps(n) if it counts steps")  # fmt: skip
        for loop in self._loops:
            if len(self._loops) > 1:
                leave(loop.node, f"one of {len(self._loops)} training loops: a job has one, over session.epochs(n)")
            elif why := loop.unsupported_reason("session"):
                leave(loop.node, why)
        if any(remark.needed for remark in self._patching.remarks[before:]):
            raise _Unknown

    def _is_called_too(self, spawn: ast.Call) -> bool:
        """Return True if the file also directly calls the function that ``spawn`` starts."""
        name = ast.unparse(spawn.args[0]) if spawn.args else ""
        return any(isinstance(n, ast.Call) and ast.unparse(n.func) == name for n in ast.walk(self._source.tree))

    def _are_branches(self) -> bool:
        """Return True if the calls of DDP are ``model = DDP(model)`` in branches of which only one can run."""
        made = [self._source.statement(call) for call in self._models]
        names = {self._rebound_name(statement) for statement in made}
        branches = [self._branches(statement) for statement in made]
        return (
            None not in names
            and len(names) == len({id(self._source.scope(statement)) for statement in made}) == 1
            and all(any(one.get(key) != other[key] for key in one.keys() & other.keys())
                    for n, one in enumerate(branches) for other in branches[:n])
        )  # fmt: skip

    def _branches(self, statement: ast.stmt) -> dict[int, bool]:
        """Return, by the ``id`` of each ``if`` around ``statement``, whether the statement is in its body and not in its
        ``else``."""
        chain = [statement, *self._source.ancestors(statement)]
        return {id(outer): inner in outer.body for inner, outer in pairwise(chain) if isinstance(outer, ast.If)}

    def _rebound_name(self, made: ast.stmt) -> str | None:
        """Return the name in a statement ``model = DDP(model)``; None for any other statement."""
        match made:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                module = _module(call)
                return name if module is not None and _is_name(module, name) else None
        return None

    def _before(self, made: ast.stmt, end: ast.stmt) -> ast.stmt:
        """Return ``_outermost(made, end)``: ``made``, the statement that creates the DDP model, or an ``if`` around it. Raise
        ``_Unknown`` if there is none, or if ``made`` is in such an ``if`` and is not of the form ``model = DDP(model)``."""
        outer = self._outermost(made, end)
        if outer is not made and self._rebound_name(made) is None:
            self._add_remark(made, "it stands in a block of its own: session.prepare takes the module without DDP")
        return outer

    def _outermost(self, statement: ast.stmt, end: ast.stmt) -> ast.stmt:
        """Return ``statement`` if its block also contains ``end``, at any depth. Otherwise return the innermost ``if`` around
        ``statement`` whose block does. Raise ``_Unknown`` if the search reaches a statement that is no ``if``, such as a loop or
        the function."""
        found = statement
        while id(self._source.siblings(found)) not in self._blocks(end):
            around = next(self._source.ancestors(found))
            if not isinstance(around, ast.If):
                self._add_remark(statement, "the loop does not stand after it in the same block, or one within")
            assert isinstance(around, ast.If)
            found = around
        return found

    # --- the session ---------------------------------------------------------------------------------------------------

    def _insert_session(self, start: ast.Call, where: Scope, end: ast.stmt) -> None:
        """Record the edits that remove ``start``, the call of ``init_process_group``, and create the session at this place or
        earlier. ``where``: the scope of the DDP model. ``end``: a statement in this scope that needs the session. Raise
        ``_Unknown`` if no place is suitable."""
        statement, scope = self._source.statement(start), self._source.scope(start)
        if not isinstance(statement, ast.Expr):
            self._add_remark(start, "not a statement of its own: session = Session() takes its place")
        call, place = self._only_call(scope), statement
        if scope is not where and call is not None and self._source.scope(call) is where:  # setup()
            place = self._source.statement(call)
        elif scope is not where:
            end = self._path_to(scope, where, self._body(where)[0])
        place = self._outermost(place, end)
        self._find_removed(where, scope, place)
        block = self._source.siblings(place)
        needing = [s for s in block[: block.index(place)] if self._variables.needs_session(s, self._gone)]
        begun, made = (needing or [place])[0], f"{self._session} = {self._class}()  # starts the process group"
        self._made = self._source.scope(place), begun.lineno
        if begun is statement:
            self._source.replace(statement, made)
        else:
            self._source.insert(made, before=begun)
            self._source.remove(statement)

    def _find_removed(self, where: Scope, starts: Scope, place: ast.stmt) -> None:
        """Find the code that the patch removes or replaces, so that the variables that it reads do not count as needed. Sets
        ``_devices``, ``_set`` and ``_gone``. ``where``: the scope of the DDP model. ``starts``: the scope of
        ``init_process_group``. ``place``: the statement at which the session is created."""
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
        start = self._starts[0]
        keywords = [k for model in self._models for k in model.keywords if k.arg != "module"]
        others = [a for model in self._models for a in model.args[1:]]
        self._gone = [*self._devices, *self._set, *start.args, *start.keywords, *others, *keywords]

    def _ranks(self) -> None:
        """Replace the choice of a device and the reads of torchrun's variables by the session's attributes, or add optional
        remarks."""
        # After all edits of other statements: what these have changed is skipped.
        for statement in self._devices:
            name = self._variables.device(statement)
            device = f"{self._session}.device"
            self._source.replace(statement, f"{name} = {f'str({device})' if self._variables.is_text(name) else device}")
        for statement in self._set:
            self._source.remove(statement)
        gone = {id(n) for one in self._gone for n in ast.walk(one)}
        for statement in [n for n in ast.walk(self._source.tree) if isinstance(n, ast.stmt)]:
            if self._variables.is_unused(statement, self._gone) and self._source.is_unedited(statement):
                self._source.remove(statement)
                gone |= {id(n) for n in ast.walk(statement)}
        home, line = self._made
        for read, attribute in self._variables.reads():
            if id(read) in gone:
                continue
            scope = self._source.scope(read)
            seen = scope in self._seeing or (scope is home and read.lineno >= line)
            if seen and self._variables.is_whole(read) and self._source.is_unedited(read):
                self._source.replace(read, f"{self._session}.{attribute}")
            else:
                text = f"torchrun and ratchet run set it, and python does not: {self._session}.{attribute} has it"
                self._patching.add_remark(read, f"{ast.unparse(read)}: {text}", needed=False)

    def _path_to(self, origin: Scope, target: Scope, there: ast.stmt) -> ast.stmt:
        """Return the statement of ``origin`` that calls ``target``, and record the edits that pass the session to ``target`` as
        an argument. If both scopes are the same, return ``there`` and record nothing. Raise ``_Unknown`` if ``target`` is not a
        plain function whose only use is a call in ``origin``."""
        if origin is target:
            return there
        call = self._only_call(target)
        if call is None or not isinstance(target, ast.FunctionDef) or self._source.scope(call) is not origin:
            self._add_remark(there, "the session that it needs is made in another function, from which no single plain "
                "call leads "
                               "here: pass it in")  # fmt: skip
        assert call is not None and isinstance(target, ast.FunctionDef)
        typed = any(a.annotation for a in (*target.args.posonlyargs, *target.args.args))
        self._source.insert_parameter(target, f"{self._session}: {self._class}" if typed else self._session)
        self._source.insert_argument(call, self._session)
        self._seeing.append(target)
        return self._source.statement(call)

    def _only_call(self, function: Scope) -> ast.Call | None:
        """Return the only call of ``function``; None if it is not the only use, or the function is decorated or nested."""
        if not isinstance(function, Function) or function not in self._source.tree.body or function.decorator_list:
            return None
        uses = [n for n in ast.walk(self._source.tree) if isinstance(n, ast.Name) and n.id == function.name]
        parent = next(self._source.ancestors(uses[0])) if len(uses) == 1 else None
        return parent if isinstance(parent, ast.Call) and parent.func is uses[0] else None

    # --- model and devices ---------------------------------------------------------------------------------------------

    def _unwrap(self, name: str, made: ast.stmt, end: ast.stmt, prepared: ast.stmt) -> str | None:
        """Record the edits that remove DDP from ``made``, the statement that creates the DDP model. Return the name of the module
        that must be passed to ``session.prepare`` at the statement ``prepared``. Return None if earlier code needs the DDP model:
        ``session.prepare`` is then called at ``made``. ``end``: the loop, or the call of its function."""
        before, after = list[ast.AST](), list[ast.AST]()
        for node in self._between(made, end):
            (before if getattr(node, "lineno", 0) <= (prepared.end_lineno or 0) else after).append(node)
        uses = [node for node in before if isinstance(node, ast.Name) and node.id == name]
        used, early = bool(uses), not all(map(self._is_of_parameters, uses))
        for call in self._models:
            module = self._module_of(call)
            if early and not isinstance(made, ast.If):
                self._source.replace(call, f"{self._session}.prepare({self._source.segment(module)})")
            elif isinstance(module, ast.Name) and (module.id == name or not used):
                self._source.remove(self._source.statement(call))
                taken = module.id
            else:
                self._source.replace(call, self._source.expression(module))
                taken = name
        if early and isinstance(made, ast.If):
            self._source.insert(f"{name} = {self._session}.prepare({name})", behind=made)
        for node in before:
            if not early and isinstance(node, ast.Attribute) and node.attr == "module" and _is_name(node.value, name):
                self._source.replace(node, name)
        if isinstance(made, ast.If):
            self._unconditional(name, made)
        for node in (*before, *after):
            if isinstance(node, ast.Attribute) and node.attr == "register_comm_hook":
                self._patching.add_remark(
                    node, "removed: the hook of a job is set in the spec (hook), and kept across restarts"
                )
                self._source.remove(self._source.statement(node))
        return None if early else taken

    def _is_of_parameters(self, use: ast.Name) -> bool:
        """Return True if this use of the DDP model does not need DDP, as in ``model.parameters()``, or if the patch removes
        it."""
        parent, above = list(self._source.ancestors(use))[:2]
        if not isinstance(parent, ast.Attribute):
            return False
        of_module = parent.attr == "module" and isinstance(above, ast.Attribute) and above.attr in _SAME
        return of_module or parent.attr in _SAME or parent.attr == "register_comm_hook"

    def _unconditional(self, name: str, made: ast.If) -> None:
        """Replace ``model.module if condition else model`` after ``made`` by ``model.module``, since the model is now always in
        DDP, and add an optional remark."""
        for node in ast.walk(self._source.tree):
            match node:
                case ast.IfExp(
                    body=ast.Attribute(value=ast.Name(id=model), attr="module") as module, orelse=ast.Name(id=plain)
                ):
                    asks_the_same = ast.unparse(node.test) == ast.unparse(made.test)
                    if (
                        model == plain == name
                        and asks_the_same
                        and node.lineno > made.lineno
                        and self._source.is_unedited(node)
                    ):
                        self._source.replace(node, self._source.segment(module))
        text = f"{name} is now wrapped in DDP in a run of one process, too: the names of its weights begin with module."
        self._patching.add_remark(made, text, needed=False)

    def _module_of(self, call: ast.Call) -> ast.expr:
        """Return the module that the DDP call ``call`` wraps, and add remarks on settings of DDP. Raise ``_Unknown`` if it is not
        visible."""
        module = _module(call)
        if module is None:
            self._add_remark(call, "cannot determine which module it wraps: pass that to session.prepare")
        assert module is not None
        for keyword in call.keywords:
            text = ast.unparse(keyword)
            if keyword.arg in _KEYS:
                self._patching.add_remark(keyword.value, f"{text} goes into the spec: ddp: {{{keyword.arg}: ...}}")
            elif keyword.arg not in (*_NOT_NEEDED, "module"):
                self._patching.add_remark(
                    keyword.value, f"{text} of DistributedDataParallel is left out: Ratchet has no such setting"
                )
        return module

    def _between(self, first: ast.stmt, last: ast.stmt) -> Iterator[ast.AST]:
        """Yield all nodes of the statements after ``first`` in its block, and before the statement that contains ``last``."""
        block = self._source.siblings(first)
        for statement in block[block.index(first) + 1 :]:
            if last in list(ast.walk(statement)):
                return
            yield from ast.walk(statement)

    # --- session.prepare ----------------------------------------------------------------------------------------------

    def _prepare(self, model: str, made: ast.stmt, end: ast.stmt, loop: Loop | StepLoop) -> set[str]:
        """Record the call of ``session.prepare`` before the loop. Return the names of the model and of all other objects that the
        Session then manages. ``made``: the statement that creates ``model``. ``end``: the loop, or the call of its function.
        Raise ``_Unknown`` if the call is not possible."""
        taken: dict[str, list[str]] = {kind: [] for kind in _ORDER}
        taken["model"], last, loaders = [model], made, self._loaders(loop) if isinstance(loop, Loop) else set[str]()
        for statement in self._statements(self._source.scope(made)):
            if statement is made or statement.lineno >= end.lineno:
                continue
            targets: list[ast.expr]
            if isinstance(statement, ast.AnnAssign) and statement.value is not None:
                targets, value = [statement.target], statement.value
            elif isinstance(statement, ast.Assign):
                targets, value = [*statement.targets], statement.value
            else:
                continue
            target, kind = targets[0], self._kind(targets[0], value, model, loop)
            if kind is None or (kind == "loader" and not any(_is_name(target, name) for name in loaders)):
                continue
            block = self._blocks(statement)[0]
            if len(targets) > 1 or not isinstance(target, ast.Name) or block not in self._blocks(end):
                self._add_remark(
                    statement,
                    f"{ast.unparse(target)} is made in a block of its own: session.prepare takes each {kind} of the training",
                )
            assert isinstance(target, ast.Name)
            taken[kind] = [*(name for name in taken[kind] if name != target.id), target.id]
            last = max(last, statement, key=lambda s: s.lineno)
        if isinstance(loop, Loop) and (len(taken["loader"]) != 1 or loaders != set(taken["loader"])):
            self._add_remark(loop.node, "the DataLoader that it goes over is not seen to be made and given a name in "
                "the function of "
                                   "the model: session.prepare takes it, and gives back the one to train over. Batches that come "
                                   "otherwise: `for step in session.steps(n)`, a batch each")  # fmt: skip
        if not taken["optimizer"]:
            text = "no optimizer is seen to be made before the loop and given a name: session.prepare takes it, too"
            self._patching.add_remark(loop.node, text)
        beside = last in self._source.siblings(end)
        _, *others = known = [name for names in taken.values() for name in names]
        given = self._unwrap(model, made, end, last if beside else end)
        names, values = (others, others) if given is None else (known, [given, *others])
        if names:
            line = f"{', '.join(names)} = {self._session}.prepare({', '.join(values)})"
            self._source.insert(line, behind=last) if beside else self._source.insert(line, before=end)
        stateful_objects.add_remarks(self._patching, loop, self._session, known)
        return {*known}

    def _loaders(self, loop: Loop) -> set[str]:
        """Return the names of the loaders that the loop's passes iterate over; "" stands for a loader without a name. If the loop
        is in another function than the DDP model, these are the names that its only call passes."""
        found: set[str] = set()
        function = self._source.scope(loop.node)
        call = None if function is self._source.scope(self._models[0]) else self._only_call(function)
        for loader in [one.loader for one in loop.passes]:
            if call is not None and isinstance(function, Function) and isinstance(loader, ast.Name):
                loader = bind(function, call).get(loader.id)
            found.add(loader.id if isinstance(loader, ast.Name) else "")
        return found

    def _kind(self, target: ast.expr, value: ast.expr, model: str, loop: Loop | StepLoop) -> str | None:
        """Return the kind of the object that the expression ``value`` creates: one of ``_ORDER``, except "model". Return None if
        ``session.prepare`` does not take the object. ``target``: the expression that the object is assigned to."""
        origins = self._patching.origins.origins_of(value.func) if isinstance(value, ast.Call) else set()
        if origins & LOADERS:
            return "loader"
        if origins & _SCALERS:
            return "scaler"
        if any(origin.startswith("torch.optim.lr_scheduler.") for origin in origins):
            return "scheduler"
        if stateful_objects.is_generator(self._patching, value):
            return (
                "generator"
                if isinstance(target, ast.Name) and stateful_objects.is_used(self._patching, loop, target.id)
                else None
            )
        if any(origin.startswith("torch.optim.") and "swa_utils" not in origin for origin in origins):
            return "optimizer"
        if not isinstance(value, ast.Call) or _is_name(target, model):
            return None
        if self._is_stepped(target, model, loop):
            return "optimizer"
        return "scheduler" if stateful_objects.is_stepped(loop, ast.unparse(target)) else None

    def _is_stepped(self, name: ast.expr, model: str, loop: Loop | StepLoop) -> bool:
        """Return True if the loop uses ``name`` like an optimizer, and ``name`` is not the model."""
        return not _is_name(name, model) and any(
            isinstance(n, ast.Attribute) and n.attr == "zero_grad" and ast.unparse(n.value) == ast.unparse(name)
            for n in ast.walk(loop.node)
        ) and any(
            isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "step"
            and ast.unparse(name) in (ast.unparse(n.func.value), *map(ast.unparse, n.args))
            for n in ast.walk(loop.node)
        )  # fmt: skip

    # --- syntax tree ------------------------------------------------------------------------------------------------------

    def _body(self, scope: Scope) -> list[ast.stmt]:
        assert not isinstance(scope, ast.Lambda)
        return scope.body

    def _statements(self, scope: Scope) -> list[ast.stmt]:
        """Return all statements in ``scope``, at any depth, sorted by line; those of nested functions and classes are left
        out."""
        found = [
            n for n in ast.walk(scope) if isinstance(n, ast.stmt) and n is not scope and self._source.scope(n) is scope
        ]
        return sorted(found, key=lambda s: s.lineno)

    def _blocks(self, statement: ast.stmt) -> list[int]:
        """Return the ids of the blocks (statement lists) that contain ``statement`` in its function, innermost first."""
        scope = self._source.scope(statement)
        chain = [statement, *(n for n in self._source.ancestors(statement) if isinstance(n, ast.stmt))]
        return [id(self._source.siblings(s)) for s in chain if s is not scope and self._source.scope(s) is scope]


def _module(call: ast.Call) -> ast.expr | None:
    """Return the module argument of a DDP call; None if it is missing or hidden in ``*args``."""
    module = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "module"), None)
    return None if isinstance(module, ast.Starred) else module


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
