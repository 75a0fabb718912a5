"""Which ``ratchet run`` commands mean the same job."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet_client.cli.run import _spec


def test_command_means_the_same_job_on_another_number_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()

    def read(gpus: str, number: str) -> tuple[int, str]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        spec, digest, _ = _spec(["torchrun", "--nproc-per-node", number, "train.py"], None, None, [])
        return spec["world"]["ranks_per_node"], digest

    (two, before), (four, after) = read("0,1", "gpu"), read("0,1,2,3", "gpu")
    assert (two, four) == (2, 4) and before == after
    assert len({before, read("0,1", "2")[1], read("0,1", "4")[1]}) == 3, "another option means another job"


def test_spec_file_without_a_world_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: x\ntask: {entrypoint: 'm:f'}\ncode: {path: /srv/code}\n")
    spec, _, proof = _spec([str(file)], None, None, [])
    assert "world" not in spec and proof.target == [str(file)]
    assert _spec([str(file)], "2", None, [])[2].target[:2] == ["--set", "world.ranks_per_node=2"]
