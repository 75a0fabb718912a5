"""Hugging Face's Trainer with one line changed, killed at five places: the weights, and the Trainer's own checkpoints, of the
plain script under torch alone.

The second example, and one killed under plain python, with RATCHET_TEST_OPTIONS=all.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import yaml
from safetensors.torch import load_file

from ratchet_contract.phases import Cause
from tests.support.fork_server import LIBRARIES
from tests.support.full_matrix import full
from tests.support.launch import Job
from tests.support.optional_packages import skip_if_missing
from tests.support.pickle_reader import read_pickled
from tests.support.plain_torch_runs import run_plain
from tests.support.server import rank_pid, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    skip_if_missing("transformers"),
    skip_if_missing("sklearn"),
]

EXAMPLES: Final = Path(__file__).parents[4] / "examples"
STEPS: Final = {"glue": 76, "clm": 96}
ONE_THREAD: Final = {**os.environ, "OMP_NUM_THREADS": "1"}


def script(name: str, output: Path) -> list[str]:
    """The example's, with an output directory that can be looked at, on the CPU, and shorter; one of them in mixed precision."""
    given: list[str] = yaml.safe_load((EXAMPLES / f"trainer_{name}/train.yaml").read_text())["script"]
    epochs = given.index("--num_train_epochs") + 1
    given[epochs], given[given.index("--output_dir") + 1] = {"glue": "2", "clm": "1"}[name], str(output)
    own = ["--bf16"] if name == "glue" else ["--train_file", str(text(output.parent))]
    return [*given, *own, "--use_cpu", "--disable_tqdm", "True"]


