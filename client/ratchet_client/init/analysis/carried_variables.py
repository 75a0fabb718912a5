"""Edits and remarks for variables that a loop carries from one iteration to the next: no checkpoint has them unless a Session
keeps them."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from typing import Final

from ratchet_client.init.analysis.epoch_loops import Loop, Loops, parameters
from ratchet_client.init.analysis.loop_ranges import called_as
from ratchet_client.init.analysis.script_source import Patching
from ratchet_client.init.analysis.source_edits import Source
from ratchet_client.init.analysis.step_loops import Counted, StepLoop
from ratchet_contract.script.loop_variables import carried_variables, only_displayed

_NOT_SAVED: Final = frozenset({"iter", "open", "cycle", "chain", "zip", "map", "enumerate"})
"""Functions whose results cannot be saved in a checkpoint."""
_PURE: Final = frozenset(
    {"print", "max", "min", "sum", "abs", "float", "int", "round", "len", "str", "repr", "range", "format"}
)
"""Functions that do not modify their arguments."""
_SIMPLE: Final = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)
_Names = dict[str, ast.Name]


def save_carried(patching: Patching, loop: Loop | StepLoop, session: str, prepared: Collection[str] = ()) -> None:
    """Record edits that keep the loop's carried variables by ``session.keep``, or add remarks where edits are not enough.
    ``session``: the Session's name. ``prepared``: names of objects that the Session has."""
    source, node = patching.source, loop.node
    carrying = _Carrying(patching, loop, prepared)
    names = [name for name in carrying.needed if carrying.obstacle(name) is None]
    if names:
        kept = "kept" if "kept" not in patching.bound_names() else "ratchet_kept"
        listed, held = ", ".join(names), ", ".join(f"{kept}.{name}" for name in names)
        for declared in carrying.declarations:
            if declared.names[0] in names:
                source.replace(declared, f"{declared.names[0]} = {_first_value(source, declared.names[0])}")
        block = source.siblings(node)
        before = block[block.index(node) - 1] if block[0] is not node else None
        line = f"{kept} = {session}.keep({', '.join(f'{name}={name}' for name in names)})"
        source.insert(line, behind=before) if before is not None else source.insert(line, before=node)
        source.insert_in(node, f"{listed} = {held}")
        source.insert(f"{held} = {listed}", behind=loop.last)
        again = [name for name in names if is_read_after(source, node, name)]
        if again:
            source.insert(f"{', '.join(again)} = {', '.join(f'{kept}.{name}' for name in again)}", behind=node)
        _add_remarks(patching, carrying, session, names, f"add {{names}} to the line `{line}` of this patch", kept)
    else:
        _add_remarks(patching, carrying, session)


def add_remarks(patching: Patching, loop: Loop | StepLoop, session: str) -> None:
    """Add remarks on the variables that the loop carries from one iteration to the next. ``session``: the Session's name."""
    _add_remarks(patching, _Carrying(patching, loop, ()), session)


def _add_remarks(
    patching: Patching,
    carrying: _Carrying,
    session: str,
    saved: Collection[str] = (),
    keep: str = "",
    kept: str = "kept",
) -> None:
    """Add a remark for each carried variable that is not in ``saved``. Unless the variable is only displayed, the remark says
    what to do by hand. ``keep``: a text on how to keep variables, with the placeholder ``{names}``; if empty, the text of
    ``_keep``. ``kept``: the name of the variable that has the kept values."""
    loop = carrying.loop
    cures: list[tuple[ast.Name, str, str, str, bool]] = []  # place, variable, what is the case, cure, needed
    for name, node in carrying.needed.items():
        if name not in saved:
            cure = carrying.obstacle(name) or f"{{keep}}, and {{kept}}.{name} from there on"
            text = f"{name} is carried from one iteration to the next, and no checkpoint contains it: "
            cures.append((node, name, text, cure, True))
    for name, node in carrying.shown.items():
        patching.add_remark(
            node, f"{name} starts from its initial value after a resume; it is only printed", needed=False
        )
    loops, scope = Loops(patching.source), patching.source.scope(loop.node)
    inner = (n for n in ast.walk(loop.node) if isinstance(n, ast.For) and n is not loop.node)
    own = [(batches, loop.node) for batches in inner if loops.trains(batches)]
    others = [(one.node, patching.source.scope(one.node)) for one in (loop.passes if isinstance(loop, Loop) else ())]
    others = [(batches, function) for batches, function in others if function is not scope]
    for batches, around in (*own, *others) if isinstance(loop, Loop) else ():
        found = _assigned_before(batches, around)
        shown = only_displayed(around, found)
        for name, node in found.items():
            if name in carrying.needed or (around is loop.node and name in carrying.shown):
                continue
            text = f"{name} starts from its initial value where a resume continues within an epoch"
            if name in shown:
                patching.add_remark(node, f"{text}; it is only printed", needed=False)
            else:
                cure = f"{{keep}}, and reset {{kept}}.{name} only if loader.start == 0"
                cures.append((node, name, f"{text}: ", cure, around is loop.node))
    together = list(dict.fromkeys(name for _, name, _, cure, _ in cures if "{keep}" in cure))
    if not keep:
        keep, kept = _keep(patching, loop, session, together)
    for node, name, text, cure, needed in cures:
        filled = cure.format(session=session, keep=keep.format(names=f"{name}=..."), kept=kept)
        patching.add_remark(node, text + filled, needed=needed)


