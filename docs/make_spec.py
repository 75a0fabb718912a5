"""Writes ``spec.md`` from the models: ``python docs/make_spec.py``. A test compares, so the page cannot fall behind."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from ratchet_contract.spec import JobSpec
from ratchet_contract.spec.launcher import ABSOLUTE_PATH, DNS_NAME, LAUNCHER_SPECS, SLURM_WORD
from ratchet_contract.spec.policy import ExitRule
from ratchet_contract.spec.trial import FaultSpec
from ratchet_contract.spec.types import check_size, parse_duration
from ratchet_hooks.registry import HOOKS, HookEntry
from ratchet_hooks.specs import WRAPPERS, HookSpecBase

PAGE = Path(__file__).with_name("spec.md")
HEAD = """\
# The job spec

A job spec is YAML or JSON. Ratchet refuses an unknown key, and names the nearest known one. A duration is a number of seconds, or
a number with `s`, `m`, `h` or `d`. A size is a whole number with `Ki`, `Mi`, `Gi` or `Ti`. `ratchet submit FILE --dry-run` checks
a spec and shows what would run, without starting it. A job of the local launcher is checked against the machine that it will run
on, any other job against what its launcher can do. [troubleshooting.md](troubleshooting.md) explains the messages of the check,
with the cure.

