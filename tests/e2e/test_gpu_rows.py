"""``make gpu`` without a GPU: each row in its cheapest size on the CPU, and what runs them with rows that fail in every way."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.gpu import __main__ as command
from tests.gpu import inventory, runner
from tests.gpu.packages import CARRIED, LIMIT, OBSTACLE, PRESENT, ROOTS, canonical
from tests.gpu.rows import ROWS, Row
from tests.gpu.runner import ROOT, Result, run_rows
from tests.gpu.search_path import PACKAGES, variables
from tests.gpu.wheels import RECORD, wheel_name
from tests.gpu.work import Work, read_parts
from tests.support.fork_server import LIBRARIES, RANKS, Program
from tests.support.full_matrix import full
from tests.support.server import processes_below, wait_for

FORKS_AGENTS = """
import json, os, sys
if "ratchet_service" in sys.orig_argv:
    from tests.support.fork_server import fork_agents
    fork_agents(os.environ["TEST_RANKS"])
    del os.environ["PYTHONPATH"]  # what this file is found by is nothing to its agents
    os.environ |= json.loads(os.environ["TEST_BEFORE"])
"""


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What rows are started with, forked where they can be; their directories lie below a short path of this test's own, and are
    gone in the end."""

    def start(command: list[str], variables: Mapping[str, str], log: int) -> Program | subprocess.Popen[bytes]:
        return LIBRARIES.start(command, log, env=variables, cwd=ROOT)

    monkeypatch.setattr(runner, "start", start)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with variables(None) as found:
            found["RATCHET_STANDBY"] = os.environ["RATCHET_STANDBY"]
            yield found
        assert processes_below(Path(folder)) == []
        assert list(Path(folder).iterdir()) == []


def run(name: str, environ: dict[str, str]) -> Result:
    row = replace(ROWS[name], not_on_cpu="")  # over gloo
    (result,) = run_rows([row], "cpu", "cheap", 250, environ)
    return result


ELSEWHERE = ("jobs", "hooks-gloo", "hooks-mixed", "hook-steps", "throughput", "dead-rank", "parked", "replay-proof")
"""Rows of which other tests show what they show on the CPU."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[full] if name in ELSEWHERE else [])
        for name in ROWS
        if name not in ("doctor", "hook-memory")
    ],
)
def test_gpu_row_is_green_on_cpu(name: str, environ: dict[str, str]) -> None:
    """The two others have tests of their own."""
    result = run(name, environ)
    assert result.verdict == "green", f"{result.seen}\n{result.log}"
    assert {part.verdict for part in result.parts} - {"not applicable"} == {"green"}, result.parts


@full
@pytest.mark.slow
def test_doctor_row_is_green_on_cpu(environ: dict[str, str], tmp_path: Path) -> None:
    """Its ranks are forked."""
    (tmp_path / "sitecustomize.py").write_text(FORKS_AGENTS)
    environ["TEST_BEFORE"] = json.dumps({name: value for name, value in environ.items() if name == "PYTHONPATH"})
    environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    environ["TEST_RANKS"] = RANKS.address
    RANKS.wait_ready()
    result = run("doctor", environ)
    assert result.verdict == "green", f"{result.seen}\n{result.log}"
    assert [part.name for part in result.parts] == ["exactness powerSGD cpu"]


REFUSAL = "nll_loss2d_forward_out_cuda_template does not have a deterministic implementation, but you set more words"


@full
def test_throughput_row_names_operation_refused_by_strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA refuses the loss of images: in the measurement, and in the row."""
    import torch

    from tests.gpu import models, throughput, throughput_modes

    def refuses(out: torch.Tensor, target: torch.Tensor, *, flat: bool) -> torch.Tensor:
        if out.dim() == 4 and not flat:
            raise RuntimeError(REFUSAL)
        return models.loss_of(out, target, flat=flat)

    monkeypatch.setattr(throughput_modes, "loss_of", refuses)
    seen = throughput_modes.measure(models.subjects(full=False)["U-Net"], torch.device("cpu"), 0.01)
    assert seen["refused"] == [REFUSAL] and seen["steps_per_second"] > 0

    off = {name: {"steps_per_second": 10.0} for name in ("GPT-2 small", "U-Net")}
    found = {"off": off, "warn": off, "strict": off | {"U-Net": seen}}
    monkeypatch.setattr(throughput, "_measured", lambda _, mode: found[mode])
    throughput.run(Work("cuda", "full", tmp_path, 60))
    text, image = read_parts(tmp_path)
    assert "refuse" not in text.seen and f"strict refuses: {REFUSAL} (measured with pixels as rows)" in image.seen


