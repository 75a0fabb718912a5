"""Scripts with Lightning, Accelerate and the Trainer as jobs: killed and suspended, they end as one that nobody disturbed."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ratchet_client.resources.spec_file import read_spec
from ratchet_contract.paths import MANIFEST_NAME
from ratchet_store.read.compare import compare
from tests.e2e.exactness import final_checkpoint
from tests.support.fork_server import LIBRARIES
from tests.support.full_matrix import full
from tests.support.optional_packages import skip_if_missing
from tests.support.server import Server, rank_pid, wait_for

pytestmark = [  # found, not imported: every worker reads this file, and the jobs are processes of their own
    pytest.mark.slow,
    skip_if_missing("lightning"),
    skip_if_missing("accelerate"),
    skip_if_missing("transformers"),
]

AGENTS = LIBRARIES
VARIABLES = {"TEST_STEP_SECONDS": "0.05"}  # a suspension over REST comes before the end
EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
PACKAGES = ("lightning", "accelerate", "trainer")
# Disturbances come an epoch apart.
CAUSES = {
    "lightning": ["api-suspend"],
    "accelerate": ["rank-killed"],
    "trainer": ["api-suspend", "rank-killed"],
}  # an epoch apart
EPOCHS = {"lightning": 5, "accelerate": 2, "trainer": 5}
STEPS_PER_EPOCH = 11  # 22 batches, two of them accumulated; each of Accelerate's batches is a step


def weights(file: Path, package: str) -> Path:
    """A model to start from, under the names that the package's own checkpoint has."""
    draw, prefix = np.random.default_rng(1), "net."
    if package == "accelerate":
        of_layer = {
            "self_attn.in_proj_weight": (96, 32), "self_attn.in_proj_bias": (96,), "self_attn.out_proj.weight": (32, 32),
            "self_attn.out_proj.bias": (32,), "linear1.weight": (64, 32), "linear1.bias": (64,), "linear2.weight": (32, 64),
            "linear2.bias": (32,), "norm1.weight": (32,), "norm1.bias": (32,), "norm2.weight": (32,), "norm2.bias": (32,),
        }  # fmt: skip
        others = {"tokens.weight": (17, 32), "places": (64, 32), "head.weight": (10, 32), "head.bias": (10,)}
        shapes = others | {f"layer.{name}": shape for name, shape in of_layer.items()}
        save_file({n: draw.normal(0, 0.1, shape).astype(np.float32) for n, shape in shapes.items()}, file)
        return file
    shapes = {"0": (128, 64), "4": (128, 128), "6": (10, 128)}
    found = {f"{n}.weight": draw.normal(0, 0.1, shape) for n, shape in shapes.items()}
    found |= {f"{n}.bias": np.zeros(shape[0]) for n, shape in shapes.items()}
    found |= {f"1.{name}": np.ones(128) for name in ("weight", "bias", "running_mean", "running_var")}
    tensors = {prefix + name: array.astype(np.float32) for name, array in found.items()}
    save_file({**tensors, f"{prefix}1.num_batches_tracked": np.int64(3)[None].reshape(())}, file)
    return file


def live(server: Server, package: str, disturbed: bool, start: Path) -> str:
    """A whole life of a job, from the model ``start``. Disturbed: rank 1 is killed when the save before the first scheduled one
    is there, and from the second epoch on, or the job suspended."""
    spec: dict[str, Any] = read_spec(str(EXAMPLES / f"{package}_train.yaml"))
    spec |= {
        "name": f"{package}-{'disturbed' if disturbed else 'whole'}",
        "resources": {"cpus_per_rank": 1},
        "policy": {"backoff": 0.1},
    }
    spec |= {"script": [f"{package}_train.py", "--epochs", str(EPOCHS[package])], "checkpoint": {"every_steps": 7}}
    spec |= {"start_from": {"path": str(start)}}
    spec["world"]["device"] = "cpu"
    job_id = server.submit(spec)
    attempt = 0
    if disturbed:
        attempt, paths = server.wait_step(job_id, 1, deadline=200)
        first = server.paths.job(job_id).checkpoint(1, attempt) / MANIFEST_NAME
        wait_for(first.exists, "the first save", 30, 0.002)
        os.kill(rank_pid(paths, 1), signal.SIGKILL)
    for epoch, cause in enumerate(CAUSES[package] if disturbed else [], 1):
        step = epoch * STEPS_PER_EPOCH + 5
        attempt, paths = server.wait_step(job_id, step, after_attempt=attempt, deadline=200, saved=True)
        if cause == "rank-killed":
            os.kill(rank_pid(paths, 1), signal.SIGKILL)
            continue
        server.call("POST", f"/v1/jobs/{job_id}/suspend", expect=202)
        server.wait_phase(job_id, "SUSPENDED")
        server.call("POST", f"/v1/jobs/{job_id}/resume", expect=200)
    server.wait_phase(job_id, "SUCCEEDED", deadline=200)
    return job_id