def text(folder: Path) -> Path:
    """Of words, drawn, and of ``STEPS`` steps for two ranks, whichever texts the installed scikit-learn has."""
    file, draw = folder / "text.txt", random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randrange(2, 9))) for _ in range(200)]
    trained = STEPS["clm"] * 2 * 16 * 64  # batches of 16 blocks of 64 bytes
    file.write_text(" ".join(draw.choices(words, k=trained))[: trained * 100 // 95])
    return file


def kills(name: str) -> list[int]:
    """Steps, drawn: one of each fifth of the training, and none of the last that are done before it is heard of."""
    draw, fifth = random.Random(name), (STEPS[name] - 20) // 5
    return [2 + n * fifth + draw.randrange(fifth) for n in range(5)]


def run_killed(job: Job, steps: list[int]) -> None:
    """Each attempt loses a rank behind one of ``steps``; the last one ends. One more, as behind a kill at the end."""
    draw = random.Random(1)
    for step in steps:
        attempt = job.launch()
        wait_for(lambda: _finished(attempt) >= step, f"step {step}\n{attempt.logs()}", 120, 0.002)  # noqa: B023
        os.kill(rank_pid(attempt.paths, draw.randrange(2)), signal.SIGKILL)
        assert attempt.wait(60).cause is Cause.RANK_KILLED, attempt.logs()
    for _ in range(2):
        last = job.launch()
        assert last.wait(180).cause is Cause.COMPLETED, last.logs()


def _finished(attempt: Any) -> int:
    assert attempt.agent.poll() is None, attempt.logs()
    reading = attempt.reading()
    return 0 if reading is None else reading.finished


def values(file: Path) -> dict[str, Any]:
    """What is in a file of weights or of pickled state, by path."""
    return load_file(file) if file.suffix == ".safetensors" else dict(flat(read_pickled(file)))


def flat(value: Any, path: str = "") -> Any:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            yield from flat(item, f"{path}.{key}")
    else:
        yield path, value if isinstance(value, torch.Tensor) else repr(value)


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def told(output: Path) -> dict[str, Any]:
    """What ``trainer_state.json`` says, without the time that something took, and without who wrote it."""
    state = json.loads((output / "trainer_state.json").read_text())
    state["stateful_callbacks"].pop("RatchetJob", None)
    state["best_model_checkpoint"] = Path(state["best_model_checkpoint"] or "").name
    for entry in state["log_history"]:
        for name in [name for name in entry if name.endswith(("_runtime", "_per_second"))]:
            del entry[name]
    return dict(state)


def assert_same_outputs(mine: Path, theirs: Path) -> None:
    """The same checkpoints, with the same tensors and generators; the same model at the end; the same log."""
    checkpoints = sorted(path.name for path in theirs.glob("checkpoint-*"))
    assert sorted(path.name for path in mine.glob("checkpoint-*")) == checkpoints and len(checkpoints) == 2
    stored = [*(f"{name}/{file.name}" for name in checkpoints for file in (theirs / name).iterdir())]
    files = [name for name in stored if name.endswith((".safetensors", ".pt", ".pth"))]
    assert len(files) == 2 * 5, stored  # model, optimizer, scheduler, a file of generators for each rank
    for file in ("model.safetensors", *files):
        found, expected = values(mine / file), values(theirs / file)
        assert found.keys() == expected.keys()
        assert [name for name in found if not same(found[name], expected[name])] == [], file
    for place in (".", *checkpoints):
        assert told(mine / place) == told(theirs / place)


@full
def test_trainer_under_torchrun_on_cpu_trains_with_all_ranks(tmp_path: Path) -> None:
    given = [one for one in script("clm", tmp_path / "out")[1:] if one != "--use_cpu"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / "trainer_clm/train.py"), *given, "--max_steps", "2", "--save_strategy", "no"]
    ended = subprocess.run(command, cwd=tmp_path, env=ONE_THREAD, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    manifests = [*(tmp_path / "out" / "_ratchet-checkpoints").rglob("MANIFEST.json")]
    assert manifests and {json.loads(m.read_bytes())["world_size"] for m in manifests} == {2}


@full
@pytest.mark.parametrize("name", STEPS)
def test_killed_trainer_ends_as_plain_trainer(jobs: list[Job], tmp_path: Path, name: str) -> None:
    code, mine, theirs = EXAMPLES / f"trainer_{name}", tmp_path / "killed", tmp_path / "plain"
    spec = {"code": {"path": str(code)}, "checkpoint": {"every_steps": 7}, "determinism": "strict"}
    jobs.append(Job(tmp_path, {**spec, "script": script(name, mine)}, code, interpreters=LIBRARIES))
    run_killed(jobs[0], kills(name))
    run_plain(code / "plain.py", *script(name, theirs)[1:], seconds=240, interpreters=LIBRARIES)
    assert_same_outputs(mine, theirs)
    resumed = [attempt for attempt in jobs[0].attempts if attempt.report().base.step]
    assert {attempt.report().verdict for attempt in resumed} == {"exact"} and len(resumed) >= 4
    ignored = [
        note.message for attempt in resumed for note in attempt.messages(kind="note") if "resume_from" in note.message
    ]
    assert len(ignored) >= 3 * (name == "glue") and all("own step" in text for text in ignored), ignored
    if name == "glue":  # which goes on from the last checkpoint that it finds: of the plain Trainer now
        jobs.append(
            Job(tmp_path, {**spec, "script": script(name, theirs)}, code, job_id="job-2", interpreters=LIBRARIES)
        )
        refused = jobs[1].launch()
        assert refused.wait(120).cause is Cause.USER_ERROR, refused.logs()
        assert "checkpoint-76 was not written by this job" in refused.logs()


FURTHER: Final = """
import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import TrainingArguments

from ratchet.transformers import Trainer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.linear(x), labels)}


torch.manual_seed(0)
data = [{"x": torch.randn(4), "labels": i % 2} for i in range(32)]
net = Net()
average = AveragedModel(net) if sys.argv[2:] else None
options = {"per_device_train_batch_size": 4, "lr_scheduler_type": "constant", "save_strategy": "no", "logging_strategy": "no"}
options |= {"use_cpu": True, "report_to": [], "disable_tqdm": True}
trainer = Trainer(model=net, train_dataset=data, args=TrainingArguments("out", num_train_epochs=int(sys.argv[1]), **options))
trainer.train()
print(trainer.state.global_step, net.linear.weight.tolist())
"""


def test_ended_trainer_run_trains_on_and_unregistered_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FURTHER)

    def trained(folder: str, *arguments: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        command = [sys.executable, str(tmp_path / "script.py"), *arguments]
        with (tmp_path / "printed").open("w+") as out:
            rank = LIBRARIES.start(command, out.fileno(), errors=2, env=ONE_THREAD, cwd=tmp_path / folder)
            assert rank.wait(120) == 0
            out.seek(0)
            return out.read().splitlines()[-1]

    whole, first, again = trained("whole", "4"), trained("mine", "2"), trained("mine", "4", "average")
    assert first.startswith("16 ") and whole.startswith("32 ") and again == whole
    spool = tmp_path / "mine" / "out" / "_ratchet-checkpoints" / "attempts" / "0002"
    told = "".join(path.read_text() for path in (spool / "spool").iterdir())
    assert "AveragedModel: created by the script and not registered" in told


@full
def test_trainer_without_service_keeps_ratchet_checkpoints_in_output_dir(tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects
    from transformers import Trainer

    def run(kind: str, output: str) -> subprocess.Popen[str]:
        arguments = [*script("clm", tmp_path / output)[1:], "--max_steps", "45", "--save_steps", "15"]
        command = [sys.executable, str(EXAMPLES / f"trainer_clm/{kind}.py"), *arguments]
        return subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=ONE_THREAD)

    killed = run("train", "killed")
    wait_for(lambda: [*(tmp_path / "killed").glob("checkpoint-15/trainer_state.json")], "step 15", 120, 0.002)
    killed.kill()
    killed.communicate()
    for kind, output in (("train", "killed"), ("plain", "plain")):
        _, said = (one := run(kind, output)).communicate(timeout=180)
        assert one.returncode == 0, said
        assert kind == "plain" or "ratchet: resumed exactly from step" in said, said
    names = [
        "model.safetensors",
        *(f"checkpoint-{n}/{name}" for n in (30, 45) for name in ("optimizer.pt", "rng_state.pth")),
    ]
    for name in names:
        mine, theirs = values(tmp_path / "killed" / name), values(tmp_path / "plain" / name)
        assert mine.keys() == theirs.keys() and [key for key in mine if not same(mine[key], theirs[key])] == []
    files = [str(path.relative_to(tmp_path / "killed")) for path in (tmp_path / "killed").rglob("*") if path.is_file()]
    assert any("ratchet" in file for file in files) and 'ignore_patterns=["_*"' in inspect.getsource(
        Trainer.push_to_hub
    )
    assert [file for file in filter_repo_objects(files, ignore_patterns="_*") if "ratchet" in file] == []
