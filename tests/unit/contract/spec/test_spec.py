"""Wrong specs and the errors they get; right ones and what they become."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from ratchet_contract.errors import SpecError
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.launcher import SlurmLauncherSpec
from ratchet_contract.spec.parse import load_spec_text, parse_spec

TASK = {"entrypoint": "mine:Task"}


def spec(**more: Any) -> dict[str, Any]:
    return {"name": "job", "task": TASK, **more}


WRONG = [
    ([], "", "invalid-spec", "mapping"),
    ({"task": TASK}, "/name", "missing", "required"),
    (spec(name="Has Capitals"), "/name", "string-pattern-mismatch", ""),
    (spec(name="x" * 64), "/name", "string-pattern-mismatch", ""),
    (spec(chekpoint={}), "/chekpoint", "unknown-key", "'checkpoint'"),
    (spec(checkpoint={"every_step": 5}), "/checkpoint/every_step", "unknown-key", "'every_steps'"),
    (
        spec(hook={"name": "powerSGD", "start_powersgd_iter": 5}),
        "/hook/start_powersgd_iter",
        "unknown-key",
        "'start_powerSGD_iter'",
    ),
    (spec(hook={"name": "powerSGD", "start_powerSGD_iter": 1}), "/hook", "value-error", "rebuilds its buckets"),
    (
        spec(hook={"name": "powerSGD", "matrix_approximation_rank": 0}),
        "/hook/matrix_approximation_rank",
        "greater-than-equal",
        "",
    ),
    (spec(hook="powersdg"), "/hook/name", "unknown-hook", "'powerSGD'"),
    (
        spec(hook={"name": "fp16_compress", "wrapper": "bf16"}),
        "/hook/wrapper",
        "wrapper-not-supported",
        "itself a compression",
    ),
    (
        spec(hook={"name": "quantization_pertensor", "wrapper": "fp16_compress_wrapper"}),
        "/hook/wrapper",
        "wrapper-not-supported",
        "takes float32 buckets; it accepts no wrapper. Set wrapper to null, or wrap one of allreduce, powerSGD",
    ),
    (
        spec(hook={"name": "powerSGD", "wrapper": "fp16_wrapper"}),
        "/hook/wrapper",
        "unknown-wrapper",
        "'fp16_compress_wrapper'",
    ),
    (
        spec(hook={"name": "allreduce", "wrapper": 16}),
        "/hook/wrapper",
        "unknown-wrapper",
        "known: fp16_compress_wrapper",
    ),
    (spec(task={"entrypoint": "no_colon"}), "/task/entrypoint", "value-error", "package.module:ClassName"),
    (spec(task={"entrypoint": "a:b; import os"}), "/task/entrypoint", "value-error", ""),
    (spec(script=["train.py"]), "", "value-error", "exactly one"),
    ({"name": "job"}, "", "value-error", "exactly one"),
    ({"name": "job", "script": ["train.py"]}, "/code", "missing", ""),
    ({"name": "job", "script": ["../t.py"], "code": {"path": "."}}, "/script/0", "invalid-script", ""),
    ({"name": "job", "script": ["/etc/t.py"], "code": {"path": "."}}, "/script/0", "invalid-script", ""),
    (spec(checkpoint={"every_steps": "often"}), "/checkpoint/every_steps", "value-error", "auto or null"),
    (spec(checkpoint={"every_steps": True}), "/checkpoint/every_steps", "value-error", "(1 or more)"),
    (spec(checkpoint={"every_steps": 0}), "/checkpoint/every_steps", "value-error", "(1 or more)"),
    (spec(checkpoint={"first": "soon"}), "/checkpoint/first", "value-error", "auto or off"),
    (spec(checkpoint={"first": True}), "/checkpoint/first", "value-error", "(1 or more)"),
    (spec(checkpoint={"first": 0}), "/checkpoint/first", "value-error", "(1 or more)"),
    (spec(checkpoint={"every_seconds": "soon"}), "/checkpoint/every_seconds", "value-error", "30s"),
    (spec(checkpoint={"max_overhead": 0.9}), "/checkpoint/max_overhead", "less-than-equal", ""),
    (spec(checkpoint={"staging": "async"}), "/checkpoint/staging", "literal-error", "overlapped"),
    (spec(checkpoint={"keep_last": 1}), "/checkpoint/keep_last", "greater-than-equal", ""),
    (spec(checkpoint={"keep_every": 0}), "/checkpoint/keep_every", "greater-than-equal", ""),
    (spec(checkpoint={"keep_best": {"mode": "max"}}), "/checkpoint/keep_best/metric", "missing", ""),
    (
        spec(checkpoint={"keep_best": {"metric": "a", "mod": "max"}}),
        "/checkpoint/keep_best/mod",
        "unknown-key",
        "'mode'",
    ),
    (spec(checkpoint={"keep_best": "loss"}), "/checkpoint/keep_best", "model-type", ""),
    (spec(checkpoint={"uri": "file:///tmp/c"}), "/checkpoint/uri", "value-error", "s3://BUCKET/PREFIX"),
    (spec(checkpoint={"uri": "s3://key:secret@b/c"}), "/checkpoint/uri", "value-error", "come from the environment"),
    (spec(resources={"memory": "8G"}), "/resources/memory", "value-error", "16Gi"),
    (spec(launcher={"kind": "slurm", "partion": "a"}), "/launcher/partion", "unknown-key", "'partition'"),
    (
        spec(launcher={"kind": "slurm", "options": {"no-requeue": None}}),
        "/launcher/options/no-requeue",
        "value-error",
        "set by Ratchet",
    ),
    (
        spec(launcher={"kind": "slurm", "options": {"mail-user": "a\n#SBATCH -A x"}}),
        "/launcher/options/mail-user",
        "value-error",
        "break",
    ),
    (spec(launcher={"kind": "slurm", "account": "a b"}), "/launcher/account", "string-pattern-mismatch", ""),
    (spec(launcher={"kind": "kubernetes", "queue": "A_b"}), "/launcher/queue", "string-pattern-mismatch", ""),
    (spec(launcher={"kind": "Mine"}), "/launcher/kind", "string-pattern-mismatch", ""),
    (spec(volumes=[{"mount_path": "/data"}]), "/volumes/0", "value-error", "exactly one"),
    (spec(volumes=[{"mount_path": "/", "claim": "a"}]), "/volumes/0/mount_path", "invalid-value", "root directory"),
    (spec(secrets={"A": {}}), "/secrets/A", "value-error", "exactly one"),
    (spec(checkpoint={"keep_last": 1}), "/checkpoint/keep_last", "greater-than-equal", ""),
    (spec(ddp={"backend": "nccl"}, world={"device": "cpu"}), "/ddp/backend", "backend-device", "gloo"),
    (
        spec(ddp={"static_graph": True, "find_unused_parameters": True}),
        "/ddp/find_unused_parameters",
        "ddp-conflict",
        "",
    ),
    (
        spec(hook={"name": "post_localSGD", "subgroup_size": 3}, world={"ranks_per_node": 4}),
        "/hook/subgroup_size",
        "hook-world",
        "subgroups of 3",
    ),
    (
        spec(hook={"name": "post_localSGD", "period_group_size_dict": {"2": 2}}, world={"ranks_per_node": 4}),
        "/hook/period_group_size_dict",
        "hook-world",
        "all 4",
    ),
    (
        spec(hook={"name": "post_localSGD", "period_group_size_dict": {"2": 4, "8": 6}}),
        "/hook",
        "value-error",
        "a multiple of 4 ranks",
    ),
    (
        spec(hook={"name": "post_localSGD", "period_group_size_dict": {"2": 2}, "model_averaging_period": 2}),
        "/hook",
        "value-error",
        "not both",
    ),
    (spec(ddp={"bucket_cap_mb": float("nan")}), "/ddp/bucket_cap_mb", "finite-number", ""),
    (spec(env={"RANK": "3"}), "/env/RANK", "value-error", "set by the agent"),
    (spec(env={"RATCHET_ATTEMPT": "3"}), "/env/RATCHET_ATTEMPT", "value-error", "set by the agent"),
    (spec(env={"OMP_NUM_THREADS": "many"}), "/env/OMP_NUM_THREADS", "invalid-value", ""),
    (spec(env={"OMP_NUM_THREADS": 2}, resources={"cpus_per_rank": 1}), "/env/OMP_NUM_THREADS", "thread-conflict", ""),
    (spec(env={"A": "1"}, secrets={"A": {"from_env": "B"}}), "/secrets/A", "duplicate-variable", ""),
    (spec(env={"OMP_NUM_THREADS": "\u00b2"}), "/env/OMP_NUM_THREADS", "invalid-value", "1 to 1024"),
    (spec(env={"OMP_NUM_THREADS": "9" * 5000}), "/env/OMP_NUM_THREADS", "invalid-value", "1 to 1024"),
    (spec(env={"A\n": "1"}), "/env/A\n", "value-error", "variable name"),
    (spec(env={"A": "x" * 131_070}), "/env", "value-error", "into a file"),
    (spec(secrets={"A": {"from_env": "B=C"}}), "/secrets/A/from_env", "string-pattern-mismatch", ""),
    (spec(labels={"a\n": "x"}), "/labels/a\n", "value-error", ""),
    ({"name": "job", "script": ["t.py", "x" * 131_072], "code": {"path": "."}}, "/script", "value-error", "argument 1"),
    (spec(nccl={"PATH": "x"}), "/nccl/PATH", "value-error", "NCCL_"),
    (spec(policy={"timeout": "ten minutes"}), "/policy/timeout", "value-error", "'2h'"),
    (spec(policy={"timeout": 0}), "/policy/timeout", "greater-than", ""),
    (spec(determinism="maybe"), "/determinism", "literal-error", ""),
    (spec(labels={"": "x"}), "/labels/", "value-error", ""),
    (spec(seed=-1), "/seed", "greater-than-equal", ""),
]


@pytest.mark.parametrize(("data", "pointer", "code", "word"), WRONG)
def test_wrong_spec_names_field_code_and_cure(data: Any, pointer: str, code: str, word: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(data)
    problems = [(p.pointer, p.code) for p in caught.value.errors] or [("", caught.value.code)]
    assert (pointer, code) in problems
    assert word in " ".join([caught.value.detail, *(p.detail for p in caught.value.errors)])


def test_unset_launcher_options_stay_unset_after_storing() -> None:
    site = SlurmLauncherSpec(account="a", exclusive=True, partition="p")
    for given, held in (
        ({"kind": "slurm"}, ("p", True)),
        ({"kind": "slurm", "partition": "q", "exclusive": False}, ("q", False)),
        ({"kind": "slurm", "partition": None}, (None, True)),
    ):
        stored = json.loads(parse_spec(spec(launcher=given)).model_dump_json())
        assert stored["launcher"] == given
        launcher = JobSpec.model_validate(stored).launcher
        assert isinstance(launcher, SlurmLauncherSpec)
        over = launcher.with_defaults(site)
        assert ((over.partition, over.exclusive), over.account) == (held, "a")
    assert parse_spec(spec()).model_dump()["launcher"] == {"kind": "local"}


def test_spec_error_reports_all_faults_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(spec(sed=1, world={"nods": 1}, determinism="x"))
    assert {p.pointer for p in caught.value.errors} == {"/sed", "/world/nods", "/determinism"}


def test_yaml_spec_with_many_fields_is_accepted() -> None:
    text = """
    name: digits-powersgd
    task: {entrypoint: "ratchet_worker.tasks.digits:DigitsTask", args: {epochs: 20}}
    python: null
    env: {OMP_NUM_THREADS: "4"}
    world: {nodes: 1, ranks_per_node: 2, device: auto}
    resources: {cpus_per_rank: null, memory: null, gpu: null}
    hook: {name: powerSGD_hook, matrix_approximation_rank: 2, start_powerSGD_iter: 10, wrapper: null}
    nccl: {NCCL_NSOCKS_PERTHREAD: 4, NCCL_SOCKET_NTHREADS: 2}
    checkpoint: {every_steps: 50, keep_last: 3, uri: null}
    policy: {max_preemptions: null, max_failures: 3, on_hook_mismatch: fail, timeout: 2h}
    labels: {team: vision}
    """
    job = parse_spec(load_spec_text(text))
    assert job.hook.name == "powerSGD"
    assert job.nccl["NCCL_NSOCKS_PERTHREAD"] == "4"
    assert job.policy.timeout == 7200.0


def test_spec_round_trips_through_json() -> None:
    job = parse_spec(spec(hook={"name": "powerSGD", "start_powerSGD_iter": 10}, policy={"timeout": "90s"}))
    assert parse_spec(job.model_dump(mode="json")) == job


def test_whitespace_in_env_arguments_and_paths_is_preserved() -> None:
    """Blanks at the ends of values, arguments and paths are the user's own."""
    job = parse_spec(spec(env={"A": " 1 ", "B": "x" * 131_069}, labels={"a": " b "}))
    assert (job.env["A"], job.labels["a"]) == (" 1 ", " b ")
    script = parse_spec({"name": "job", "script": ["t.py", " x ", ""], "code": {"path": "/a "}})
    assert script.script == ["t.py", " x ", ""] and script.code is not None and script.code.path == "/a "