# --- what runs them -------------------------------------------------------------------------------------------------------


def rows(*names: str, share: float = 1.0) -> list[Row]:
    return [Row(name, f"tests.gpu.faulty:{name}", {"cpu": share}, "") for name in names]


def test_failing_rows_are_red_with_reason_and_other_rows_run(environ: dict[str, str]) -> None:
    told: list[str] = []
    found = run_rows(
        rows("raises", "is_partly_red", "dies", "works"), "cpu", "cheap", 120, environ, lambda r: told.append(r.row)
    )
    assert told == [result.row for result in found] == ["raises", "is_partly_red", "dies", "works"]
    assert [(result.verdict, result.seen) for result in found] == [
        ("red", "RuntimeError: no kernel image is available"),
        ("red", "2 cases; red: second"),
        ("red", "its process ended with exit code -9"),
        ("green", "on cpu"),
    ]
    assert "in raises" in found[0].log and found[0].parts[0].name == "before"


def test_hung_row_is_killed_within_its_time_share(environ: dict[str, str]) -> None:
    first, second = run_rows(rows("hangs") + rows("works", share=14.0), "cpu", "cheap", 120, environ)
    assert (first.verdict, first.seen) == ("red", "killed: it ran past its 8 s")
    assert [part.name for part in first.parts] == ["first"], "what it had seen is kept"
    assert second.verdict == "green"


def test_row_without_time_is_red_and_excluded_row_not_applicable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_inventory", lambda device, _: {"device": device})
    chosen = ["hooks-nccl", "doctor"]
    code = command.main(["--device", "cpu", "--out", str(tmp_path), "--minutes", "0", "--only", *chosen])
    told = json.loads((tmp_path / "table.json").read_text())
    assert code == 1 and told["facts"] == {"device": "cpu"}
    assert [(row["row"], row["verdict"], row["seen"]) for row in told["rows"]] == [
        ("hooks-nccl", "not applicable", "NCCL moves CUDA tensors only"),
        ("doctor", "red", "no time left"),
    ]
    assert {path.name for path in (tmp_path / "rows").iterdir()} == {"hooks-nccl.json", "doctor.json"}
    assert "| doctor | red | 0 | no time left |" in capsys.readouterr().out


