"""Parses JSON or YAML data into a ``JobSpec``, with errors that tell a person what to do."""

from __future__ import annotations

import difflib
import functools
import json
import operator
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Any, Final, get_args

import yaml
from pydantic import BaseModel, ValidationError

from ratchet_contract.errors import FieldProblem, SpecError
from ratchet_contract.spec.job import CodeSpec, JobSpec
from ratchet_contract.spec.launcher import LAUNCHER_SPECS
from ratchet_contract.spec.policy import exit_code_problems as policy_faults
from ratchet_hooks.specs.hook_specs import (
    WRAPPERS,
    HookSpecBase,
    PostLocalSGDSpec,
    canonical_hook_name,
    canonical_wrapper,
    normalise_hook,
)
from ratchet_hooks.specs.registry import HOOKS, HookEntry

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""pydantic's error types for an unknown key, in a model and in a dataclass (a hook's spec)."""
_MAX_PROBLEMS = 50
_MAX_EXAMINED_FAULTS = 500
"""Number of faults in one spec beyond which only the first ones are examined, and no further rules."""
_MAX_THREADS = 1024
_EXAMPLES = {
    "/task": 'task: {entrypoint: "my_module:MyTask", args: {}}',
    "/script": 'script: ["train.py", "--lr", "0.1"], with the file and each argument as a separate item',
    "/code": "code: {path: .}",
    "/hook": "hook: {name: powerSGD}",
    "/world": "world: {ranks_per_node: 2}",
    "/checkpoint": "checkpoint: {every_steps: 100}",
    "/environment": 'environment: {requirements: ["timm==1.0.9"]}',
    "/labels": "labels: {team: vision}",
    "/env": "env: {NAME: value}",
}
"""Examples for the keys that are most often given as a bare value."""
_NAME_RULE = "a name is 1 to 63 lower-case letters, digits and '-', begins with a letter and does not end with '-', like my-job-2"


_EXPECTED_TYPES = {
    "string_type": "text", "int_type": "a whole number", "int_parsing": "a whole number", "int_from_float": "a whole number",
    "float_type": "a number", "float_parsing": "a number", "bool_type": "true or false", "bool_parsing": "true or false",
}  # fmt: skip
"""By pydantic's error type."""
_SYNONYMS = {"gpu": "cuda"}


@dataclass(frozen=True)
class Examined:
    """The result of examining a spec. ``spec``: the spec, with defaults or placeholders in place of faulty values; None if none
    could be built. ``uncertain_keys``: the top-level keys that a fault may affect."""

    spec: JobSpec | None
    uncertain_keys: frozenset[str]
    problems: list[FieldProblem]


def parse_spec(data: Any) -> JobSpec:
    """Return the spec in ``data`` (decoded JSON or YAML). Raises ``SpecError`` with the faults found, at most 50."""
    found = examine_spec(data)
    if found.problems or found.spec is None:
        raise spec_error(found.problems, data)
    return found.spec


def examine_spec(data: Any) -> Examined:
    """Return the spec in ``data`` and the faults that are found in the data alone, without examining a machine. Raises
    ``SpecError`` only if ``data`` is not a mapping."""
    if not isinstance(data, dict):
        raise SpecError("a job spec is a mapping (JSON object or YAML mapping)", code="invalid-spec")
    problems = _hook_problems(data.get("hook"))
    mended = _Mended(data)
    mended.remove_faulty([tuple(problem.pointer.split("/")[1:]) for problem in problems])
    spec, goes_on = None, True
    while spec is None and goes_on:
        try:
            whole = JobSpec.model_validate(mended.data)
            crossed = cross_check(whole, mended.uncertain_keys)
            problems += crossed
            mended.remove_faulty([tuple(problem.pointer.split("/")[1:]) for problem in crossed])
            spec = JobSpec.model_validate(mended.data) if crossed else whole
        except ValidationError as error:
            faults = error.errors(include_url=False)
            if (
                len(faults) > _MAX_EXAMINED_FAULTS
            ):  # examining all takes time that grows with the square of their number
                problems += [problem_of(fault, JobSpec) for fault in faults[:_MAX_PROBLEMS]]
                break
            told = [problem_of(fault, JobSpec) for fault in faults if not mended.is_consequence(fault)]
            problems += [problem for problem in told if problem not in problems]
            unknown = {fault["loc"] for fault in faults if fault["type"] in _UNKNOWN}
            goes_on = mended.remove_faulty([fault["loc"] for fault in faults], unknown)
    return Examined(spec, frozenset(mended.uncertain_keys & set(JobSpec.model_fields)), problems)