def test_spec_error_count_is_capped_at_50() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(
            spec(world={f"k{i}": 1 for i in range(50_000)})
        )  # in seconds: with a look at each it would be an hour
    assert len(caught.value.errors) == 50


@pytest.mark.parametrize(
    ("text", "words"),
    [("env: {D: 2026-13-45}", "month must be in 1..12"), ("[" * 3000, "nested too deeply"), ("? [a]\n: 1", "")],
)
def test_yaml_value_that_cannot_be_read_is_a_spec_error(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=f"not valid YAML.*{words}") as caught:
        load_spec_text(text)
    assert caught.value.code == "invalid-yaml"


def test_yaml_syntax_error_names_line() -> None:
    with pytest.raises(SpecError) as caught:
        load_spec_text("name: a\n  task: [")
    assert caught.value.code == "invalid-yaml" and "line 2" in caught.value.detail


@pytest.mark.parametrize(
    "text", ["name: a\nhook: {}\nname: b\n", "world:\n  nodes: 1\n  nodes: 2\n", '{"a": 1, "a": 1}']
)
def test_a_key_that_is_given_twice_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="is given twice: keep one") as caught:
        load_spec_text(text)
    assert caught.value.code == "invalid-yaml" and "line" in caught.value.detail
    assert load_spec_text("a: &b {k: 1}\nc: {<<: *b, k: 2}\nd: [{k: 1}, {k: 1}]\n")["c"] == {"k": 2}


