"""The benchmarks of what hooks send: the paper's figures, and steps on a slow link between two network namespaces."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import network, network_groups, paper
from benchmarks.namespaces import Link, NoNamespaces
from tests.support.forked_benchmarks import start_forked
from tests.support.full_matrix import full
from tests.support.server import wait_for

HELD = "import time; from benchmarks.namespaces import Link; link = Link(); print(link.command(0)[1], flush=True); time.sleep(60)"


def namespaces() -> None:
    """Skip where there can be none: no root, no iproute2, or a container without the capability."""
    try:
        Link().close()
    except NoNamespaces as error:
        pytest.skip(str(error))


@full
def test_paper_table_counts_the_same_bytes_as_the_hook(capsys: pytest.CaptureFixture[str]) -> None:
    paper.table("resnet18", [1], ranks=1)
    out = capsys.readouterr().out
    assert "11173962 parameters" in out
    assert re.search(r"allreduce +44695848 +1072\.70 +1023\.01 +1023", out)
    assert re.search(r"powerSGD rank 1 +183740 +4\.41 +4\.21 +4 +243\.3x +243x", out)
    assert re.search(r"512 x 4608 +3 +7077888 +15360$", out, re.MULTILINE)
    assert re.search(r"biases and norms +41 +9610 +9610 +at every rank$", out, re.MULTILINE)


@full
def test_network_benchmark_trains_ratchet_and_torch_over_a_slow_link(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    namespaces()
    monkeypatch.setattr(network_groups, "_start", start_forked)
    cases = {name: network.CASES[name] for name in (network.ALLREDUCE, "powerSGD rank 1")}
    network.tables(cases, network.Model(256, 4, 4), {"slow": 50_000_000}, 2)
    out = capsys.readouterr().out
    ours = r"[\d.]+ \[.*?\]"
    against = rf"{ours} +{ours} +{ours} +{ours}"  # torch's time, and two ratios to it
    found = re.search(
        rf"^  allreduce +{against} +1\.000 \[1\.000, 1\.000\] +(\S+) MB +(\S+) MB +(\S+) ms +(\S+)$", out, re.MULTILINE
    )
    assert found, out
    sent, wire, limit, share = map(float, found.groups())
    assert sent == pytest.approx(4 * 4 * (256 * 256 + 256) / 1e6, abs=0.001)
    assert wire >= sent
    assert limit == pytest.approx(168.4, abs=0.1)
    assert share > 0.9, "no step can take less than its bytes take on the link"
    found = re.search(rf"^  powerSGD rank 1 +{against} +(\S+) \[.*?\] +(\S+) MB ", out, re.MULTILINE)
    assert found, out
    ratio, sent = map(float, found.groups())
    assert ratio < 1
    assert sent == pytest.approx(4 * 4 * (256 + 256 + 256) / 1e6, abs=0.001)


def test_network_namespaces_end_with_their_creating_process() -> None:
    namespaces()
    with subprocess.Popen(
        [sys.executable, "-c", HELD], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2]
    ) as process:
        try:
            assert process.stdout is not None
            place = Path(process.stdout.readline().strip().partition("=")[2])
            assert place.exists()
        finally:
            process.send_signal(signal.SIGKILL)
    wait_for(lambda: not place.exists(), "the namespace to go", 10)


def test_network_benchmark_without_programs_names_packages_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SystemExit, match=r"not measured\. ip, tc, nsenter, unshare not found: install iproute2, util-linux"
    ):
        network.main()