def spec_error(problems: Sequence[FieldProblem], data: Any) -> SpecError:
    """Return the error with the first 50 of ``problems``, in the order of the keys in ``data``."""
    ordered = sorted(problems, key=lambda problem: _position_in(data, problem.pointer))
    return SpecError(_summary(ordered), errors=ordered[:_MAX_PROBLEMS])


def _position_in(data: Any, pointer: str) -> list[int]:
    """Return the position in ``data`` of the value at a JSON pointer, as a list with one index per level. Problems are sorted by
    these lists."""
    place = list[int]()
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(data, dict):
            keys = [str(known) for known in data]
            place.append(keys.index(key) if key in keys else len(keys))
            data = next((value for known, value in data.items() if str(known) == key), None)
        elif isinstance(data, list) and key.isdecimal() and int(key) < len(data):
            place.append(int(key))
            data = data[int(key)]
        else:
            break
    return place


_RELATED_KEYS = (frozenset({"task", "script"}), frozenset({"env", "secret_env"}))
"""Groups of keys that are all in doubt if one of them has a fault."""


class _Mended:
    """A spec's ``data``, in which ``remove_faulty`` removes or replaces faulty entries. ``uncertain_keys``: keys that these
    faults may affect."""

    def __init__(self, data: dict[Any, Any]) -> None:
        self.data = {**data, "hook": normalise_hook(data["hook"])} if "hook" in data else data
        self.uncertain_keys = set[str]()
        self._uncertain_by_mapping: dict[tuple[Any, ...], set[str]] = {}
        """By the place of a mapping: its keys whose values are in doubt."""

    def is_consequence(self, fault: Any) -> bool:
        """Return True if a removed entry may be the only cause of the fault, whose message names an uncertain key."""
        names = self._uncertain_by_mapping.get(tuple(self._place(fault["loc"])), ())
        return fault["type"] == "value_error" and any(re.search(rf"\b{name}\b", fault["msg"]) for name in names)

    def remove_faulty(
        self, locations: Sequence[tuple[str | int, ...]], unknown: Collection[tuple[str | int, ...]] = frozenset()
    ) -> bool:
        """Remove or replace the faulty entries at ``locations``; ``unknown``: those of unknown keys. Returns False if nothing was
        left to remove."""
        places, known = [self._place(loc) for loc in locations], len(self.uncertain_keys)
        mended = self._blank_arguments(locations)
        if () in locations:  # a rule over several keys: of `_one_of`, else of `_secret_env`
            one_of = (self.data.get("task") is None) == (self.data.get("script") is None)
            self.uncertain_keys |= _RELATED_KEYS[0 if one_of else 1]
            places += [["task"], ["script"]] if one_of else []
        for loc, place in zip(locations, places, strict=False):
            if loc:
                self._mark_uncertain(loc, place, is_unknown=loc in unknown)
        for place in places + [["secret_env"]] * ("secret_env" in self.uncertain_keys):
            if place != ["script"] or not mended:
                self.data = _without(self.data, place)
        if "name" in self.uncertain_keys:
            self.data = {"name": "unnamed", **self.data}
        if "task" in self.uncertain_keys and self.data.get("task") is None and self.data.get("script") is None:
            self.data = {**self.data, "task": {"entrypoint": "unknown:Unknown"}}
        return any(places) or len(self.uncertain_keys) > known

    def _blank_arguments(self, locations: Sequence[tuple[str | int, ...]]) -> bool:
        """Replace the script's arguments at ``locations`` by empty texts and return True. If a location is the script's file, or
        the script as a whole, or none is in the script, return False."""
        wrong = [loc[1:] for loc in locations if loc[:1] == ("script",)]
        arguments = (
            [index for (index, *rest) in wrong if isinstance(index, int) and index > 0 and not rest]
            if all(wrong)
            else []
        )
        if not wrong or len(arguments) < len(wrong):
            return False
        script = ["" if i in arguments else argument for i, argument in enumerate(self.data["script"])]
        self.data = {**self.data, "script": script}
        return True

    def _mark_uncertain(self, loc: Sequence[str | int], place: list[Any], *, is_unknown: bool) -> None:
        """Record the keys that a fault at ``loc`` makes uncertain. ``place``: the existing keys in ``data`` that lead to the
        fault. ``is_unknown``: True if the fault is an unknown key."""
        names = {str(part) for part in place[-1:]}
        if is_unknown:
            holder = functools.reduce(operator.getitem, place[:-1], self.data)
            fields = JobSpec.model_fields if len(place) == 1 else _known_keys(JobSpec, loc[:-1])
            meant = _closest(str(loc[-1]), fields)
            names = ({meant} if meant is not None else set(fields) if len(place) > 1 else set()) - set(holder)
        self._uncertain_by_mapping.setdefault(tuple(place[:-1]), set()).update(names)
        keys = {str(loc[0])} | (names if len(place) == 1 else set())
        self.uncertain_keys |= keys.union(*(group for group in _RELATED_KEYS if group & keys))

    def _place(self, loc: Sequence[str | int]) -> list[Any]:
        """Return the existing keys in ``data`` that lead to ``loc``. Return only the first of them if the fault makes everything
        below this key uncertain."""
        place, value = list[Any](), self.data
        for i, part in enumerate(loc):
            keys = [key for key in value if str(key) == str(part)] if isinstance(value, dict) else []
            if keys:
                place, value = [*place, keys[0]], value[keys[0]]
            elif not _is_tag(loc, i):
                break
        beside = (
            place[:1] == ["code"]
            and len(loc) > 1
            and _closest(str(loc[1]), CodeSpec.model_fields) in ("include", "git")
        )
        decides = (place[:1] == ["code"] and not beside) or place in (
            ["hook", "name"],
            ["launcher", "kind"],
        )  # it determines the meaning of the rest there
        return place[:1] if decides else place