def test_spec_digest_depends_only_on_result_changing_fields() -> None:
    base = parse_spec(spec()).digest()
    assert parse_spec(spec(labels={"a": "b"}, priority=3, ttl="1d")).digest() == base
    assert parse_spec(spec(trial={"end_at": 60})).digest() == base
    assert parse_spec(spec(seed=1)).digest() != base
    assert parse_spec(spec(hook="fp16_compress")).digest() != base


@pytest.mark.parametrize(
    ("code", "pointer", "word"),
    [
        ({"digest": "a" * 63}, "/code/digest", "string-pattern-mismatch"),
        ({"digest": "../" * 21 + "x"}, "/code/digest", "string-pattern-mismatch"),
        ({"digest": "a" * 64, "source": "nodes"}, "/code/digest", "code-conflict"),
    ],
)
def test_malformed_code_digest_is_refused(code: dict[str, str], pointer: str, word: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(spec(code={"path": "/project", **code}))
    assert [(e.pointer, e.code) for e in caught.value.errors] == [(pointer, word)]


def test_checkpoint_schedule_by_seconds_alone_has_no_every_steps() -> None:
    def steps(**checkpoint: Any) -> Any:
        return parse_spec(spec(checkpoint=checkpoint)).checkpoint.every_steps

    assert [steps(), steps(every_steps="40"), steps(every_steps=40.0)] == [100, 40, 40]
    assert [steps(every_seconds="10m"), steps(every_seconds=600, every_steps=7)] == [None, 7]
    whole = parse_spec(spec(checkpoint={"every_seconds": 60}))
    assert parse_spec(whole.model_dump(mode="json")) == whole


def test_checkpoint_first_accepts_step_auto_and_yaml_off() -> None:
    def first(value: str) -> Any:
        return parse_spec(spec(**load_spec_text(f"checkpoint: {{first: {value}}}"))).checkpoint.first

    assert [first(value) for value in ("auto", "off", "'off'", "7", "'7'")] == ["auto", "off", "off", 7, 7]
    whole = parse_spec(spec())
    assert whole.checkpoint.first == "auto" and parse_spec(whole.model_dump(mode="json")) == whole


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "1.e-3", "+1e-3", ".1e-2"])
def test_number_with_an_exponent_in_arguments_of_a_task_is_a_number(text: str) -> None:
    """As in JSON. It must not reach a task or a hook as a text."""
    found = load_spec_text(f"task: {{args: {{lr: {text}, all: [{text}], quoted: '{text}'}}}}\nhook: {{start: {text}}}")
    assert found == {"task": {"args": {"lr": 1e-3, "all": [1e-3], "quoted": text}}, "hook": {"start": 1e-3}}
    assert load_spec_text(text, "task.args.lr") == 1e-3


