"""A hook's spec says the same of a value with pydantic, as part of a job's spec, and without it, in a script of one's own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from ratchet_contract.spec.parse import parse_spec
from ratchet_hooks.specs.hook_specs import CustomSpec, PostLocalSGDSpec, PowerSGDSpec, hook_spec
from ratchet_hooks.specs.registry import HOOKS

CUSTOM = {"name": "custom", "hook": "m:f", "state": "m:S"}
TAKEN: list[dict[str, Any]] = [
    *({"name": name} for name in HOOKS if name != "custom"),
    {"name": "powerSGD", "matrix_approximation_rank": 4096, "min_compression_rate": 1, "random_seed": 2**32 - 1},
    {"name": "powerSGD", "start_powerSGD_iter": 0, "use_error_feedback": False, "warm_start": False},
    {"name": "batched_powerSGD", "wrapper": "bf16_compress_wrapper", "orthogonalization_epsilon": 1e-8},
    {"name": "post_localSGD", "period_group_size_dict": {"4": 8, "16": 16}, "subgroup_size": None},
    {"name": "quantization_perchannel", "bucket_size": 1},
    {**CUSTOM, "state_args": {"a": [1, 2.5, None, {"b": True}]}, "replicas": "rank"},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"name": "powerSGD", "matrix_approximation_rank": 0}, "matrix_approximation_rank: must be at least 1, not 0"),
    ({"name": "powerSGD", "matrix_approximation_rank": 4097}, "matrix_approximation_rank: must be at most 4096"),
    ({"name": "powerSGD", "matrix_approximation_rank": 1.5}, "matrix_approximation_rank: must be an int, not 1.5"),
    ({"name": "powerSGD", "min_compression_rate": 0}, "min_compression_rate: must be more than 0"),
    ({"name": "powerSGD", "min_compression_rate": float("inf")}, "min_compression_rate: must be finite"),
    ({"name": "powerSGD", "warm_start": "sometimes"}, "warm_start: must be True or False, not 'sometimes'"),
    ({"name": "powerSGD", "start_powerSGD_iter": 1}, "start_powerSGD_iter must be > 1"),
    ({"name": "powerSGD", "warmstart": True}, "warmstart: no parameter of powerSGD; known: wrapper, matrix_approx"),
    ({"name": "powerSGD", "wrapper": "fp8_compress_wrapper"}, "wrapper: must be 'fp16_compress_wrapper' or"),
    ({"name": "fp16_compress", "wrapper": "bf16_compress_wrapper"}, "wrapper: must be None"),
    ({"name": "post_localSGD", "period_group_size_dict": {}}, "period_group_size_dict: must have a length of at least 1"),
    ({"name": "post_localSGD", "period_group_size_dict": {"x": 2}}, "period_group_size_dict: must be a dict of an int"),
    ({"name": "post_localSGD", "period_group_size_dict": {"2": 2}, "model_averaging_period": 2}, "not both"),
    ({"name": "custom", "hook": "no path"}, "hook: must match"),
    ({"name": "custom", "hook": "m:f\n"}, "hook: must match"),
    ({"name": "custom", "hook": "m:" + "f" * 511}, "hook: must have a length of at most 512"),
    ({"name": "custom"}, "hook: custom needs it"),
    ({"name": "custom", "hook": "m:f", "state_args": {"a": 1}}, "state is not set"),
    ({"name": "powersdg"}, "no hook is named 'powersdg'"),
]  # fmt: skip


@pytest.mark.parametrize("values", TAKEN, ids=lambda values: json.dumps(values)[:60])
def test_valid_hook_spec_equals_job_hook_and_round_trips_json(values: dict[str, Any]) -> None:
    spec = hook_spec(values)
    job = {"name": "x", "task": {"entrypoint": "a:B"}, "world": {"ranks_per_node": 16}, "hook": values}
    assert parse_spec(job).hook == spec
    assert hook_spec(json.loads(json.dumps(spec.values()))) == spec
    adapter = TypeAdapter(type(spec))
    assert adapter.validate_json(adapter.dump_json(spec)) == spec
    assert adapter.dump_python(spec, mode="json") == spec.values() == {**spec.values(), **values}


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_invalid_hook_spec_is_refused_with_and_without_pydantic(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")) as caught:
        hook_spec(values)
    assert not isinstance(caught.value, ValidationError)
    if values["name"] in HOOKS:
        with pytest.raises(ValidationError):
            TypeAdapter(HOOKS[values["name"]].spec).validate_python(values)


def test_custom_hook_state_args_must_be_json() -> None:
    for value in ({1: 2}, (1, 2), object(), b"x"):
        with pytest.raises(ValueError, match="state_args: must be a dict of a str to JSON"):
            CustomSpec(hook="m:f", state="m:S", state_args={"a": [value]})


def test_hook_spec_accepts_wrapper_aliases_and_normalises_keys() -> None:
    assert PowerSGDSpec(wrapper="fp16") == hook_spec({"name": "powerSGD_hook", "wrapper": "fp16_compress"})  # type: ignore[arg-type]
    assert PostLocalSGDSpec(period_group_size_dict={2: 4}).values()["period_group_size_dict"] == {"2": 4}
    with pytest.raises(AttributeError):
        PowerSGDSpec().warm_start = False  # type: ignore[misc]
