"""Whatever is handed in: specs, cursors, manifests, reports and positions are understood, or refused by an error of ours.

RATCHET_TEST_EXAMPLES sets how many tries each has (default 60).
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratchet_contract.checkpoint.manifest import open_manifest
from ratchet_contract.errors import CheckpointError, RatchetError, Refused, SpecError
from ratchet_contract.protocol.messages import AgentReport
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.parse import load_spec_text, parse_spec
from ratchet_service.api.request_body import RawBody, decode, parse
from ratchet_service.usecases import pagination
from ratchet_service.usecases.job_history import parse_last_id
from ratchet_service.usecases.logs import parse_position
from tests.support.api import SPEC, checkpoint_message, message, training_message
from tests.support.checkpoints import manifest_of, write_ranks

EXAMPLES = int(os.environ.get("RATCHET_TEST_EXAMPLES", "60"))
many = settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize=EXAMPLES <= 60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
words = st.sampled_from(
    ["auto", "cpu", "cuda", "powerSGD", "local", "slurm", "../..", "\0", "a:b", "1e9", "-1", "∞", "\ud800"]
)
values = st.recursive(
    scalars | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FULL: dict[str, Any] = SPEC | {
    "task": {"entrypoint": "a.b:C", "args": {"lr": 0.1}}, "env": {"A": "b"}, "labels": {"team": "x"},
    "nccl": {"NCCL_DEBUG": "INFO"}, "checkpoint": {"every_steps": 10, "keep_last": 3},
    "policy": {"max_failures": 3, "exit_codes": [{"codes": [42], "action": "retry"}]},
    "resources": {"cpus_per_rank": 1}, "launcher": {"kind": "local"}, "secrets": {"K": {"from_env": "K"}}, "priority": 1,
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path into ``value``, itself included."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in inner for found in places(item, (*path, key)))]


@st.composite
def mutated(draw: st.DrawFn, valid: Any) -> Any:
    """``valid`` with one to three of its values replaced, taken out, or joined by one that nobody knows."""
    out = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(out)))
        if not path:
            continue
        place = out
        for key in path[:-1]:
            place = place[key]
        match draw(st.sampled_from(["replace", "remove", "add"])):
            case "replace":
                place[path[-1]] = draw(values)
            case "remove":
                del place[path[-1]]
            case _ if isinstance(place, dict):
                place[draw(st.text(min_size=1, max_size=8))] = draw(values)
            case _:
                place.insert(0, draw(values))
    return out


def leads_into(pointer: str, data: Any) -> bool:
    """To a value of ``data``, or to a key that is missing there."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    for number, part in enumerate(parts):
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and part.isdigit() and int(part) < len(data):
            data = data[int(part)]
        else:
            return number == len(parts) - 1 and isinstance(data, dict | list)
    return True


@many
@given(data=mutated(FULL) | values)
def test_fuzzed_spec_is_parsed_or_refused_with_valid_pointers(data: Any) -> None:
    try:
        spec = parse_spec(data)
    except SpecError as error:
        assert error.detail and error.code and all(problem.detail and problem.code for problem in error.errors)
        if isinstance(data, dict):
            assert error.errors
            astray = [p.pointer for p in error.errors if not leads_into(p.pointer, data)]
            assert not [p for p in astray if p.count("/") > 1 and not leads_into(p.rpartition("/")[0], data)], astray
        return
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert parse_spec(json.loads(spec.model_dump_json())).digest() == spec.digest()


@many
@given(
    text=st.text()
    | mutated(FULL).map(lambda data: json.dumps(data))
    | st.binary().map(lambda raw: raw.decode("latin-1"))
)
def test_fuzzed_text_is_decoded_or_refused(text: str) -> None:
    for body, kind in ((text, "application/yaml"), (text, "application/json")):
        try:
            decode(RawBody(kind, body.encode("utf-8", "surrogatepass")), yaml=True)
        except RatchetError as error:
            assert error.code
    with suppress(SpecError, ValueError, TypeError, yaml.YAMLError):  # the door (``decode``) turns them into an answer
        load_spec_text(text)