def test_text_like_a_number_with_an_exponent_stays_a_text_where_a_spec_wants_texts() -> None:
    """Arguments of a script as they were typed, and abbreviated digests."""
    spec = {
        "name": "a",
        "script": ["train.py", "--lr", "1e-3"],
        "env": {"COMMIT": "12e45678"},
        "labels": {"commit": "1e5"},
    }
    text = yaml.safe_dump(spec)
    assert "'" not in text and load_spec_text(text) == spec
    assert load_spec_text("1234e56", "env.COMMIT") == "1234e56" and load_spec_text("1e3") == "1e3"
    assert parse_spec(load_spec_text(text + "code: {path: /tmp}")).script == ["train.py", "--lr", "1e-3"]


@pytest.mark.parametrize("text", ["1e", "e3", "1e-3x", "v1e3", "1e3.5", "1-e3"])
def test_text_that_only_resembles_a_number_in_arguments_of_a_task_stays_a_text(text: str) -> None:
    assert load_spec_text(text, "task.args.name") == text


def test_spec_with_many_references_to_anchors_is_read_at_once() -> None:
    """Each level refers ten times to the level before: a walk that follows all of them does not end."""
    levels = ["a0: &a0 [1e-3]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    text = "hook:\n" + "\n".join(f"  {level}" for level in levels)
    found = load_spec_text(text)["hook"]
    assert found["a0"] == [1e-3] and found["a11"][0] is found["a10"]