@full
def test_make_gpu_prints_inventory_and_table_and_exits_0(tmp_path: Path) -> None:
    command = [
        "make",
        "gpu",
        "DEVICE=cpu",
        f"PYTHON={sys.executable}",
        f"OUT={tmp_path}",
        "ONLY=hooks-nccl hook-memory",
    ]
    command += ["SIZE=cheap", "MINUTES=4"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((tmp_path / "table.json").read_text())["facts"]
    assert facts["torch"].startswith("2.") and facts["device"] == "cpu" and "safetensors" in facts["packages"]
    table = (tmp_path / "table.md").read_text()
    assert table in done.stdout and "| hooks-nccl | not applicable | 0 |" in table
    assert "| hook-memory | green |" in table and "| powerSGD | green | promised 0." in table


HERE = f"--python {sys.version_info[0]}.{sys.version_info[1]}"


def test_missing_or_incompatible_wheels_are_refused_with_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for reason in ("no wheels", "pydantic_core-2.0-cp27-none-any.whl is not a supported wheel on this platform"):
        assert command.main(["--wheels", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
        told = capsys.readouterr().err
        assert reason in told and f"python3 -m tests.gpu.wheels --to {tmp_path} {HERE}` downloads them" in told
        (tmp_path / "pydantic_core-2.0-cp27-none-any.whl").touch()


def test_make_gpu_without_a_gpu_runs_no_row_and_explains(tmp_path: Path) -> None:
    given = [sys.executable, "-m", "tests.gpu", "--device", "cuda", "--out", str(tmp_path)]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(given, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and json.loads((tmp_path / "table.json").read_text())["rows"] == []
    told = done.stderr.strip()
    assert told.startswith("make gpu: no row can run: the GPU cannot be used: ") and "DEVICE=cpu" in told, told


def test_missing_prerequisite_is_named_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(inventory, "_version", lambda name: "" if name == "pydantic" else "1.0")
    told = inventory.inventory("cpu")[OBSTACLE]
    assert "no pydantic" in told and f"python3 -m tests.gpu.wheels --to DIR {HERE}`" in told and "WHEELS=DIR" in told
    monkeypatch.setattr(torch, "__version__", "2.8.1+cu126")
    assert inventory.inventory("cpu")[OBSTACLE] == "torch 2.8.1+cu126 is too old: Ratchet needs torch 2.9 or newer"
    monkeypatch.setitem(sys.modules, "torch", None)
    told = inventory.inventory("cpu")[OBSTACLE]
    assert told.startswith("torch cannot be imported: ") and "PYTHON=" in told


def test_reason_of_a_red_part_is_printed_and_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_inventory", lambda device, _: {"device": device})
    monkeypatch.setattr(command, "ROWS", {row.name: row for row in rows("is_partly_red")})
    assert command.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    first, reason, *_ = capsys.readouterr().out.splitlines()[1:]
    assert "2 cases; red: second" in first and reason == "    second: ValueError: 3 tensors differ"
    table = (tmp_path / "table.md").read_text()
    assert "| second | red | rank 0: Traceback" in table and "ValueError: 3 tensors differ |" in table


INTERRUPTED = """
import signal, sys
from tests.gpu import __main__ as command
from tests.gpu.rows import Row
if sys.argv[2] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
command.answer_signals()
command._inventory = lambda device, _: {"device": device}
command.ROWS.clear()
command.ROWS.update((name, Row(name, f"tests.gpu.faulty:{name}", {"cpu": 1.0}, "")) for name in ("works", "hangs"))
sys.exit(command.main(["--device", "cpu", "--out", sys.argv[1]]))
"""


@pytest.mark.parametrize("under", ["", "nohup"])
def test_interrupt_ends_the_running_row_and_keeps_results(tmp_path: Path, under: str) -> None:
    out, temporary = tmp_path / "out", tmp_path / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(out), under], cwd=ROOT, env={**os.environ, "TMPDIR": str(temporary)}, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip

    def hangs() -> bool:
        assert process.poll() is None, process.communicate()
        return len(processes_below(temporary)) == 4  # the command, the row and its two processes

    try:
        wait_for(hangs, "the row to hang", 60)
        if under:
            process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        told = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert (process.returncode, told) == (130, f"make gpu: interrupted after 1 rows, which are in {out}/table.md\n")
    assert processes_below(temporary) == [] and list(temporary.iterdir()) == []
    assert "| works | green |" in (out / "table.md").read_text()


# --- what travels to the machine ------------------------------------------------------------------------------------------

ENGINES = {"kubernetes", "obstore", "mlflow", "wandb"}
"""Imported for engines, stores and trackers that no row uses."""


def test_wheels_are_exactly_the_missing_packages_within_size_limit() -> None:
    sizes = {wheel_name(Path(file)): int(size) for size, file in map(str.split, RECORD.read_text().splitlines())}
    assert sizes.keys() == CARRIED and sum(sizes.values()) < LIMIT
    assert not CARRIED & PRESENT
    found, waiting = set[str](), [*ROOTS]
    while waiting:
        name = waiting.pop()
        found.add(name)
        needed = [Requirement(line) for line in metadata.requires(name) or []]
        there = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
        names = {canonical(one.name) for one in needed if one.marker is None or one.marker.evaluate(there)}
        waiting += names - PRESENT - found
    assert found == CARRIED


def test_rows_import_only_packages_of_the_machine_or_the_wheels() -> None:
    """Looked for in the source of all that they may run: Ratchet, the rows, and what they import of this repository."""
    distributions = metadata.packages_distributions()
    waiting = {
        path
        for source in (*PACKAGES.values(), "tests/gpu", "examples/adoption")
        for path in (ROOT / source).rglob("*.py")
    }
    waiting |= set((ROOT / "examples" / "integrations").glob("*.py"))
    seen, foreign = set[Path](), dict[str, str]()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        beside = {file.stem for file in path.parent.glob("*.py")}  # a script's own
        for name in imported(path):
            top = name.partition(".")[0]
            own = [ROOT / f"{name.replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
            waiting |= {file for file in own if file.is_file()} - seen
            if top not in sys.stdlib_module_names and not (ROOT / top).is_dir() and top not in beside | PACKAGES.keys():
                foreign[top] = str(path)
    assert "tests/support/exact_runs.py" in {str(path.relative_to(ROOT)) for path in seen}
    there = PRESENT | CARRIED
    missing = {
        top: where for top, where in foreign.items() if not {canonical(d) for d in distributions.get(top, [])} & there
    }
    assert missing.keys() <= ENGINES, missing
    assert {"torch", "pydantic", "fastapi", "lightning"} <= foreign.keys()


def imported(path: Path) -> set[str]:
    """Full names of the modules, and of what is imported from them, which may be modules."""
    out = set[str]()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            out |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return out
