"""What a checkpoint is exported as, against what plain PyTorch would have saved in the very step: model and whole ranks."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors
import torch
import torch.distributed as dist
from fastapi import FastAPI
from safetensors.torch import load_model
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from ratchet_contract.errors import CheckpointError
from ratchet_contract.phases import Cause
from ratchet_contract.processes import procfs
from ratchet_service.api.file_response import Sending, read_chunks
from ratchet_service.isolation.sandbox import minimal_environ
from ratchet_service.launchers.registry import Launchers
from ratchet_service.scheduling.machine import Machine
from ratchet_service.submission.local_submission import LocalSubmission
from ratchet_store.format.manifest_file import read_manifest
from ratchet_worker.export.main import export
from tests.support import export_script
from tests.support.api import Server
from tests.support.checkpoints import copy_checkpoint
from tests.support.export_service import (
    FULL,
    SERVICE,
    SILENT,
    Held,
    export_service,
    have_ended,
    store_checkpoint_for_export,
)
from tests.support.fake_interpreters import python_with_answer_of
from tests.support.full_matrix import full
from tests.support.launch import Job
from tests.support.pickle_reader import read_pickled
from tests.support.server import wait_for
from tests.support.small_disk import script_on_small_disk

POWER = {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 3}
LOCAL = {
    "name": "post_localSGD",
    "start_localSGD_iter": 2,
    "model_averaging_period": 4,
    "post_local_gradient_allreduce": False,
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """Two jobs of one script, under hooks with and without equal replicas, that have ended."""
    home = tmp_path_factory.mktemp("export")
    code = home / "code"
    code.mkdir()
    shutil.copy(export_script.__file__, code / "train.py")
    made = {}
    for name, hook, steps in (("power", POWER, 6), ("local", LOCAL, 6)):
        out = home / name
        out.mkdir()
        spec = {"script": ["train.py", str(out), str(steps)], "code": {"path": str(code)}, "hook": hook}
        made[name] = Job(home, {**spec, "ddp": {"bucket_cap_mb": 0.005}}, code, job_id=name)
        made[name].launch()
    for job in made.values():
        assert job.attempts[0].wait().cause is Cause.COMPLETED, job.attempts[0].logs()
    yield made
    for job in made.values():
        job.close()


def _export(job: Job, form: str, checkpoint: Path | None = None) -> tuple[bytes, list[str]]:
    directory = checkpoint or job.newest()
    with tempfile.TemporaryFile() as file:
        request = {"checkpoint": str(directory), "digest": read_manifest(job.newest()).digest, "format": form}
        answer = export({**request, "fd": os.dup(file.fileno())})
        file.seek(0)
        data = file.read()
        assert answer["digest"] == hashlib.sha256(data).hexdigest()
        return data, answer["notes"]


def _ranks(job: Job) -> list[Any]:
    """The torch form, as a program without Ratchet reads it."""
    data, _ = _export(job, "torch")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        names = tar.getnames()
        assert names == ["rank-00000-of-00002.pt", "rank-00001-of-00002.pt"]
        files = [tar.extractfile(name) for name in names]
        return [torch.load(file, weights_only=True) for file in files if file is not None]


def _saved(job: Job, rank: int) -> Any:
    """What the script itself saved in its last step."""
    return read_pickled(job.home.home / job.job_id / f"end-{rank}.pt")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


def test_safetensors_export_equals_state_dict_of_the_module(jobs: dict[str, Job], tmp_path: Path) -> None:
    data, notes = _export(jobs["power"], "safetensors")
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    torch.manual_seed(5)
    net = export_script.Net()
    load_model(net, path)
    truth = _saved(jobs["power"], 0)["state_dict"]
    assert truth.pop("_extra_state") == {"version": 3}
    assert _same(dict(net.state_dict()), dict(truth)) and net.outer.weight is net.inner.weight
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == set(truth) - {"outer.weight"}
        metadata = file.metadata()
    assert metadata["outer.weight"] == "inner.weight" and metadata["format"] == "pt"
    facts = json.loads(metadata["ratchet"])
    assert (facts["step"], facts["job"], facts["notes"]) == (6, "power", notes)
    assert any("rank 0" in note for note in notes) and any("_extra_state" in note for note in notes)


def test_export_of_different_replicas_is_their_mean(jobs: dict[str, Job], tmp_path: Path) -> None:
    data, notes = _export(jobs["local"], "safetensors")
    found = safetensors.torch.load(data)
    ranks = [_saved(jobs["local"], rank)["state_dict"] for rank in range(2)]
    assert not torch.equal(ranks[0]["head.weight"], ranks[1]["head.weight"])  # or there is nothing to average
    for name in ("head.weight", "conv.weight", "inner.weight"):
        mean = ((ranks[0][name].double() + ranks[1][name].double()) / 2).float()
        assert torch.equal(found[name], mean), name
    assert torch.equal(found["norm.running_mean"], ranks[0]["norm.running_mean"])
    assert torch.equal(found["table"], ranks[0]["table"])
    assert any("mean over 2 ranks" in note for note in notes)
    local = _ranks(jobs["local"])
    assert all(_same(dict(local[r]["state_dict"]), dict(ranks[r])) for r in range(2))  # each rank's own
    assert local[0]["comm_hook_state"]["iter"] == 2 and local[0]["averager"]["step"] == 6


def test_torch_export_is_loadable_by_the_documented_recipe(jobs: dict[str, Job]) -> None:
    buckets = set()
    for rank, found in enumerate(_ranks(jobs["power"])):
        truth = _saved(jobs["power"], rank)
        assert _same(dict(found["state_dict"]), dict(truth["state_dict"])) and found["rank"] == rank
        assert found["state_dict"]["outer.weight"].data_ptr() == found["state_dict"]["inner.weight"].data_ptr()
        assert _same(found["optimizer"], truth["optimizer"])
        assert (found["comm_hook"], found["notes"]) == ("powerSGD", [])
        state = _restored(found["comm_hook_state"])
        saved = truth["state"]
        buckets |= set(saved["error_dict"])
        assert _same(state.__getstate__() | {"rng": None}, saved | {"rng": None})
        generator = np.random.RandomState()
        generator.set_state(saved["rng"])
        assert np.array_equal(state.rng.randint(1 << 30, size=700), generator.randint(1 << 30, size=700))
        net = export_script.Versioned()
        net.load_state_dict(found["state_dict"])
        torch.optim.AdamW(net.parameters()).load_state_dict(found["optimizer"])
    assert len(buckets) > 1  # or the order within a bucket is all that was looked at


def _restored(slots: dict[str, Any]) -> Any:
    """The recipe of docs/checkpoints.md."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        generator = np.random.RandomState()
        generator.set_state(slots["rng"])
        state = PowerSGDState(process_group=None)
        state.__setstate__({**slots, "rng": generator})
        return state
    finally:
        dist.destroy_process_group()