@many
@given(
    cursor=st.text() | st.binary().map(lambda raw: raw.hex()),
    kinds=st.sampled_from([(int,), (str, str), (int, int, int)]),
)
def test_fuzzed_cursor_is_refused(cursor: str, kinds: tuple[type, ...]) -> None:
    with pytest.raises(Refused) as refused:
        pagination.decode(cursor, "0123456789abcdef", kinds)
    assert refused.value.code == "bad-cursor"


@many
@given(
    position=st.tuples(
        st.integers(-(2**63) + 1, 2**63 - 1), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
    )
)
def test_cursor_round_trips_and_tampering_is_detected(position: tuple[int, str]) -> None:
    made = pagination.encode("0123456789abcdef", list(position))
    assert pagination.decode(made, "0123456789abcdef", (int, str)) == list(position)
    for at in range(0, len(made), 7):
        other = made[:at] + ("A" if made[at] != "A" else "B") + made[at + 1 :]
        try:
            assert pagination.decode(other, "0123456789abcdef", (int, str)) != list(position)
        except Refused as error:
            assert error.code == "bad-cursor"


def manifest() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        files, tensors = write_ranks(Path(folder), world_size=1, seed=1)
    found: dict[str, Any] = manifest_of(10, 1, files, tensors).model_dump(mode="json")
    return found


@many
@given(data=mutated(manifest()) | values)
def test_fuzzed_manifest_is_refused(data: Any) -> None:
    """None of these has the digest that it would need."""
    with pytest.raises((CheckpointError, ValueError)):
        open_manifest(json.dumps(data).encode("utf-8", "surrogatepass"))


def test_manifest_with_legacy_epoch_key_is_read() -> None:
    new = manifest() | {"parent": {"step": 5, "attempt": 3, "digest": None}, "attempt": 4}
    old: dict[str, Any] = {"epoch" if key == "attempt" else key: value for key, value in new.items() if key != "digest"}
    old["parent"] = {"step": 5, "epoch": 3, "digest": None}
    text = json.dumps(old, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    old["digest"] = hashlib.sha256(text.encode()).hexdigest()
    opened = open_manifest(json.dumps(old).encode())
    assert (opened.attempt, opened.parent.attempt, opened.digest) == (4, 3, old["digest"])


@many
@given(raw=st.binary(max_size=300))
def test_fuzzed_bytes_are_refused_as_manifest(raw: bytes) -> None:
    with pytest.raises((CheckpointError, ValueError)):
        open_manifest(raw)


REPORT: dict[str, Any] = {
    "job_id": "job-000000000001", "attempt": 1, "phase": "RUNNING", "last_step": 7,
    "batches": [{"rank": 0, "from_seq": 1, "messages": [
        training_message(), checkpoint_message(10), message("metrics", step=5, values={"loss": 0.5}),
        message("progress", step=12),
        message("note", type="hello", message="world", data={"a": [1]}),
    ]}],
    "result": {
        "job_id": "job-000000000001", "attempt": 1, "cause": "completed", "last_step": 7, "started_at": "2030-01-01T00:00:00Z",
        "ended_at": "2030-01-01T00:00:01Z", "ranks": [],
    },
}  # fmt: skip


@many
@given(data=mutated(REPORT) | values)
def test_fuzzed_report_is_parsed_or_refused_with_errors(data: Any) -> None:
    raw = json.dumps(data).encode("utf-8", "surrogatepass")
    try:
        told = parse(AgentReport, decode(RawBody("application/json", raw), check_storable=False))
    except RatchetError as error:
        assert error.code in ("invalid-json", "invalid-body", "invalid-value") and len(error.errors) <= 50
        return
    assert AgentReport.model_validate_json(told.model_dump_json()) is not None


@pytest.mark.parametrize("read", [parse_position, parse_last_id])
@many
@given(text=st.text() | st.from_regex(r"[0-9.]{1,30}", fullmatch=True))
def test_fuzzed_log_position_is_parsed_or_refused(read: Callable[[str], Any], text: str) -> None:
    try:
        found = read(text)
    except Refused as error:
        assert error.code
        return
    assert found is not None