def _keep(patching: Patching, loop: Loop | StepLoop, session: str, names: list[str]) -> tuple[str, str]:
    """Return a text on how to keep ``names``, and the name of the variable that then has their values. The text may have the
    placeholder ``{names}``."""
    # An existing call is extended, since a second one would replace its variable.
    found: list[tuple[int, str, str]] = []
    for node in ast.walk(patching.source.scope(loop.node)):
        match node:
            case ast.Assign(targets=[target], value=ast.Call(func=ast.Attribute(attr="keep") as called)):
                if node.lineno < loop.node.lineno:
                    found.append((node.lineno, ast.unparse(called), ast.unparse(target)))
    if found:
        line, called_text, kept = max(found)
        return f"add {{names}} to the {called_text}(...) in line {line}", kept
    listed = ", ".join(f"{name}=..." for name in names)
    return f"kept = {session}.keep({listed}) before the loop", "kept"


class _Carrying:
    """The carried variables of one loop. ``needed``: those on which training or a file may depend. ``shown``: those that are only
    displayed. ``declarations``: the ``global`` statements of the loop's function."""

    def __init__(self, patching: Patching, loop: Loop | StepLoop, prepared: Collection[str]) -> None:
        self.loop, self._source, self._prepared = loop, patching.source, prepared
        self._scope = self._source.scope(loop.node)
        found = _assigned_before(loop.node, self._scope)
        if isinstance(loop, StepLoop) and isinstance(loop.over, Counted):
            found.pop(loop.over.counter.id, None)
        shown = only_displayed(self._scope, found)
        self._loops = Loops(self._source)
        found = self._changed_in_functions() | found
        stored = {n.id for n in _names(loop.node) if not isinstance(n.ctx, ast.Load)}
        found = {name: node for name, node in found.items() if name not in prepared or name in stored}
        self.needed = {name: node for name, node in found.items() if name not in shown}
        self.shown = {name: node for name, node in found.items() if name in shown}
        self.declarations = [
            n for n in ast.walk(self._scope) if isinstance(n, ast.Global) and self._source.scope(n) is self._scope
        ]

    def _changed_in_functions(self) -> _Names:
        """Return the variables that functions called in the loop assign by ``global`` or ``nonlocal``, each with a place of
        assignment."""
        found: _Names = {}
        for n in self._loops.reachable_nodes(self.loop.node):
            if isinstance(n, ast.Global | ast.Nonlocal) and (home := self._source.scope(n)) is not self._scope:
                stored = {one.id: one for one in _names(home) if isinstance(one.ctx, ast.Store)}
                found |= {name: stored[name] for name in n.names if name in stored}
        return found

    def obstacle(self, name: str) -> str | None:
        """Return None if the variable ``name`` can be kept by a line at the beginning and one at the end of each iteration; else
        what to do by hand, as text that may have the placeholders ``{keep}`` and ``{kept}``."""
        source, node = self._source, self.loop.node
        left = self.loop.exits
        if name in self._prepared:
            return "session.prepare returns it: give the other value another name"
        if any(called_as(call) in _NOT_SAVED for value in self._values(name) for call in _calls(value)):
            return "a checkpoint cannot contain an iterator or a file: create it again from the step number"
        if self._is_changed_elsewhere(name):
            return f"{{keep}}, and {{kept}}.{name} wherever a function uses it"
        if not self._is_assigned_before(name):
            return f"give it a value on every rank before the loop, then {{keep}}, and {{kept}}.{name} from there on"
        if node.orelse or any(isinstance(one, ast.Continue) for one in left):
            held = f"{{kept}}.{name}"
            return f"{{keep}}, {name} = {held} first in each iteration, and {held} = {name} before each exit from it"
        if left and is_read_after(source, node, name):
            return f"{{keep}}, and {{kept}}.{name} in the loop and after it"
        if node.body[0].lineno == node.lineno:
            return f"{{keep}}, and {{kept}}.{name} from there on"
        if isinstance(self.loop, StepLoop):
            return None
        training = [s for s in node.body if self._loops.trains(s)]
        for change in self._changes(name):
            around = next(s for s in (change, *source.ancestors(change)) if s in node.body)
            if around not in training and change.lineno < training[-1].lineno:
                return "code before an epoch's batches runs again on a resume: change it after them"
            if around in training and not self._is_within_steps(around, change):
                return f"{{keep}}, and {{kept}}.{name} where the batches change it"
        return None

    def _values(self, name: str) -> Iterator[ast.expr]:
        """Yield the right side of each ``=`` assignment in the file whose targets mention ``name``."""
        for one in ast.walk(self._source.tree):
            if isinstance(one, ast.Assign) and name in [n.id for t in one.targets for n in _names(t)]:
                yield one.value

    def _is_changed_elsewhere(self, name: str) -> bool:
        """Return True if another function declares ``name`` as ``global`` or ``nonlocal``. Return True also if the loop's own
        function declares it as ``global`` and it cannot become a local variable."""
        others = (
            n for n in ast.walk(self._source.tree) if isinstance(n, ast.Global | ast.Nonlocal) and name in n.names
        )
        declared = any(name in one.names for one in self.declarations)
        return any(self._source.scope(n) is not self._scope for n in others) or (
            declared and not self._can_be_local(name)
        )

    def _can_be_local(self, name: str) -> bool:
        """Return True if the global variable ``name`` can become a local variable of the loop's function. Its first value is then
        the constant that the module assigns."""
        uses = [n for n in _names(self._source.tree) if n.id == name and self._source.scope(n) is not self._scope]
        # It must become local, because a change of a module's variable is never restored.
        alone = [one.names for one in self.declarations if name in one.names] == [[name]]
        return alone and len(uses) == 1 and _first_value(self._source, name) is not None

    def _is_assigned_before(self, name: str) -> bool:
        """Return True if ``name`` is a parameter or global, or is assigned before the loop in a block that contains the loop."""
        if any(name in one.names for one in self.declarations) or name in parameters(self._scope):
            return True
        around = [self.loop.node, *self._source.ancestors(self.loop.node)]
        blocks = [
            self._source.siblings(s) for s in around if isinstance(s, ast.stmt) and self._source.scope(s) is self._scope
        ]
        assigned = [
            s for block in blocks for s in block if isinstance(s, ast.Assign) and s.lineno < self.loop.node.lineno
        ]
        assigned_with_type = [
            s.target for block in blocks for s in block
            if isinstance(s, ast.AnnAssign) and s.value is not None and s.lineno < self.loop.node.lineno
        ]  # fmt: skip
        targets = [*assigned_with_type, *(t for s in assigned for t in s.targets)]
        flat = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple | ast.List) else [t])]
        flat = [e.value if isinstance(e, ast.Starred) else e for e in flat]
        return any(isinstance(one, ast.Name) and one.id == name for one in flat)

    def _changes(self, name: str) -> Iterator[ast.Name]:
        """Yield the places in the loop's body that assign ``name`` or may change its value in place."""
        for n in (n for s in self.loop.node.body for n in _names(s)):
            if n.id == name:
                parent = next(self._source.ancestors(n))
                of_it = isinstance(parent, ast.Attribute | ast.Subscript) and parent.value is n
                given = isinstance(parent, ast.Call) and n is not parent.func and called_as(parent) not in _PURE
                if not isinstance(n.ctx, ast.Load) or of_it or given or isinstance(parent, ast.keyword | ast.Starred):
                    yield n

    def _is_within_steps(self, around: ast.stmt, change: ast.Name) -> bool:
        """Return True if the variable can be kept although a training statement of the loop's body changes it. ``around``: this
        statement. ``change``: the place of the change in the statement."""
        if isinstance(around, _SIMPLE):
            return not any(change in _names(call) for call in _calls(around) if self._loops.trained_by(call))
        return isinstance(around, ast.For) and isinstance(change.ctx, ast.Load)


