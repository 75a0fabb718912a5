"""``ratchet init --patch`` of a script with Lightning's Trainer: ``SessionStrategy`` as its strategy."""

from __future__ import annotations

import ast
from typing import Final

from ratchet_client.init.analysis.import_origins import LIGHTNING_CLI, LIGHTNING_TRAINERS, OLD_LIGHTNING_TRAINERS
from ratchet_client.init.analysis.script_source import Patching

_STRATEGY: Final = "SessionStrategy()"
_PLAIN: Final = frozenset({"auto", "ddp", "ddp_spawn", "ddp_fork", "ddp_notebook"})
"""Strategies without settings, which DDP under Ratchet replaces."""
_UNUSED: Final = "_find_unused_parameters_true"
_STRATEGIES: Final = frozenset(
    f"{module}.{name}"
    for module in ("lightning.pytorch.strategies", "lightning.pytorch.strategies.ddp")
    for name in ("DDPStrategy",)
)


def patch(patching: Patching) -> bool:
    """Record the edits that make a script with Lightning use ``ratchet.lightning``, and add remarks on the rest. Return False if
    it calls neither a Trainer nor LightningCLI."""
    old, commands = patching.calls(OLD_LIGHTNING_TRAINERS), patching.calls(LIGHTNING_CLI)
    trainers = patching.calls(LIGHTNING_TRAINERS)
    if not (trainers or old or commands):
        return False
    for call in old:
        patching.add_remark(call, "pytorch_lightning is the package from before lightning, whose Trainer takes no "
            "SessionStrategy: "
                             "import lightning in its place (pip install lightning)")  # fmt: skip
    training = [call for call in trainers if _trains(patching, call)] if len(trainers) > 1 else trainers
    if len(trainers) > 1 and len(training) != 1:
        training = []
        for call in trainers:
            patching.add_remark(call, f"one of {len(trainers)} Trainers, of which a job trains one: give that one "
                                 f"strategy={_STRATEGY}, from ratchet.lightning import SessionStrategy")  # fmt: skip
    for node in ast.walk(patching.source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fit":
            for keyword in node.keywords:
                if keyword.arg == "ckpt_path" and ast.unparse(keyword.value) != "None":
                    patching.add_remark(
                        keyword.value, "ckpt_path of fit is refused: a job resumes automatically; remove it"
                    )
    changed = [call for call in training if _strategy(patching, call)]
    if changed:
        patching.add_import("from ratchet.lightning import SessionStrategy", patching.imports_of(LIGHTNING_TRAINERS))
    if commands:  # the import registers the strategy by its name
        patching.add_import("import ratchet.lightning", patching.imports_of(LIGHTNING_CLI))
    for call in commands:
        patching.add_remark(call, "LightningCLI makes its Trainer from its command line and YAML file: add --trainer."
            "strategy ratchet "
                             "to the command, or `strategy: ratchet` below `trainer` in the file")  # fmt: skip
    return True


def _trains(patching: Patching, call: ast.Call) -> bool:
    """Return True if ``fit`` of the Trainer that ``call`` creates is seen to be used."""
    parent = next(patching.source.ancestors(call))
    if isinstance(parent, ast.Attribute):
        return parent.attr == "fit"
    if not isinstance(parent, ast.Assign | ast.AnnAssign):
        return False
    targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
    names = {ast.unparse(target) for target in targets}
    return any(
        isinstance(n, ast.Attribute) and n.attr == "fit" and ast.unparse(n.value) in names
        for n in ast.walk(patching.source.tree)
    )


def _strategy(patching: Patching, call: ast.Call) -> bool:
    """Record the edit that sets ``strategy=SessionStrategy()`` in ``call``, also in place of a DDP strategy, and return True. For
    any other strategy, or one that is not visible, add a remark and return False."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    value = given.get("strategy")
    if value is None and None in given:
        patching.add_remark(call, f"strategy may be among {ast.unparse(given[None])}: it must be {_STRATEGY}, from "
                             "ratchet.lightning import SessionStrategy")  # fmt: skip
        return False
    if value is None:
        patching.source.insert_argument(call, f"strategy={_STRATEGY}")
        return True
    name = value.value if isinstance(value, ast.Constant) else None
    strategy = isinstance(value, ast.Call) and patching.origins.is_one(value.func, _STRATEGIES)
    if isinstance(name, str) and (name in _PLAIN or name.endswith(_UNUSED)):
        if name.endswith(_UNUSED):
            patching.add_remark(value, "a job's DDP has its settings in the spec: ddp: {find_unused_parameters: true}")
    elif strategy and isinstance(value, ast.Call):
        if value.args or value.keywords:
            patching.add_remark(value, f"a job's DDP has its settings in the spec (ddp), not {ast.unparse(value)}")
    else:
        patching.add_remark(value, f"strategy is {ast.unparse(value)}: Ratchet trains with DDP, so it must be {_STRATEGY}, from "
                              "ratchet.lightning import SessionStrategy")  # fmt: skip
        return False
    patching.source.replace(value, _STRATEGY)
    return True