REFUSALS = """
import torch
from lightning import LightningModule, Trainer
from ratchet_contract.errors import UserError
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.data.data_generators import OwnGenerators
from ratchet.lightning import SessionStrategy
from ratchet_worker.integrations.training_arguments import make_generator
from ratchet_worker.integrations.transformers import Trainer as Trainer_
from ratchet_worker.session import Session
from transformers import DataCollatorForLanguageModeling, TrainerCallback, TrainingArguments

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, batch, _):
        return self.net(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def refused(what):
    try:
        what()
    except UserError as error:
        print("refused:", error.detail, flush=True)

def fit(module, data, devices=1, **more):
    def run():
        trainer = Trainer(strategy=SessionStrategy(session), devices=devices, max_epochs=1, logger=False,
                          enable_progress_bar=False, enable_checkpointing=False)
        trainer.fit(module, data, **more)
    refused(run)

class Net(torch.nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).sum()}

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(samples)

class EndsEpochs(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_epoch_stop = state.global_step in (2, 3)  # of 2 steps: one at the end of an epoch, one within

def train(resume=None, data=None, collator=None, trial=None, search=False, **arguments):
    arguments = {"output_dir": "out", "report_to": "none", "disable_tqdm": True} | arguments
    def run():
        trainer = Trainer_(model=Net(2, 1), args=TrainingArguments(**arguments), train_dataset=data,
                           data_collator=collator, callbacks=[EndsEpochs()])
        trainer.hyperparameter_search() if search else trainer.train(resume, trial)
    refused(run)

def loader():
    return torch.utils.data.DataLoader(torch.ones(8, 2), 2)

def again():  # as a new process has it
    state = session._runtime.state
    session._runtime.restored, state.ddp, state.optimizers, state.stateful, state.data = False, None, {}, {}, None

session = Session()
samples = [{"x": torch.ones(2)} for _ in range(8)]
masks = DataCollatorForLanguageModeling(None, mlm=False, seed=5)
data = TrainLoader(samples, batch_size=2, seed=0, rank=session.rank, world_size=session.world_size)
train(auto_find_batch_size=True)
train(resume="checkpoint-5")
train(data=Stream(), max_steps=3)
train(trial={"learning_rate": 0.1})
train(search=True)
train(data=samples, collator=masks, dataloader_num_workers=1)
make_generator(masks, 0)
print("refused: to draw from nothing:", sorted(OwnGenerators({"collate_fn": masks}).find()), flush=True)
fit(Module(), data, devices=2)
fit(Module(), data, ckpt_path="somewhere.ckpt")
fit(Module(), [loader(), loader()])
again()
fit(Module(), iter(samples))
again()
train(data=samples, per_device_train_batch_size=4)
train(data=samples)
session.finish()
"""


def refused(server: Server, directory: Path) -> str:
    """What a job's log says of the ways to use the strategy, and the Trainer in a Session, wrongly."""
    (directory / "train.py").write_text(REFUSALS)
    spec: dict[str, Any] = {"name": "refusals", "code": {"path": str(directory)}, "script": ["train.py"]}
    spec |= {"world": {"ranks_per_node": 1, "device": "cpu"}, "resources": {"cpus_per_rank": 1}}
    job_id = server.submit(spec)
    server.wait_phase(job_id, "SUCCEEDED", "FAILED", deadline=200)
    return server.paths.job(job_id).attempt(1).log(0).read_text()


@full
@pytest.mark.parametrize("package", PACKAGES)
def test_killed_and_suspended_integration_script_resumes_exactly(server: Server, tmp_path: Path, package: str) -> None:
    start = weights(tmp_path / "model.safetensors", package)
    with ThreadPoolExecutor(2) as threads:  # at once: most of their time is the import of the packages
        whole, cut = threads.map(lambda disturbed: live(server, package, disturbed, start), (False, True))
    attempts = server.attempts(cut)
    assert [a["cause"] for a in attempts] == ["rank-killed", *CAUSES[package], "completed"]
    assert attempts[1]["base"]["step"] in (1, 7)  # seldom has it got so far when the kill comes
    began = attempts[0]["resume_report"]["components"]
    assert [c["reason"] for c in began if c["component"] == "model" and str(start) in c["reason"]] != [], began
    for attempt in attempts[1:]:
        assert attempt["resume_report"]["verdict"] == "exact", attempt["resume_report"]
    comparison = compare(final_checkpoint(server, whole), final_checkpoint(server, cut))
    assert comparison.tensors and comparison.identical, f"{comparison.different} {comparison.states}"
    assert losses(server, whole) == losses(server, cut) != []


def losses(server: Server, job_id: str) -> list[tuple[int, float]]:
    """Step and value of what the script logged as ``loss``, by its package's own way."""
    series = server.call("GET", f"/v1/jobs/{job_id}/metrics").json()["series"]
    return [(p["step"], p["value"]) for s in series if s["name"] == "loss" for p in s["points"]]


def test_unsupported_integration_options_are_refused_by_name(server: Server, tmp_path: Path) -> None:
    said = [line for line in refused(server, tmp_path).splitlines() if line.startswith("refused:")]
    expected = [
        "auto_find_batch_size",
        "resume_from_checkpoint: checkpoint-5 was not written by this job",
        "train_dataset: the Trainer's",
        "trial: a search",
        "hyperparameter_search: a search",
        "data_collator: its seed",
        "['collate_fn.generator']",
        "the Trainer asks for 2 ranks (devices=2, num_nodes=1), and there is 1",
        "ckpt_path",
        "several training loaders",
        "have no length",
        "should_epoch_stop after step 3",
        "call trainer.train() only once per job",
    ]
    assert [(e, s) for e, s in zip(expected, said, strict=True) if e not in s] == []