An attempt is one launch of a job. Its agents, one per node, start the ranks. With a [Session](python.md#session) a script saves
and resumes through Ratchet.
"""
_LARGE = 1_000_000
"""A bound above is a machine's, and no news to anybody."""
_THEIRS = (DNS_NAME, ABSOLUTE_PATH, SLURM_WORD)
"""How an engine writes names: no news to those who use it."""
EXAMPLES = {
    "A job": """\
name: digits-powersgd
task: {entrypoint: "ratchet_worker.tasks.digits:DigitsTask", args: {epochs: 20}}
world: {ranks_per_node: 2, device: cpu}
hook: {name: powerSGD, matrix_approximation_rank: 2, start_powerSGD_iter: 50}
checkpoint: {every_steps: 50, keep_last: 3}
labels: {team: vision}
seed: 7
ttl: 30d""",
    "task": """\
code: {path: ./my_project}
task:
  entrypoint: my_task:Classifier
  args: {epochs: 20, width: 128}""",
    "code": """\
code: {path: ./my_project}     # relative to the spec file
script: [train.py, --lr, "0.1"]""",
    "environment": """\
code: {path: ./my_project}
environment: {requirements: requirements.txt}     # or lines: [timm==1.0.9, "einops>=0.8"]""",
    "tracking": """\
tracking: {to: [tensorboard, mlflow], experiment: vision}""",
    "secrets": """\
secrets:
  WANDB_API_KEY: {from_env: TEAM_WANDB_API_KEY}
  HF_TOKEN: {from_secret: {name: hugging-face, key: token}}     # kubernetes only""",
    "world": "world: {nodes: 2, ranks_per_node: 4, device: cuda, interface: eth0}",
    "resources": "resources: {cpus_per_rank: 2, memory: 64Gi, gpu: nvidia.com/gpu}",
    "ddp": "ddp: {bucket_cap_mb: 25, gradient_as_bucket_view: true, backend: gloo}",
    "checkpoint": """\
checkpoint:
  every_steps: auto            # as often as 2 % of the time allows
  first: 5                     # and once before the first of these
  max_overhead: 0.02
  keep_last: 3
  keep_every: 10000            # and these for good
  keep_best: {metric: eval/loss, mode: min, count: 2}""",
    "policy": """\
policy:
  max_failures: 5
  timeout: 12h
  startup_deadline: 10m      # a model that compiles for long before its first step
  preemption_notice: 90s     # spot instances
  on_hook_mismatch: redistribute""",
    "exit_codes": """\
policy:
  exit_codes:
    - {codes: [42], action: retry}            # the licence server had no seat
    - {codes: [65, "70-73"], action: fail}    # data that no retry mends""",
    "volumes": """\
volumes:
  - {mount_path: /data, claim: datasets}
  - {mount_path: /scratch, empty_dir: 200Gi, read_only: false}""",
    "launcher local": "launcher: {kind: local}",
    "launcher kubernetes": """\
launcher:
  kind: kubernetes
  queue: research
  node_selector: {gpu: a100}
  tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
  pod_patch: {spec: {runtimeClassName: nvidia}}""",
    "launcher slurm": """\
launcher:
  kind: slurm
  partition: gpu
  account: vision
  time_limit: 4h
  setup: [module load cuda]
  options: {mail-type: FAIL}""",
    "launcher other": "launcher: {kind: my-engine, options: {pool: night}}",
    "trial": "trial: {end_at: 60}",
    "faults": """\
trial:
  end_at: 60
  faults: [{attempt: 1, rank: 0, step: 17, kind: kill-rank}]""",
    "allreduce": "hook: allreduce",
    "fp16_compress": "hook: fp16_compress",
    "bf16_compress": "hook: bf16_compress",
    "powerSGD": """\
hook:
  name: powerSGD
  matrix_approximation_rank: 4
  start_powerSGD_iter: 500
  orthogonalization_epsilon: 1.0e-8""",
    "batched_powerSGD": "hook: {name: batched_powerSGD, start_powerSGD_iter: 500, wrapper: bf16}",
    "post_localSGD": "hook: {name: post_localSGD, start_localSGD_iter: 500, model_averaging_period: 4}",
    "quantization_pertensor": "hook: quantization_pertensor",
    "quantization_perchannel": "hook: {name: quantization_perchannel, bucket_size: 128}",
    "noop": "hook: {name: noop, wrapper: fp16}",
    "custom": 'hook: {name: custom, hook: "my_hooks:my_hook", state: "my_hooks:MyState", state_args: {scale: 2.0}}',
}
"""One per table; a test parses each within a job."""
_HOOK_SPECS = {entry.spec for entry in HOOKS.values()}
SECTIONS = (
    "task",
    "code",
    "environment",
    "secrets",
    "world",
    "resources",
    "ddp",
    "checkpoint",
    "policy",
    "volumes",
    "tracking",
    "trial",
)
_SEE_BELOW = {*SECTIONS, "hook", "launcher"}
_MANY = ("secrets", "volumes")


def page() -> str:
    parts = [HEAD, _table("A job", JobSpec, skip_models=True), _example("A job")]
    for name in SECTIONS:
        model = _model(JobSpec.model_fields[name].annotation)
        assert model is not None
        parts += [_table(f"one of `{name}`" if name in _MANY else f"`{name}`", model), _example(name)]
        if name == "policy":
            parts += [_table("one of `policy.exit_codes`", ExitRule), _example("exit_codes")]
        if name == "trial":
            parts += [_table("one of `trial.faults`", FaultSpec), _example("faults")]
    for kind, model in LAUNCHER_SPECS.items():
        title = "another `launcher`" if kind == "other" else f"`launcher: {{kind: {kind}}}`"
        about = f"{(model.__doc__ or '').replace('``', '`')} More: [launchers.md](launchers.md).\n"
        parts += [_table(title, model, about), _example(f"launcher {kind}")]
    ready = [entry for entry in HOOKS.values() if entry.available]
    for entry in ready:
        about = f"{entry.title}. More: [hooks.md](hooks.md).{_wrappers(entry)}\n"
        parts += [_table(f"`hook: {{name: {entry.name}}}`", entry.spec, about), _example(entry.name)]
    later = ", ".join(f"`{entry.name}`" for entry in HOOKS.values() if not entry.available)
    if later:
        parts.append(f"Named, and refused until they are exact too: {later}.\n")
    return "\n".join(parts)


def _wrappers(entry: HookEntry) -> str:
    names = " or ".join(f"`{name}`" for name in WRAPPERS)
    return f" Takes a `wrapper`: {names} (short: `fp16`, `bf16`)." if entry.wrappers else ""


def _example(name: str) -> str:
    return f"```yaml\n{EXAMPLES[name]}\n```\n"


def _table(title: str, model: type[BaseModel | HookSpecBase], about: str = "", *, skip_models: bool = False) -> str:
    known = _fields(model)
    told = {name for name, info in known.items() if name == "kind" and not info.is_required()}
    if set(known) <= {"name", "wrapper", *told}:
        return f"## {title}\n\n{about}No parameters.\n"
    rows = [f"## {title}\n", *([about] if about else []), "| key | value | default | meaning |", "|---|---|---|---|"]
    for name, info in known.items():
        if name == "wrapper" or name in told or (name == "name" and model in _HOOK_SPECS):
            continue
        kind = "see below" if skip_models and name in _SEE_BELOW else _kind_of(info)
        meaning = info.description or ""
        cells = (f"`{name}`", kind, _default(info), f"{meaning}{_bounds(info)}".strip())
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |".replace("  ", " "))
    return "\n".join(rows) + "\n"


def _fields(model: type[BaseModel | HookSpecBase]) -> dict[str, FieldInfo]:
    if issubclass(model, BaseModel):
        return model.model_fields
    hints = get_type_hints(model)
    return {one.name: FieldInfo.from_annotated_attribute(hints[one.name], one) for one in fields(model)}


def _kind_of(info: FieldInfo) -> str:
    return _special(info.metadata) or _kind(info.annotation)


def _special(metadata: Iterable[Any]) -> str | None:
    """What text with a meaning is called."""
    names = {parse_duration: "duration", check_size: "size"}
    return next((names[m.func] for m in metadata if isinstance(m, BeforeValidator) and m.func in names), None)


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _special(arguments[1:]) or _kind(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys("null" if a is NoneType else _kind(a) for a in arguments))
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "mapping" if arguments[1] is Any else f"mapping to {_kind(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"mapping ({', '.join(f'`{name}`' for name in annotation.model_fields)})"
    names = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}
    return names.get(annotation, "mapping")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, BaseModel | HookSpecBase):
        return f"`{default.name}`" if hasattr(default, "name") else ""
    return f"`{json.dumps(default)}`"


def _bounds(info: FieldInfo) -> str:
    words = {"ge": "at least", "gt": "more than", "le": "at most"}
    bounds = [(word, getattr(m, key, None)) for key, word in words.items() for m in info.metadata]
    found = [f"{word} {bound:g}" for word, bound in bounds if bound is not None and bound <= _LARGE]
    lengths = [m.min_length for m in info.metadata if getattr(m, "min_length", None)]
    patterns = [m.pattern for m in info.metadata if getattr(m, "pattern", None) not in (None, *_THEIRS)]
    found += ["not empty" if n == 1 else f"at least {n} long" for n in lengths] + [f"`{p}`" for p in patterns]
    return f" ({', '.join(found)})" if found else ""


def _model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for a in get_args(annotation) if (m := _model(a))), None)


if __name__ == "__main__":
    PAGE.write_text(page())