def _without(data: dict[Any, Any], place: list[Any]) -> dict[Any, Any]:
    """Return ``data`` without the entry at ``place``, if there is one; ``data`` itself is not changed."""
    if not place or place[0] not in data:
        return data
    key, *rest = place
    if not rest:
        return {other: value for other, value in data.items() if other != key}
    return {**data, key: _without(data[key], rest)} if isinstance(data[key], dict) else data


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses a key that is given twice: YAML forbids it, but PyYAML takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping. Raises ``ConstructorError`` for a key that is given twice."""
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"{key.value} is given twice: keep one"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep)


_EXPONENT: Final = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+")
_NUMERIC_KEYS: Final = (("task", "args"), ("hook",))
"""Keys of a spec below which ``1e-3`` is a number, as in JSON. Elsewhere (arguments of a script, variables, labels) it stays the
text that PyYAML takes it for: the text may be a digest."""


def load_spec_text(text: str, key: str = "") -> Any:
    """Return the data in ``text``, YAML or JSON; None if it is empty. The text is a whole spec, or with ``key`` the value of this
    dotted key. Raises ``SpecError`` for invalid YAML."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _mark_numbers(node, tuple(key.split(".")) if key else (), set())
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = str(getattr(error, "problem", error))
        cure = "; indent with spaces, not tabs, also in JSON" if "'\\t'" in problem else ""
        raise SpecError(f"not valid YAML{where}: {problem}{cure}", code="invalid-yaml") from None
    except (ValueError, TypeError, RecursionError, OverflowError, AttributeError, KeyError) as error:
        # YAML's constructors raise these for dates that do not exist, numbers that are too long, and unhashable keys
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:300]
        raise SpecError(f"not valid YAML: {problem}", code="invalid-yaml") from None


def _mark_numbers(node: yaml.Node, place: tuple[str, ...], visited: set[int]) -> None:
    """Tag unquoted texts like ``1e-3`` as numbers, if they are at or below a key of ``_NUMERIC_KEYS``. ``place``: the keys that
    lead to ``node``. ``visited``: the ids of the nodes that were handled before."""
    # An anchor may be referred to any number of times.
    if id(node) in visited:
        return
    visited.add(id(node))
    if any(place[: len(keys)] == keys for keys in _NUMERIC_KEYS):
        if isinstance(node, yaml.ScalarNode) and node.style is None and _EXPONENT.fullmatch(node.value):
            node.tag = "tag:yaml.org,2002:float"
    elif not any(keys[: len(place)] == place for keys in _NUMERIC_KEYS):
        return
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            _mark_numbers(value, (*place, str(name.value)), visited)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _mark_numbers(item, place, visited)


def _summary(problems: Sequence[FieldProblem]) -> str:
    """Return the first problem as a sentence, with the number of further ones."""
    first = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{first.pointer or '/'}: {first.detail}{more}"