def _assigned_before(loop: ast.For | ast.While, scope: ast.AST) -> _Names:
    """Return the variables that ``loop`` carries and that may have a value before it, each with a place where it is read."""
    given = {n.id for n in _names(scope) if isinstance(n.ctx, ast.Store) and n.lineno < loop.lineno}
    given |= {name for n in ast.walk(scope) if isinstance(n, ast.Global) for name in n.names}
    given |= parameters(scope)
    return {name: node for name, node in carried_variables(loop, scope).items() if name in given}


def _first_value(source: Source, name: str) -> str | None:
    """Return the source text of the constant that the module assigns to ``name``; None if there is none."""
    for statement in source.tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Constant() as value) if target == name:
                return source.segment(value)
    return None


def is_read_after(source: Source, loop: ast.For | ast.While, name: str) -> bool:
    """Return True if code after the loop reads ``name`` in the same scope, or a function that sees this variable reads it."""
    scope, end = source.scope(loop), loop.end_lineno or loop.lineno
    for n in _names(source.tree):
        if n.id == name and isinstance(n.ctx, ast.Load):
            home = source.scope(n)
            if home is scope:
                if n.lineno > end:
                    return True
            elif (isinstance(scope, ast.Module) or scope in source.ancestors(home)) and not _binds(home, name):
                return True
    return False


def _binds(function: ast.AST, name: str) -> bool:
    """Return True if ``name`` is a parameter or local variable of ``function`` or of a function in it, and
    ``global`` or ``nonlocal`` in none."""
    nodes = list(ast.walk(function))
    if any(isinstance(n, ast.Global | ast.Nonlocal) and name in n.names for n in nodes):
        return False
    arguments = any(isinstance(n, ast.arg) and n.arg == name for n in nodes)
    return arguments or any(n.id == name and not isinstance(n.ctx, ast.Load) for n in _names(function))


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Name))


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Call))
