"""What ``ratchet doctor`` says of GPUs where ``nvidia-smi`` is present but shows none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ratchet_contract.doctor.findings import Finding
from ratchet_worker.doctor.gpus import findings_with_torch, findings_without_torch

MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program, to be written by the test."""
    program = tmp_path / "nvidia-smi"
    program.touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return program


def found(cuda: str | None) -> list[Finding]:
    """With a torch, built for that CUDA, that sees no GPU."""
    torch = SimpleNamespace(version=SimpleNamespace(cuda=cuda), cuda=SimpleNamespace(is_available=lambda: False))
    names, findings = findings_with_torch(torch)
    assert names == []
    return findings


def test_failing_driver_is_reported_with_its_message_and_a_cure(smi: Path) -> None:
    smi.write_text(f"#!/bin/sh\necho '{MISMATCH}'\necho 'NVML library version: 580.65'\nexit 18\n")
    for findings, status in (
        (findings_without_torch(), "failed"),
        (found("13.0"), "failed"),
        (found(None), "warning"),
    ):
        (finding,) = findings
        assert (finding.name, finding.status) == ("cuda", status)
        assert MISMATCH in str(finding.detail) and "driver" in str(finding.cure)


def test_gpus_are_shown_if_only_their_processes_cannot_be_listed(smi: Path) -> None:
    row = "0, NVIDIA H200, 143771, 0, Default, Disabled, 580.65.06, GPU-a"
    smi.write_text(f"#!/bin/sh\ncase $1 in --query-gpu*) echo '{row}' ;; *) exit 3 ;; esac\n")
    (finding,) = findings_without_torch()
    assert (finding.name, finding.status) == ("gpu 0", "ok")


def test_gpu_without_a_number_for_its_memory_hides_no_gpu(smi: Path) -> None:
    """As of a GPU that shares the host's memory."""
    rows = "0, NVIDIA H200, 143771, 0, Default, Disabled, 580.65.06, GPU-a\n"
    rows += "1, NVIDIA GB10, [N/A], [N/A], Default, [N/A], 580.65.06, GPU-b"
    smi.write_text(f"#!/bin/sh\ncase $1 in --query-gpu*) echo '{rows}' ;; esac\n")
    whole, unknown = findings_without_torch()
    assert (whole.name, whole.status) == ("gpu 0", "ok")
    assert (unknown.name, unknown.status, unknown.value) == ("gpu 1", "not-checked", "NVIDIA GB10, memory unknown")
    (summary, *_) = found(None)
    assert (summary.status, summary.detail) == ("warning", "2 GPUs, but this torch was built without CUDA")


def test_gpu_without_a_number_for_its_memory_is_busy_if_a_process_uses_it(smi: Path) -> None:
    row = "0, NVIDIA GB10, [N/A], [N/A], Default, [N/A], 580.65.06, GPU-b"
    smi.write_text(f"#!/bin/sh\ncase $1 in --query-gpu*) echo '{row}' ;; *) printf 'GPU-b\\nGPU-b\\n' ;; esac\n")
    (finding,) = findings_without_torch()
    assert (finding.status, finding.detail) == ("warning", "2 processes hold memory")


def test_nvidia_smi_output_that_is_no_utf8_is_read(smi: Path) -> None:
    row = "0, NVIDIA \\351, 143771, 0, Default, Disabled, 580.65.06, GPU-a"
    smi.write_text(f"#!/bin/sh\ncase $1 in --query-gpu*) printf '{row}\\n' ;; esac\n")
    (finding,) = findings_without_torch()
    assert (finding.status, finding.value) == ("ok", "NVIDIA \ufffd, 143771 of 143771 MiB free")


def test_errors_of_torch_without_a_message_are_named_by_their_type(smi: Path) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError

    smi.write_text("#!/bin/sh\n")
    torch = SimpleNamespace(version=SimpleNamespace(cuda="13.0"), cuda=SimpleNamespace(is_available=fails))
    ((finding,),) = findings_with_torch(torch)[1:]
    assert (finding.status, finding.detail) == ("ok", "RuntimeError: jobs run on the CPU, over gloo")
    torch.cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, get_device_name=lambda _: "H200", mem_get_info=fails
    )
    _, (_, finding) = findings_with_torch(torch)
    assert (finding.name, finding.status, finding.detail) == ("gpu 0", "failed", "RuntimeError")


def test_driver_without_devices_is_a_machine_without_gpu(smi: Path) -> None:
    smi.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert findings_without_torch() == []
    for cuda in ("13.0", None):
        (finding,) = found(cuda)
        assert (finding.status, finding.value) == ("ok", "none")
