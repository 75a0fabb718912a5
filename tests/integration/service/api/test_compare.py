"""Two jobs' checkpoints against each other over HTTP: where they part, in words; and what cannot be compared."""

from __future__ import annotations

import pytest

from ratchet_contract.checkpoint.step_ring import RingHeader, StepFingerprint, StepRing
from ratchet_contract.paths import checkpoint_dir_name
from tests.integration.service.api.test_checkpoints import paths, told
from tests.support.api import Api, training_message
from tests.support.checkpoints import make_checkpoint


def trained(api: Api, **steps: int) -> str:
    """A job with a checkpoint per step (``s5=2``: step 5, of seed 2)."""
    job_id = api.submit()
    api.attempt(job_id)
    api.report(job_id, (0, 1, [training_message()]))
    hook = api.job(job_id)["spec"]["hook"]
    found = []
    for name, seed in steps.items():
        parent = found[-1].base if found else None
        root = paths(api, job_id).checkpoints
        given = {"seed": seed, "parent": parent, "job_id": job_id, "hook": hook, "state": {"x": 1}}
        found.append(make_checkpoint(root, int(name[1:]), 1, **given))
    api.report(job_id, (0, 2, [told(manifest) for manifest in found]))
    return job_id


def test_compare_uses_the_first_common_step_at_which_jobs_differ(api: Api) -> None:
    a, b = trained(api, s3=1, s5=1, s7=1, s9=1), trained(api, s5=1, s7=2, s9=2, s11=2)
    found = api.client.get(f"/v1/jobs/{a}/compare/{b}").json()
    assert (found["identical"], found["step"], found["equal_through"]) == (False, 7, 5)
    assert found["checkpoint_id"] == found["with_checkpoint_id"] == checkpoint_dir_name(7, 1)
    assert found["different"] == len(found["differences"]) > 2
    components = [one["component"] for one in found["differences"]]
    assert components == sorted(components, key=["rng", "optimizer", "model"].index)
    first = found["differences"][0]
    assert first["rank"] == 0 and first["place"].startswith("generator") and "differ" in first["detail"]
    assert "generator" in found["advice"]
    later = api.client.get(f"/v1/jobs/{a}/compare/{b}", params={"checkpoint": checkpoint_dir_name(5, 1)}).json()
    assert later["identical"] and later["step"] == 5 and later["differences"] == [] and later["advice"] is None


def test_compare_with_step_fingerprints_names_the_exact_first_step(api: Api) -> None:
    """Of steps that were done again the last attempt's count; a link to somewhere else is not read."""
    a, b = trained(api, s5=1), trained(api, s5=2)

    def write(job_id: str, number: int, rank: int, steps: dict[int, tuple[int, int, int]]) -> None:
        ring = StepRing(paths(api, job_id).attempt(number).ring(rank), RingHeader("line"))
        for step, values in steps.items():
            ring.write(StepFingerprint(step, *values))
        ring.close()

    def parted() -> tuple[int | None, str | None]:
        found = api.client.get(f"/v1/jobs/{a}/compare/{b}").json()
        return found["first_step"], found["first_part"]

    assert parted() == (None, None)
    write(a, 1, 0, {1: (1, 1, 1), 2: (2, 2, 2), 3: (3, 3, 3)})
    write(b, 1, 0, {1: (1, 1, 1), 2: (2, 2, 2), 3: (3, 9, 3), 4: (4, 4, 4)})
    assert parted() == (3, "generators")
    write(a, 1, 1, {1: (1, 1, 1), 2: (2, 2, 2)})
    write(b, 1, 1, {1: (1, 1, 1), 2: (9, 2, 2)})
    assert parted() == (2, "parameters")
    api.attempt(b, 2)
    write(b, 2, 1, {2: (2, 2, 2)})
    assert parted() == (3, "generators")
    ring = paths(api, b).attempt(1).ring(0)
    ring.rename(ring.with_name("moved"))
    ring.symlink_to("moved")
    assert parted() == (None, None)


def test_compare_of_identical_jobs_uses_the_newest_common_step(api: Api) -> None:
    a, b = trained(api, s3=1, s5=1, s7=1), trained(api, s3=1, s5=1)
    found = api.client.get(f"/v1/jobs/{a}/compare/{b}").json()
    assert (found["identical"], found["step"], found["equal_through"]) == (True, 5, 3) and found["tensors"] == 6


def test_compare_without_common_or_existing_checkpoints_is_refused(api: Api) -> None:
    a, b = trained(api, s3=1), trained(api, s5=1)
    answer = api.client.get(f"/v1/jobs/{a}/compare/{b}")
    assert answer.status_code == 409 and answer.json()["code"] == "no-common-step"
    assert f"{a} has step 3" in answer.json()["detail"] and f"{b} has step 5" in answer.json()["detail"]
    assert api.client.get(f"/v1/jobs/{a}/compare/job-000000000000").json()["code"] == "job-not-found"
    params = {"checkpoint": checkpoint_dir_name(4, 1)}
    assert api.client.get(f"/v1/jobs/{a}/compare/{b}", params=params).json()["code"] == "checkpoint-not-found"
    (paths(api, b).checkpoint(5, 1) / "MANIFEST.json").unlink()
    params = {"checkpoint": checkpoint_dir_name(3, 1), "with_checkpoint": checkpoint_dir_name(5, 1)}
    assert api.client.get(f"/v1/jobs/{a}/compare/{b}", params=params).json()["code"] == "checkpoint-gone"


@pytest.mark.parametrize("seed", [1, 2])
def test_compare_reports_a_damaged_file_as_damage_not_as_difference(api: Api, seed: int) -> None:
    """A file that is damaged is named as such, unless the digests have decided already."""
    a, b = trained(api, s3=1), trained(api, s3=seed)
    (file,) = paths(api, b).checkpoint(3, 1).glob("rank-00001*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    answer = api.client.get(f"/v1/jobs/{a}/compare/{b}").json()
    assert answer.get("identical") is True if seed == 1 else answer["code"] == "checkpoint-damaged"
