"""GPUs: what ``nvidia-smi`` reports for each, and which of them torch can use."""

from __future__ import annotations

import csv
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from ratchet_contract.doctor.findings import Finding, failed, not_checked, ok, warning
from ratchet_contract.plural import pluralize

_FIELDS: Final = (
    "index",
    "name",
    "memory.total",
    "memory.used",
    "compute_mode",
    "mig.mode.current",
    "driver_version",
    "uuid",
)
_BUSY_MIB: Final = 1024
"""MiB in use above which a GPU is reported as busy; a desktop, or the driver itself, uses less."""
_NEWER_DRIVER: Final = (
    "install a driver that supports the CUDA version torch was built with (nvidia-smi shows the newest it supports)"
)
_REPAIR: Final = (
    "restart the machine after a driver update, else reinstall the NVIDIA driver; without a GPU here, remove nvidia-smi"
)


class SmiError(Exception):
    """``nvidia-smi`` is present, but fails or does not answer in time. The text gives the reason."""


@dataclass(frozen=True)
class Gpu:
    """One row of ``nvidia-smi``; memory in MiB. ``total`` and ``used`` are None where it gives no number. ``processes``: number
    of compute processes that it lists for the GPU."""

    index: str
    name: str
    total: int | None
    used: int | None
    compute_mode: str
    mig: bool
    driver: str
    uuid: str
    processes: int | None = None


def findings_without_torch() -> list[Finding]:
    """Return a finding for each GPU that ``nvidia-smi`` lists, without using torch. If ``nvidia-smi`` fails, return one failed
    finding."""
    try:
        return [_finding(gpu) for gpu in query_smi()]
    except SmiError as error:
        return [failed("cuda", "not usable", detail=f"nvidia-smi fails: {error}", cure=_REPAIR)]


def findings_with_torch(torch: Any) -> tuple[list[str], list[Finding]]:
    """Return the names of torch's CUDA devices, and the findings on CUDA and the GPUs. There are no names if torch cannot use
    CUDA, or fails on a device."""
    rows, broken = list[Gpu](), None
    try:
        rows = query_smi()
    except SmiError as error:
        report = warning if torch.version.cuda is None else failed  # torch without CUDA needs no driver
        broken = report("cuda", "not usable", detail=f"nvidia-smi fails: {error}", cure=_REPAIR)
    each = [_finding(gpu) for gpu in rows]
    if torch.version.cuda is None:
        return [], [broken or _no_cuda_build(rows), *each]
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = [torch.cuda.get_device_name(i) for i in range(count)]
    except Exception as error:  # drivers fail in many ways
        return [], [broken or _unusable(rows, _first_line(error)), *each]
    if not names:
        return [], [broken or _unusable(rows, "torch sees no CUDA device"), *each]
    driver = f", driver {rows[0].driver}" if rows else ""
    summary = ok("cuda", pluralize(count, "GPU"), detail=f"CUDA {torch.version.cuda}{driver}")
    if rows:
        return names, [summary, *each]
    return names, [summary, *(_from_torch(torch, i, name) for i, name in enumerate(names))]