def _hook_problems(value: Any) -> list[FieldProblem]:
    """Return problems with a hook's name or wrapper; its parameters are not checked."""
    value = normalise_hook(value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return []
    name = canonical_hook_name(value["name"])
    if name in HOOKS and not HOOKS[name].available:
        ready = ", ".join(n for n, e in HOOKS.items() if e.available)
        return [
            FieldProblem(
                pointer="/hook/name",
                code="hook-not-available",
                detail=f"hook {name} is not available yet; available: {ready}",
            )
        ]
    if name not in HOOKS:
        return [
            FieldProblem(
                pointer="/hook/name",
                code="unknown-hook",
                detail=f"no hook is named {value['name']!r}{suggestion(name, HOOKS)}",
            )
        ]
    return _wrapper_problems(HOOKS[name], canonical_wrapper(value.get("wrapper")))


def _wrapper_problems(hook: HookEntry, wrapper: Any) -> list[FieldProblem]:
    """Return problems with the wrapper for this hook."""
    if wrapper is None or (hook.wrappers and wrapper in WRAPPERS):
        return []
    if wrapper in WRAPPERS:
        why = _keys(hook.spec)["wrapper"]
        carriers = ", ".join(name for name, entry in HOOKS.items() if entry.wrappers)
        code, detail = "wrapper-not-supported", f"{why} Set wrapper to null, or wrap one of {carriers}"
    else:
        code = "unknown-wrapper"
        detail = (
            f"no wrapper is named {_short(wrapper)}{suggestion(str(wrapper), WRAPPERS)}; known: {', '.join(WRAPPERS)}"
        )
    return [FieldProblem(pointer="/hook/wrapper", code=code, detail=detail)]


def suggestion(word: str, known: Any) -> str:
    """Return ``"; did you mean 'x'?"`` with the most similar of ``known``, or an empty text."""
    match = _closest(word, known)
    return f"; did you mean {match!r}?" if match is not None else ""


def _closest(word: str, known: Any) -> str | None:
    """Return the one of ``known`` that is most similar to ``word``; None if none is similar."""
    lower = {str(k).lower(): str(k) for k in known}
    match = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    return lower[match[0]] if match else None


def pointer_of(loc: Sequence[str | int]) -> str:
    """Return the JSON pointer (RFC 6901) for a pydantic location, without pydantic's own tags."""
    parts = [str(p).replace("~", "~0").replace("/", "~1") for i, p in enumerate(loc) if not _is_tag(loc, i)]
    return "".join(f"/{p}" for p in parts)


def _is_tag(loc: Sequence[str | int], i: int) -> bool:
    """True if the part of the location at ``i`` is a tag of pydantic's, not a key in the data."""
    if i == len(loc) - 1 and loc[i] == "[key]":  # the fault is of a mapping's key, not of its value
        return True
    return i == 1 and ((loc[0] == "hook" and loc[1] in HOOKS) or (loc[0] == "launcher" and loc[1] in LAUNCHER_SPECS))


def problem_of(error: Any, model: type[BaseModel]) -> FieldProblem:
    """Return a pydantic error as a ``FieldProblem``. ``model``: the model that was validated."""
    loc, kind = error["loc"], error["type"]
    detail = error["msg"].removeprefix("Value error, ")
    if kind in _UNKNOWN:
        known = _known_keys(model, loc[:-1])
        detail = f"unknown key {loc[-1]!r}{suggestion(str(loc[-1]), known)}"
        return FieldProblem(pointer=pointer_of(loc), code="unknown-key", detail=detail)
    if kind == "missing":
        return FieldProblem(pointer=pointer_of(loc), code="missing", detail="this key is required")
    return FieldProblem(
        pointer=pointer_of(loc), code=kind.replace("_", "-"), detail=_explained_detail(error, model, detail)
    )


def _explained_detail(error: Any, model: type[BaseModel], detail: str) -> str:
    """Return a better text than ``detail`` where possible, without values of ``env``, which may be secret."""
    loc, kind = error["loc"], error["type"]
    pointer = pointer_of(loc)
    if model is JobSpec and pointer == "/name" and kind == "string_pattern_mismatch":
        return f"{_short(error['input'])} is not a valid name: {_NAME_RULE}"
    if kind == "value_error" or not loc or (model is JobSpec and loc[0] == "env"):  # a value there may be a secret
        return detail
    if kind == "union_tag_not_found":
        odd = [key for key in error["input"] if suggestion(str(key), ["name"])]
        meant = f", but {odd[0]!r}{suggestion(str(odd[0]), ['name'])} Write" if odd else ": write"
        return f"has no name{meant} {_EXAMPLES['/hook']}"
    if kind in ("model_type", "dataclass_type", "list_type", "dict_type", "model_attributes_type"):
        wanted = "a list" if kind == "list_type" else "a mapping"
        shape = _EXAMPLES.get(pointer) if model is JobSpec else None
        keys = _known_keys(model, loc) if shape is None and kind == "model_type" else []
        like = f": write {shape}" if shape else f": its keys are {', '.join(keys)}" if keys else ""
        return f"must be {wanted}, not {_short(error['input'])}{like}"
    given = error["input"]
    if kind == "string_type" and isinstance(given, int | float):
        return f'must be text, not {_short(given)}: write it in quotes, "{json.dumps(given)}"'
    if kind in _EXPECTED_TYPES:
        detail = f"must be {_EXPECTED_TYPES[kind]}"
    if kind == "literal_error":
        known = re.findall(r"'([^']+)'", error["ctx"]["expected"])
        meant = suggestion(_SYNONYMS.get(str(given).lower(), str(given)), known)
        return f"must be {error['ctx']['expected']}, not {_short(given)}{meant}"
    about = re.split(r"(?<=[.;:])\s", _description(model, loc), maxsplit=1)[0].rstrip(";:")
    return f"{detail}, not {_short(given)}" + (f". {about}" if about else "")


def _short(value: Any) -> str:
    """Return the value's ``repr``, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _description(model: type[BaseModel], loc: Sequence[str | int]) -> str:
    """Return the description of the key at ``loc``; empty if it has none."""
    return _keys(_model_at(model, loc[:-1])).get(str(loc[-1]), "")


def _known_keys(model: type[BaseModel], loc: Sequence[str | int]) -> list[str]:
    """Return the keys of the model at ``loc``, a pydantic location in ``model``; empty if there is no model."""
    return list(_keys(_model_at(model, loc)))


def _model_at(model: type[BaseModel], loc: Sequence[str | int]) -> type[BaseModel | HookSpecBase] | None:
    """Return the model of the value at ``loc``, a pydantic location in ``model``; None if the value has no model."""
    current: type[BaseModel | HookSpecBase] | None = model
    for part in loc:
        if part in HOOKS or part in LAUNCHER_SPECS:
            current = HOOKS[str(part)].spec if part in HOOKS else LAUNCHER_SPECS[str(part)]
            continue
        known = current.model_fields if current is not None and issubclass(current, BaseModel) else {}
        current = _model_in(known[str(part)].annotation) if str(part) in known else None
    return current


def _keys(model: type[BaseModel | HookSpecBase] | None) -> dict[str, str]:
    """Return every key of a model with its description."""
    if model is None:
        return {}
    if issubclass(model, BaseModel):
        return {name: field.description or "" for name, field in model.model_fields.items()}
    return {field.name: field.metadata.get("description", "") for field in fields(model)}


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the first model in an annotation; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for a in get_args(annotation) if (m := _model_in(a))), None)


def cross_check(spec: JobSpec, uncertain_keys: Collection[str] = ()) -> list[FieldProblem]:
    """Return the problems of a spec that its models do not find, such as keys that contradict each other. A problem that may only
    be the result of a wrong value of ``uncertain_keys`` is left out."""
    out: list[FieldProblem] = []

    def is_certain(*keys: str) -> bool:
        return not any(key in uncertain_keys for key in keys)

    def add_problem(pointer: str, code: str, detail: str) -> None:
        out.append(FieldProblem(pointer=pointer, code=code, detail=detail))

    if is_certain("ddp", "world") and spec.ddp.backend == "nccl" and spec.world.device == "cpu":
        add_problem(
            "/ddp/backend", "backend-device", "NCCL moves CUDA tensors only: use backend gloo (or auto) with device cpu"
        )
    if spec.ddp.static_graph and spec.ddp.find_unused_parameters:
        add_problem(
            "/ddp/find_unused_parameters",
            "ddp-conflict",
            "static_graph finds unused parameters itself; set only one of them",
        )
    if is_certain("world") and isinstance(spec.hook, PostLocalSGDSpec):
        for key, text in spec.hook.faults(spec.world.size, spec.world.ranks_per_node):
            add_problem(f"/hook/{key}", "hook-world", text)
    if spec.script is not None:
        _check_script(spec, add_problem, code_is_certain=is_certain("code"))
    if spec.code is not None and spec.code.source == "nodes" and spec.code.digest is not None:
        text = (
            "with source nodes the nodes' own directory is used, not an uploaded one: set only one of source and digest"
        )
        add_problem("/code/digest", "code-conflict", text)
    if spec.code is not None and spec.code.source == "nodes" and spec.code.include:
        add_problem(
            "/code/include", "code-conflict", "with source nodes nothing is copied, so nothing is left out: remove it"
        )
    if spec.code is not None and spec.code.source == "nodes" and spec.code.git is not None:
        add_problem(
            "/code/git", "code-conflict", "with source nodes the directory's git repository is not read: remove it"
        )
    if spec.environment is not None and isinstance(spec.environment.requirements, str) and is_certain("code"):
        if spec.code is None:
            add_problem(
                "/environment/requirements", "missing", "a file of requirements needs code, whose path it is below"
            )
        elif spec.code.source == "nodes":
            text = "with source nodes the code is not read at submission: write the lines themselves"
            add_problem("/environment/requirements", "code-conflict", text)
    if spec.environment is not None and (spec.launcher.kind == "kubernetes" or spec.image is not None):
        text = "the container image is the environment: install the packages in the image, and remove environment"
        add_problem("/environment", "launcher-cannot", text)
    out += policy_faults(spec.policy)
    for i, fault in enumerate(spec.trial.faults if spec.trial is not None and is_certain("world") else ()):
        if fault.rank >= spec.world.size:
            add_problem(
                f"/trial/faults/{i}/rank", "invalid-value", f"there is no rank {fault.rank} among {spec.world.size}"
            )
    _check_secrets(spec, add_problem)
    _check_volumes(spec, add_problem)
    threads = spec.env.get("OMP_NUM_THREADS")
    if threads is not None:
        if not (threads.isascii() and threads.isdigit() and len(threads) <= 4 and 1 <= int(threads) <= _MAX_THREADS):
            text = f"OMP_NUM_THREADS must be a number from 1 to {_MAX_THREADS}, not {threads[:40]!r}"
            add_problem("/env/OMP_NUM_THREADS", "invalid-value", text)
        elif is_certain("resources") and spec.resources.cpus_per_rank not in (None, int(threads)):
            add_problem(
                "/env/OMP_NUM_THREADS",
                "thread-conflict",
                "OMP_NUM_THREADS and resources.cpus_per_rank differ; set only one",
            )
    for name in set(spec.nccl) & set(spec.env):
        add_problem(f"/nccl/{name}", "duplicate-variable", f"{name} is set in env and in nccl; keep one")
    return out


def _check_secrets(spec: JobSpec, add_problem: Any) -> None:
    """Report variables that are in both ``env`` and ``secrets``."""
    for name in sorted(set(spec.env) & set(spec.secrets)):
        add_problem(f"/secrets/{name}", "duplicate-variable", f"{name} is set in env and in secrets; keep one")


def _check_volumes(spec: JobSpec, add_problem: Any) -> None:
    """Report volumes with the same ``mount_path``, or one at the root directory."""
    seen: set[str] = set()
    for i, volume in enumerate(spec.volumes):
        path = volume.mount_path.rstrip("/")
        if path in seen or not path:
            text = "two volumes have this mount_path" if path else "the root directory cannot be mounted over"
            add_problem(f"/volumes/{i}/mount_path", "invalid-value", text)
        seen.add(path)


def _check_script(spec: JobSpec, add_problem: Any, *, code_is_certain: bool) -> None:
    """Report a script that is no ``.py`` file or whose path is absolute or has ``..``, and with ``code_is_certain`` a script
    without ``code``."""
    assert spec.script is not None
    path = PurePosixPath(spec.script[0])
    if code_is_certain and spec.code is None:
        add_problem(
            "/code", "missing", "a script needs code: {path: DIRECTORY} so that every attempt runs the same files"
        )
    if path.suffix != ".py" or path.is_absolute() or ".." in path.parts:
        add_problem(
            "/script/0",
            "invalid-script",
            f"a script is a .py file below code.path, given relative to it, not {spec.script[0]!r}",
        )


def canonical_json(data: Any) -> bytes:
    """Return ``data`` as JSON with sorted keys and no spaces, for digests of requests."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