REGISTERED = """
import sys
from collections import Counter, defaultdict, deque
import numpy as np
import torch
from ratchet_worker.session.session import Session

class Registered:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state

class Counting(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "seen": 3}

with Session() as s:
    net = torch.nn.Linear(2, 1)
    model = s.wrap(net)
    optimizer = Counting(net.parameters(), lr=0.1)
    optimizer.state["calls"] = 1
    s.register(optimizer=optimizer, mine=Registered(eval(sys.argv[1])))
    for step in s.steps(1):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
PLAIN = (None, True, 2**70, 1.5, 1j, b"b", "t", torch.Size([2]))
TIMES = {"dtype": "datetime64[s]", "integers": [0, 86400]}
CONVERTED: dict[str, tuple[str, Any]] = {
    "deque": ("deque([1, deque([2.5])], maxlen=2)", [1, [2.5]]),
    "counter": ("Counter(a=2)", {"a": 2}),
    "defaultdict": ("defaultdict(list, a=[1])", {"a": [1]}),
    "set": ("{3, 1}", [1, 3]),
    "plain": ("(None, True, 2**70, 1.5, 1j, b'b', 't', torch.Size([2]))", PLAIN),
    "numbers": ("(np.float32(0.5), np.int8(3), np.bool_(True), np.complex64(1j), np.str_('t'))", (0.5, 3, True, 1j, "t")),
    "texts": ("np.array([['a', 'b']])", [["a", "b"]]),
    "times": ("np.array(['1970-01-01', '1970-01-02'], '>M8[s]')", TIMES),
    "time": ("np.datetime64('1970-01-02', 's')", {"dtype": "datetime64[s]", "integers": 86400}),
    "span": ("np.timedelta64(5, 'ms')", {"dtype": "timedelta64[ms]", "integers": 5}),
    "spans": ("np.array([[5]], 'm8[25s]')", {"dtype": "timedelta64[25s]", "integers": torch.tensor([[5]])}),
    "big-endian": ("np.array([0.5, 2.0], '>f4')", torch.tensor([0.5, 2.0])),
    "big-endian integers": ("np.array([[1, 2]], '>i4')", torch.tensor([[1, 2]], dtype=torch.int32)),
    "big-endian list": ("np.array([1, 2], '>i4')", [1, 2]),
    "without dimension": ("np.array(0.5)", torch.tensor(0.5, dtype=torch.float64)),
    "unsigned": ("np.array([[2**64 - 1]], 'u8')", torch.tensor([[2**64 - 1]], dtype=torch.uint64)),
    "reversed": ("np.array([1.0, 2.0])[::-1]", torch.tensor([2.0, 1.0], dtype=torch.float64)),
}  # fmt: skip


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Job]]:
    """Makes a job of one rank that has registered an object with this state, by name and expression, and has ended."""
    home = tmp_path_factory.mktemp("registered")
    (home / "train.py").write_text(REGISTERED)
    made: list[Job] = []

    def _make(name: str, state: str) -> Job:
        spec = {"script": ["train.py", state], "code": {"path": str(home)}}
        made.append(Job(home, {**spec, "world": {"ranks_per_node": 1, "device": "cpu"}}, home, job_id=name))
        attempt = made[-1].launch()
        assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
        return made[-1]

    yield _make
    for job in made:
        job.close()


def test_torch_export_of_every_storable_value_is_loadable(registered: Callable[[str, str], Job]) -> None:
    job = registered("storable", f"{{{', '.join(f'{name!r}: {text}' for name, (text, _) in CONVERTED.items())}}}")
    data, _ = _export(job, "torch")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        file = tar.extractfile("rank-00000-of-00001.pt")
        assert file is not None
        found = torch.load(file, weights_only=True)["components"]["user:mine"]
    assert found.keys() == CONVERTED.keys()
    for name, (_, wanted) in CONVERTED.items():
        assert type(found[name]) is type(wanted) and _same(found[name], wanted), (name, found[name])


def test_torch_export_of_value_that_torch_does_not_have_is_refused_by_its_path(
    registered: Callable[[str, str], Job], tmp_path: Path
) -> None:
    job = registered("refused", "{'kept': [1.0, np.longdouble(1) / 3]}")
    with export_service(tmp_path / "home") as api:
        url = store_checkpoint_for_export(api, job.newest())
        answer = api.client.get(url, params={"format": "torch"})
        assert api.client.get(url, params={"format": "safetensors"}).status_code == 200
    assert (answer.status_code, answer.json()["code"]) == (409, "export-failed")
    assert "user:mine['kept'][1]: numpy's float128 cannot be exported" in answer.json()["detail"]


def test_dcp_export_notes_what_an_optimizer_keeps_for_no_parameter(registered: Callable[[str, str], Job]) -> None:
    _, notes = _export(registered("counting", "{}"), "dcp")
    assert "left out of optimizer, since it belongs to no parameter: calls, seen" in notes


@pytest.mark.parametrize("name", ["power", "local"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_export_is_loadable_by_torch_dcp_load(jobs: dict[str, Job], tmp_path: Path, name: str) -> None:
    """Every key that ``get_state_dict`` asks for is there, the extra state and the tied parameter too, with the same bits."""
    import torch.distributed.checkpoint as dcp  # takes a second, which every worker would spend that only collects
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    data, notes = _export(jobs[name], "dcp")
    assert any("pickle" in note for note in notes)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["__0_0.distcp", ".metadata"]
        tar.extractall(tmp_path, filter="data")
    torch.manual_seed(5)
    net = export_script.Versioned()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    model, optim = get_state_dict(net, optimizer)
    found: dict[str, Any] = {"model": model, "optimizer": optim, "step": 0, "ratchet": ""}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert found["step"] == 6 and json.loads(found["ratchet"])["job"] == name
    set_state_dict(net, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    truth = _saved(jobs[name], 0)
    if name == "local":  # the mean over the ranks, and rank 0's optimizer
        data, _ = _export(jobs[name], "safetensors")
        truth["state_dict"] |= safetensors.torch.load(data)
        truth["state_dict"]["outer.weight"] = truth["state_dict"]["inner.weight"]
        assert any("rank 0's: every rank has its own" in note for note in notes)
    assert _same(dict(net.state_dict()), dict(truth["state_dict"])) and net.outer.weight is net.inner.weight
    names = [key for key, _ in net.named_parameters()]
    for index, state in truth["optimizer"]["state"].items():
        assert _same(found["optimizer"]["state"][names[index]], state)
    assert optimizer.param_groups[0]["lr"] == truth["optimizer"]["param_groups"][0]["lr"]


def test_job_started_from_an_export_begins_with_the_same_weights(jobs: dict[str, Job], tmp_path: Path) -> None:
    data, _ = _export(jobs["power"], "safetensors")
    path, out = tmp_path / "model.safetensors", tmp_path / "begun"
    path.write_bytes(data)
    out.mkdir()
    spec = jobs["power"].spec | {"script": ["train.py", str(out), "2"], "start_from": {"path": str(path)}}
    job = Job(tmp_path, spec, jobs["power"].code, job_id="begun")
    try:
        attempt = job.launch(start_file=str(path))
        assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
        report = attempt.report()
        path.unlink()  # the job has checkpoints of its own now
        again = job.launch(start_file=str(path))
        assert again.wait().cause is Cause.COMPLETED, again.logs()
        assert again.report().verdict == "exact" and "imported" not in {c.status for c in again.report().components}
    finally:
        job.close()
    assert report.verdict == "fresh" and report.base.step == 0
    assert {(c.component, c.status) for c in report.components} == {
        ("model", "imported"), ("optimizer", "absent"), ("hook", "absent"),
    }  # fmt: skip
    truth = _saved(jobs["power"], 0)["state_dict"]
    for rank in range(2):
        found = torch.load(out / f"begin-{rank}.pt", weights_only=True)
        assert _same(dict(found), dict(truth)), rank


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
def test_export_of_damaged_checkpoint_is_refused(jobs: dict[str, Job], tmp_path: Path, form: str) -> None:
    copy = copy_checkpoint(jobs["power"].newest(), tmp_path / jobs["power"].newest().name)
    broken = copy / "rank-00000-of-00002.safetensors"
    data = bytearray(broken.read_bytes())
    data[-1] ^= 1
    broken.write_bytes(data)
    with pytest.raises(CheckpointError, match="digest"):
        _export(jobs["power"], form, copy)


def test_export_runs_without_env_and_interpreter_of_the_job(jobs: dict[str, Job], tmp_path: Path) -> None:
    """Of a job that trains elsewhere neither variables nor interpreter; of one that trains here no variables."""
    (tmp_path / "site").mkdir()
    ran = tmp_path / "ran"
    (tmp_path / "site" / "sitecustomize.py").write_text(f"open({str(ran)!r}, 'w').close()")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ntouch {ran}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    env = {"PYTHONPATH": str(tmp_path / "site"), "LD_PRELOAD": "/nowhere.so", "PYTHONHOME": "/nowhere"}
    elsewhere = {"launcher": {"kind": "slurm"}}
    with export_service(tmp_path / "home") as api:
        for url in (
            store_checkpoint_for_export(api, jobs["power"].newest(), env=env),
            store_checkpoint_for_export(api, jobs["power"].newest(), python=str(python), env=env, **elsewhere),
        ):
            answer = api.client.get(url)
            data, notes = _export(jobs["power"], "safetensors")
            assert (answer.status_code, answer.content) == (200, data)
            assert json.loads(answer.headers["Ratchet-Notes"]) == notes != []
            digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
            assert answer.headers["Repr-Digest"] == f"sha-256=:{digest}:"
            assert not ran.exists()
    assert not LocalSubmission(api.settings.paths, Machine(), Launchers({}), reconciler_here=False).trains_here("local")


def test_malformed_answer_of_the_jobs_interpreter_is_export_failed(jobs: dict[str, Job], tmp_path: Path) -> None:
    digest = "0" * 64
    malformed = [{}, {"error": "torn"}, {"digest": "zz", "notes": []}, {"digest": 3, "notes": []}, {"digest": digest}]
    malformed += [{"digest": digest, "notes": None}, {"digest": digest, "notes": [1]}, {"error": [], "code": 7}]
    answer = tmp_path / "answer"
    python = python_with_answer_of(tmp_path, answer)
    with export_service(tmp_path / "home") as api:
        url = store_checkpoint_for_export(api, jobs["power"].newest(), python=str(python))
        for given in malformed:
            answer.write_text(json.dumps(given))
            found = api.client.get(url)
            assert (found.status_code, found.json()["code"]) == (409, "export-failed"), given
            assert f"{python} ended, its answer" in found.json()["detail"], given


def test_export_environment_has_no_credential_of_the_service() -> None:
    own = {"PATH": "/bin", "LD_LIBRARY_PATH": "/opt/lib", "PYTHONPATH": "/opt/py", "LC_ALL": "C"}
    kept_back = {
        "RATCHET_TOKEN": "rt", "DATABASE_URL": "x", "AWS_SECRET_ACCESS_KEY": "x", "KUBECONFIG": "x", "HF_TOKEN": "x",
        "RATCHET_DATABASE_URL": "postgresql://a", "PYTHON_COPY": "postgresql://a",
    }  # fmt: skip
    assert minimal_environ(own | kept_back) == own


def test_export_of_remote_job_without_local_torch_is_refused(
    jobs: dict[str, Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet_service.usecases.export.find_spec", lambda name: None)
    with export_service(tmp_path / "home") as api:
        answer = api.client.get(store_checkpoint_for_export(api, jobs["power"].newest(), launcher={"kind": "slurm"}))
    assert (answer.status_code, answer.json()["code"]) == (409, "export-failed")
    assert sys.executable in answer.json()["detail"] and "no torch" in answer.json()["detail"]


def test_exports_above_the_limit_are_refused_as_busy(
    jobs: dict[str, Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path, monkeypatch)
    with export_service(tmp_path / "home", max_exports=1) as api, ThreadPoolExecutor(1) as pool:
        url = store_checkpoint_for_export(api, jobs["power"].newest())
        first = pool.submit(api.client.get, url)
        pids = held.wait()
        refused = api.client.get(url)
        assert (refused.status_code, refused.json()["code"]) == (503, "busy")
        assert refused.headers["Retry-After"] == "1" and refused.headers["Content-Type"] == "application/problem+json"
        assert api.client.get(url.removesuffix("/export")).status_code == 200
        held.release()
        answer = first.result(60)
        assert (answer.status_code, answer.content) == (200, _export(jobs["power"], "safetensors")[0])
        assert have_ended(pids)


def test_export_ends_on_client_disconnect_service_stop_and_timeout(
    jobs: dict[str, Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, newest = Held(tmp_path, monkeypatch), jobs["power"].newest()
    with ExitStack() as clients, export_service(tmp_path / "home", max_exports=1) as api:
        url = store_checkpoint_for_export(api, newest)
        root = api.settings.paths.job(url.split("/")[3]).root
        before = sorted(root.rglob("*"))

        def ask() -> socket.socket:
            client = socket.create_connection((api.client.base_url.host, api.client.base_url.port or 0))
            client.sendall(f"GET {url} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            return clients.enter_context(client)

        client = ask()
        pids = held.wait()
        client.close()
        wait_for(lambda: have_ended(pids), "the export of a client that has gone to end", 10)
        client = ask()

        def running() -> list[int]:
            """Of the next export: its turn is given back, but only behind the end of the processes."""
            nonlocal client
            if select.select([client], [], [], 0)[0]:
                assert b" 503 " in client.recv(4096)
                client = ask()
            return next((pids for pids in held.export_processes() if not have_ended(pids)), [])

        pids = wait_for(running, "the next export to begin")
        assert sorted(root.rglob("*")) == before
    wait_for(lambda: have_ended(pids), "the export to end with the service", 10)
    with export_service(tmp_path / "other", max_exports=1, export_seconds=1.0) as api:
        url = store_checkpoint_for_export(api, newest)
        late = api.client.get(url)
        assert (late.status_code, late.json()["code"]) == (504, "export-timeout")
        assert "longer than 1 s" in late.json()["detail"] and "try again" in late.json()["detail"]
        assert api.client.get(url).status_code == 504  # not busy
    assert all(have_ended(pids) for pids in held.export_processes())


def test_stalled_download_is_dropped_and_the_file_closed(caplog: pytest.LogCaptureFixture) -> None:
    size, files, app = 32 << 20, [], FastAPI()  # more than the sockets hold

    def send() -> Sending:
        files.append(tempfile.TemporaryFile())  # noqa: SIM115  # the answer closes it
        os.truncate(files[-1].fileno(), size)
        headers = {"Content-Length": str(size)}
        held = ExitStack()
        held.enter_context(files[-1])
        return Sending(read_chunks(files[-1]), held, 0.5, headers=headers, media_type="application/octet-stream")

    app.get("/", response_model=None)(send)
    with Server(app) as url, socket.socket() as client:
        assert httpx.get(url).content == bytes(size)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((httpx.URL(url).host, httpx.URL(url).port))
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_for(lambda: len(files) == 2 and files[1].closed, "the file to be closed", 20)
        assert files[0].closed and "read less than 1 MiB within 0.5 s" in caplog.text


def test_export_of_killed_service_leaves_no_process_and_no_file(jobs: dict[str, Job], tmp_path: Path) -> None:
    pid_file, temporary = tmp_path / "pid", tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "sitecustomize.py").write_text(SILENT.format(pid=str(pid_file)))
    (tmp_path / "service.py").write_text(SERVICE)
    with export_service(tmp_path / "home") as api:
        url = store_checkpoint_for_export(api, jobs["power"].newest())
        root = api.settings.paths.job(url.split("/")[3]).root
        before = sorted(root.rglob("*"))
        service = subprocess.Popen(
            [sys.executable, str(tmp_path / "service.py"), str(api.settings.home), *url.split("/")[3:6:2]],
            env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(tmp_path)},
        )
        try:
            pid = int(wait_for(lambda: pid_file.exists() and pid_file.read_text(), "the export to read"))
            service.kill()
            wait_for(lambda: procfs.start_time(pid) is None, "the export to end", 10)
        finally:
            service.kill()
            service.wait()
        assert sorted(root.rglob("*")) == before and list(temporary.iterdir()) == []


@full
def test_export_on_full_disk_is_507_and_leaves_no_file(jobs: dict[str, Job], tmp_path: Path) -> None:
    said = script_on_small_disk(tmp_path, "2m", FULL, str(jobs["power"].newest()), timeout=120)
    assert said == "safetensors 507 disk-full\ntorch 507 disk-full\ndcp 507 disk-full\ndcp 200\n"