def _first_line(error: Exception) -> str:
    """Return the first line of the error's message; its type's name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _no_cuda_build(rows: list[Gpu]) -> Finding:
    """Return the finding for a torch without CUDA: fine if ``nvidia-smi`` shows no GPU, else a warning."""
    if not rows:
        return ok("cuda", "none", detail="no GPU here: jobs run on the CPU, over gloo")
    return warning(
        "cuda",
        "not usable",
        detail=f"{pluralize(len(rows), 'GPU')}, but this torch was built without CUDA",
        cure="install torch with CUDA: pip install --force-reinstall torch from pytorch.org's CUDA index",
    )


def _unusable(rows: list[Gpu], why: str) -> Finding:
    """Return the finding that torch can use no GPU, for the reason ``why``; failed if ``nvidia-smi`` shows a GPU."""
    if not rows:
        return ok("cuda", "none", detail=f"{why}: jobs run on the CPU, over gloo")
    return failed("cuda", "not usable", detail=f"{pluralize(len(rows), 'GPU')}, but {why}", cure=_NEWER_DRIVER)


def _finding(gpu: Gpu) -> Finding:
    """The finding on one GPU: whether ranks can use it, and how much of its memory is free."""
    name, value = f"gpu {gpu.index}", f"{gpu.name}, memory unknown"
    if gpu.total is not None and gpu.used is not None:
        value = f"{gpu.name}, {gpu.total - gpu.used} of {gpu.total} MiB free"
    if gpu.compute_mode == "Prohibited":
        return failed(
            name,
            value,
            detail="compute mode Prohibited: no process may use it",
            cure=f"sudo nvidia-smi -i {gpu.index} -c DEFAULT",
        )
    if gpu.mig:
        return warning(
            name,
            value,
            cure="give each rank a whole GPU, or run one rank per MIG device",
            detail="MIG is on: NCCL cannot join several MIG devices of one GPU",
        )
    mode = "" if gpu.compute_mode in ("Default", "") else f"compute mode {gpu.compute_mode}: one process per GPU"
    if (gpu.used or 0) > _BUSY_MIB or gpu.processes:
        held = f"{gpu.processes} processes hold" if gpu.processes else "others hold"
        size = "memory" if gpu.used is None else f"{gpu.used} MiB"
        return warning(
            name,
            value,
            detail=f"{held} {size}{'; ' + mode if mode else ''}",
            cure="see them with nvidia-smi; leave the GPU out with CUDA_VISIBLE_DEVICES before `ratchet serve`",
        )
    if gpu.total is None or gpu.used is None:
        return not_checked(
            name,
            value,
            detail=f"nvidia-smi gives no number for its memory{'; ' + mode if mode else ''}",
            cure=f"see what it says of it: nvidia-smi -q -i {gpu.index} -d MEMORY",
        )
    return ok(name, value, detail=mode or "free")


def _from_torch(torch: Any, index: int, name: str) -> Finding:
    """Return the finding on GPU number ``index`` by torch alone, for use without rows of ``nvidia-smi``."""
    try:
        free, total = (n >> 20 for n in torch.cuda.mem_get_info(index))
    except Exception as error:  # a GPU in exclusive mode that another process holds
        return failed(
            f"gpu {index}",
            name,
            detail=_first_line(error),
            cure="free it, or leave it out with CUDA_VISIBLE_DEVICES before `ratchet serve`",
        )
    return ok(f"gpu {index}", f"{name}, {free} of {total} MiB free", detail="nvidia-smi is missing or fails")


def query_smi() -> list[Gpu]:
    """Return the GPUs of this machine by ``nvidia-smi``; empty if there is none, or if it is missing. Raises ``SmiError``."""
    text = _smi(f"--query-gpu={','.join(_FIELDS)}")
    users = list[str]()
    if text:
        with suppress(SmiError):  # the processes are an extra
            users = [line.strip() for line in _smi("--query-compute-apps=gpu_uuid").splitlines()]
    return [
        _row(row, users) for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) == len(_FIELDS)
    ]


def _row(row: list[str], users: list[str]) -> Gpu:
    """Return the GPU of one row of ``nvidia-smi``. ``users``: for each process that uses a GPU, the id of that GPU."""
    index, name, total, used, mode, mig, driver, uuid = (cell.strip() for cell in row)
    return Gpu(index, name, _mib(total), _mib(used), mode, mig == "Enabled", driver, uuid, users.count(uuid))


def _mib(cell: str) -> int | None:
    """Return the number in a cell; None if the cell is not a whole number, such as ``[N/A]``."""
    return int(cell) if cell.isdecimal() else None


def _smi(query: str) -> str:
    """Return the output of ``nvidia-smi`` for a query, as CSV; empty without ``nvidia-smi`` or a GPU. Raises ``SmiError``."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SmiError(str(error)) from error
    if done.returncode == 0:
        return done.stdout
    text = (done.stdout + done.stderr).strip()
    if "No devices were found" in text:
        return ""
    raise SmiError(text.partition("\n")[0] or f"exit code {done.returncode}")
