"""``ratchet init --patch``: what it prints is applied by programs that people have, and gives the script that is meant."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet_client.cli.app import app
from ratchet_contract.scripts import is_unmanaged

EXAMPLES = Path(__file__).parents[2] / "examples"
UNRUNNABLE = "raise SystemExit('a script that is read must not be run')\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Printed:
    """What ``ratchet init --patch`` says of ``text``, which stays as it is."""

    def __init__(self, text: str | bytes, name: str = "train.py") -> None:
        self.path = Path(name)
        self.before = text if isinstance(text, bytes) else text.encode()
        self.path.write_bytes(self.before)
        done = CliRunner().invoke(app, ["init", "--patch", name])
        assert self.path.read_bytes() == self.before and sorted(Path().iterdir()) == [self.path], (
            "nothing is changed unasked"
        )
        self.code, self.diff, self.said = done.exit_code, done.stdout_bytes, done.stderr
        assert "Traceback" not in self.said, self.said

    def applied(self, *program: str) -> str:
        done = subprocess.run(
            program or ("patch", "-p0"), input=self.diff, capture_output=True, timeout=30, check=False
        )
        assert done.returncode == 0, done.stderr
        self.path.with_suffix(".py.orig").unlink(missing_ok=True)
        changed = self.path.read_bytes()
        compile(changed, "train.py", "exec")
        return changed.decode()


def changed(text: str) -> str:
    printed = Printed(UNRUNNABLE + textwrap.dedent(text))
    assert printed.code == 0, printed.said
    return printed.applied().removeprefix(UNRUNNABLE)


LOOP = """\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
model = DDP(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for inputs, labels in loader:
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
print(model.module.weight.double().sum().item())
"""


LEFT = {"image_loop", "token_loop"}
"""Examples with state in plain variables, or with no DataLoader."""
PLAIN = sorted([*EXAMPLES.glob("*/plain.py"), *EXAMPLES.glob("*/*_plain.py")])


def behind_the_docstring(text: str) -> str:
    """Logged metrics are an addition to the example."""
    lines = text.split('"""', 2)[2].splitlines(keepends=True)
    return "".join(line for line in lines if "session.log(" not in line)


@pytest.mark.parametrize("plain", PLAIN, ids=lambda path: path.parent.name)
def test_an_example_becomes_the_one_that_is_shown(plain: Path) -> None:
    printed = Printed(plain.read_bytes(), plain.name)
    if plain.parent.name in LEFT:
        assert printed.code == 5 and f"{plain.name}, line " in printed.said
        return
    own = "lightning" in plain.parent.name  # starts its ranks itself
    command = plain.name if own else f"torchrun --nproc-per-node 2 {plain.name}"
    assert printed.code == 0 and printed.said == (
        f"next: ratchet init --patch {plain.name} | patch -p0, then: ratchet init {command}, then: "
        f"ratchet prove {plain.stem}.yaml, then: ratchet run {command}\n"
    )
    shown = plain.with_name(plain.name.replace("plain", "train")).read_text()
    assert behind_the_docstring(printed.applied()) == behind_the_docstring(shown)


def test_git_takes_the_difference_too() -> None:
    printed = Printed(LOOP)
    assert printed.applied("git", "apply", "-p0", "-") == Printed(LOOP).applied()


FUNCTIONS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

def setup():
    dist.init_process_group("gloo")

def run_epoch(model, batches, optimizer):
    for step, (inputs, labels) in enumerate(batches):
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

def train(model, loader: DataLoader, optimizer, epochs):
    for epoch in range(0, epochs):
        run_epoch(model, loader, optimizer)

def main():
    setup()
    torch.manual_seed(0)
    device = torch.device("cpu") if not torch.cuda.is_available() else torch.device("cuda", 0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
    loader = DataLoader(data, batch_size=4)
    net = nn.Linear(8, 2).to(device)
    model = DDP(
        net,
        device_ids=None,
    )
    optimizer = torch.optim.SGD(
        model.module.parameters(),
        lr=0.1,
    )
    train(model, loader, optimizer, 3)
    print(model.module.weight.double().sum().item(), flush=True)
    dist.destroy_process_group()

main()
"""


def test_the_changed_script_trains_as_before(tmp_path: Path) -> None:
    """Group, model, loop and passes are in functions of their own."""
    printed = Printed(FUNCTIONS)
    command, environment = [sys.executable, "train.py"], {**os.environ, "OMP_NUM_THREADS": "1"}
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for _ in range(5):  # torch's own end of a group aborts or hangs now and then
        with subprocess.Popen(command, env=environment | alone, stdout=subprocess.PIPE, text=True) as plain:
            assert plain.stdout is not None
            before = plain.stdout.readline()
            plain.kill()
        if before:
            break
    printed.applied()
    assert not is_unmanaged(Path("train.py").read_bytes())
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and before in done.stdout.splitlines(keepends=True), done
    assert (tmp_path / "ratchet-checkpoints").is_dir()


def test_a_function_that_needs_the_session_is_given_it() -> None:
    made = changed(FUNCTIONS)
    for line in (
        "    session = Session()  # starts the process group\n    setup()",
        "def train(session: Session, model, loader: DataLoader, optimizer, epochs):\n    for epoch in session.epochs(",
        "    device = session.device",
        "    model, optimizer, loader = session.prepare(model, optimizer, loader)\n    train(session, model, loader, opt",
        "    model = net\n    optimizer = torch.optim.SGD(\n        model.parameters(),",
        "def setup():\n    pass",
    ):
        assert line in made, (line, made)
    assert "DDP" not in made and "process_group()" not in made


CHOICE = """\
if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
else:
    device = torch.device("cpu")
"""
READ = 'local_rank = int(os.environ["LOCAL_RANK"])\n'
INIT = 'dist.init_process_group("gloo")\n'
SETUP = 'def setup():\n    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n    dist.init_process_group("nccl")\n\nsetup()\n'


@pytest.mark.parametrize(
    ("begins", "model", "made"),
    [
        (INIT + READ + CHOICE, "DDP(nn.Linear(8, 2).to(device), device_ids=[local_rank])", "device = session.device\n"),
        (READ + CHOICE + INIT, "DDP(nn.Linear(8, 2).to(device))", "device = session.device\n"),
        (READ + "torch.cuda.set_device(local_rank)\n" + INIT, "DDP(nn.Linear(8, 2))", ""),
        (
            READ + INIT + "print(local_rank)\n" + CHOICE,
            "DDP(nn.Linear(8, 2))",
            "local_rank = session.local_rank\nprint(local_rank)\ndevice = session.device\n",
        ),
        (
            INIT + 'rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])\n',
            "DDP(nn.Linear(8, 2))",
            "rank, size = session.rank, session.world_size\n",
        ),
        (
            'if "RANK" in os.environ:\n    print(int(os.environ["RANK"]))\n' + INIT,
            "DDP(nn.Linear(8, 2))",
            None,
        ),
    ],
    ids=["behind the group", "in front of it", "set_device alone", "used elsewhere", "others", "asked for"],
)
def test_the_changed_script_needs_no_variables_of_torchrun(begins: str, model: str, made: str | None) -> None:
    text = changed(LOOP.replace(INIT, begins).replace("DDP(nn.Linear(8, 2))", model))
    start = "session = Session()  # starts the process group\n"
    if made is None:
        assert 'print(int(os.environ["RANK"]))\n' + start in text
        return
    assert f"\n{start}{made}torch.manual_seed(0)\n" in text, text
    assert "environ" not in text and "import os" not in text


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        ("dist.is_initialized()", ""),
        ("dist.is_available() and dist.is_initialized()", ""),
        ("ended(model)", "if ended(model):\n    pass\n"),
    ],
)
def test_an_if_that_only_asks_goes_with_what_it_holds(asked: str, left: str) -> None:
    text = changed(f"{LOOP}if {asked}:\n    dist.destroy_process_group()\n")
    assert text.endswith(f"print(model.module.weight.double().sum().item())\n{left}"), text


def test_a_function_that_starts_the_group_is_left_without_its_device() -> None:
    text = changed(LOOP.replace(INIT, SETUP))
    assert "def setup():\n    pass\n\nsession = Session()  # starts the process group\nsetup()\n" in text, text


@pytest.mark.parametrize(
    ("read", "line"),
    [
        (f"def place():\n    {READ}    return local_rank\n{INIT}", 10),
        ('parser.add_argument("--rank", default=int(os.environ["RANK"]))\n' + INIT, 9),
        (INIT + 'print(os.environ["RANK"])\n', 10),
    ],
    ids=["no session there", "not yet", "text"],
)
def test_variables_of_torchrun_that_stay_are_told(read: str, line: int) -> None:
    printed = Printed(LOOP.replace(INIT, read))
    assert printed.code == 5 and printed.diff
    assert f"train.py, line {line}: " in printed.said and "torchrun sets it, and python does not" in printed.said


def test_a_device_that_is_chosen_beside_other_things_keeps_them() -> None:
    chosen = CHOICE.replace("else:\n", 'else:\n    print("slow")\n')
    text = changed(LOOP.replace(INIT, INIT + READ + chosen))
    assert "local_rank" not in text and '    device = session.device\nelse:\n    print("slow")\n' in text
    elif_ = "if torch.backends.mps.is_available():\n    print()\n    device = 'mps'\nel" + CHOICE
    text = changed(LOOP.replace(INIT, INIT + READ + elif_))
    assert "elif torch.cuda.is_available():" in text


def within(head: str, start: str, text: str = LOOP) -> str:
    """``text`` with ``head`` around what begins with ``start``."""
    before, behind = text.split(start)
    return before + head + textwrap.indent(start + behind, "    ")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (LOOP.replace("range(3)", "range(start, 3)"), 15, "it goes over range(start, 3): session.epochs(n)"),
        (LOOP.replace("range(3)", "range(1, 4)"), 15, "session.epochs(n)"),
        (LOOP.replace("range(3)", "count()"), 15, "it goes over count()"),
        (LOOP.replace("DDP(nn.Linear(8, 2))", "torch.compile(DDP(net))"), 13, "is not what a name is given"),
        (LOOP.replace('dist.init_process_group("gloo")', "prepare_group()"), 13, "init_process_group is not called"),
        (LOOP.replace("in loader:", "in islice(loader, 9):"), 15, "the DataLoader that it goes over is not seen"),
        (LOOP.replace("loader = ", "loaders.train = "), 15, "the DataLoader that it goes over is not seen"),
        (LOOP.replace("optimizer = torch", "if True: optimizer = torch"), 14, "optimizer is made in a block of its own"),
        (within("for fold in range(5):\n", "for epoch in range(3)"), 15, "loops that train around loops that train"),
        (LOOP + "for epoch in range(9):\n    for x in loader: x.backward()\n", 22, "one of 2 loops that train"),
        ("import torch.multiprocessing as mp\nmp.spawn(f, nprocs=2)\n" + LOOP, 2, "it starts its ranks itself"),
        (within("class Fit:\n  def fit(self):\n", "for epoch in range(3)"), 17, "is made in another function"),
    ],
)  # fmt: skip
def test_what_cannot_be_changed_is_told_by_line_and_nothing_else_is_changed(text: str, line: int, said: str) -> None:
    printed = Printed(text)
    assert printed.code == 5 and not printed.diff, printed.diff
    rows = printed.said.splitlines()
    assert any(row.startswith(f"train.py, line {line}: ") and said in row for row in rows), printed.said
    if "init_process_group" in text:
        assert any("session = Session() takes its place" in row for row in rows), printed.said


def test_a_loop_that_counts_from_1_goes_on_to() -> None:
    made = Printed(LOOP.replace("range(3)", "tqdm(range(1, args.epochs + 1))")).applied()
    assert (
        "for epoch in tqdm(session.epochs(args.epochs)):\n    epoch += 1  # they are counted from 0\n    loader" in made
    )
    assert Printed(LOOP.replace("range(3)", "range(1, args.epochs)")).code == 5


CARRIED = LOOP.replace("for epoch", "best, total, seen, steps = 0.0, None, [], 0\nfor epoch").replace(
    "    for inputs", "    total = 0.0\n    for inputs"
)


@pytest.mark.parametrize(
    ("in_batch", "in_epoch", "line", "said", "code"),
    [
        (
            "pass",
            "best = max(best, accuracy(model))",
            22,
            "best goes on from epoch to epoch, and is in no checkpoint",
            5,
        ),
        ("steps += 1", "print(steps)", 23, "steps starts from its initial value after a resume; it is only printed", 0),
        ("if steps % 9: steps = 3", "pass", 22, "steps goes on from epoch to epoch", 5),
        ("count = 0.0", "print(count)", None, "", 0),
        (
            "total = total + 1",
            "print(total)",
            22,
            "total starts from its initial value where a resume continues within an epoch",
            0,
        ),
        ("best = inputs.sum(); total = best", "print(total)", None, "", 0),
    ],
)
def test_variables_that_a_loop_carries_on_are_told(
    in_batch: str, in_epoch: str, line: int | None, said: str, code: int
) -> None:
    text = CARRIED.replace(
        "        optimizer.zero_grad()\n", f"        optimizer.zero_grad()\n        {in_batch}\n    {in_epoch}\n"
    )
    text = text.replace("    total = 0.0\n", "    own = 0.0\n") if "best = inputs" in in_batch else text
    printed = Printed(text)
    assert printed.code == code and printed.diff, printed.said
    told = [row for row in printed.said.splitlines() if "train.py, line" in row]
    assert [said in row for row in told] == ([True] if line else []), printed.said


def test_variables_that_a_loop_over_batches_carries_in_a_function_are_told() -> None:
    text = FUNCTIONS.replace("    for step, (", "    running = 0.0\n    for step, (").replace(
        "        optimizer.step()\n", "        optimizer.step()\n        running = 0.9 * running + model.loss\n"
    )
    printed = Printed(text)
    assert printed.code == 0 and printed.diff, printed.said
    (told,) = [row for row in printed.said.splitlines() if "train.py, line" in row]
    assert "line 16: running starts from its initial value where a resume continues within an epoch" in told, told


def test_variables_are_told_of_a_script_that_is_changed_already() -> None:
    text = CARRIED.replace(
        "        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n    best = max(best, accuracy(model))\n"
    )
    again = Printed(Printed(UNRUNNABLE + text).applied())
    assert again.code == 0 and not again.diff and "uses Ratchet already" in again.said
    assert "best goes on from epoch to epoch, and is in no checkpoint" in again.said, again.said


def test_settings_of_ddp_and_hooks_go_into_the_spec_and_are_told() -> None:
    text = LOOP.replace(
        "Linear(8, 2))", "Linear(8, 2), find_unused_parameters=True, device_ids=[0])\nmodel.register_comm_hook(s, h)"
    )
    printed = Printed(text)
    assert printed.code == 5 and "these places are left to you" in printed.said
    assert (
        "train.py, line 13: find_unused_parameters=True goes into the spec: ddp: {find_unused_parameters: ...}"
        in printed.said
    )
    assert "train.py, line 14: taken out: the hook of a job is set in the spec" in printed.said
    made = printed.applied()
    assert "register_comm_hook" not in made and "model = nn.Linear(8, 2)\noptimizer = " in made


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\n", "\r\n"),
        ("    ", "\t"),
        ("optimizer.zero_grad()\n", "optimizer.zero_grad()\nepochs = 1"),
        ("import os\n", "# -*- coding: latin-1 -*-\n# ü\n"),
        ("import os\n", "\ufeffimport os\n"),
        ("import os\n", '"""Ü."""\nsession, Session = None, "→"\n'),
    ],
    ids=["CRLF", "tabs", "no newline at the end", "latin-1", "BOM", "names that are taken"],
)
def test_the_rest_of_the_text_is_as_it_was(old: str, new: str) -> None:
    text = LOOP.replace(old, new).replace("print(model.module.weight.double().sum().item())\n", "")
    encoding = "latin-1" if "latin-1" in text else "utf-8"
    printed = Printed(text.encode(encoding))
    assert printed.code == 0, printed.said
    subprocess.run(["git", "apply", "-p0", "-"], input=printed.diff, check=True, timeout=30)
    made = printed.path.read_bytes()
    compile(made, "train.py", "exec")
    lines = made.decode(encoding).split("\n")
    kept = [line for line in text.split("\n") if line in lines]
    assert len(kept) >= len(text.split("\n")) - 5
    assert len([line for line in lines if line not in text.split("\n")]) == 5, printed.diff
    if "\r\n" in text:
        assert made.count(b"\n") == made.count(b"\r\n")


@pytest.mark.parametrize(
    ("imported", "name", "given", "made"),
    [
        ("import lightning as L", "L.Trainer", "max_epochs=3", "strategy=SessionStrategy(), max_epochs=3"),
        ("import lightning.pytorch as pl", "pl.Trainer", 'strategy="ddp"', "strategy=SessionStrategy()"),
        ("import lightning.pytorch", "lightning.pytorch.Trainer", 'strategy="auto"', "strategy=SessionStrategy()"),
        ("from lightning import Trainer as T", "T", "", "strategy=SessionStrategy()"),
        ("from lightning.pytorch import Trainer", "Trainer", "\n    devices=2,  # both\n",
         "\n    strategy=SessionStrategy(),\n    devices=2,  # both\n"),
    ],
)  # fmt: skip
def test_lightnings_trainer_is_given_the_strategy(imported: str, name: str, given: str, made: str) -> None:
    text = changed(f"{imported}\n\ntrainer = {name}({given})\ntrainer.fit(model)\n")
    ours = "from ratchet.lightning import SessionStrategy"
    assert text == f"{imported}\n\n{ours}\n\ntrainer = {name}({made})\ntrainer.fit(model)\n"
    assert not is_unmanaged(text.encode())


@pytest.mark.parametrize(
    ("imported", "line", "before", "behind"),
    [
        ("from transformers import Trainer, set_seed\n", "Trainer  # noqa: F811", "Trainer(1)\n", "Trainer(1)\n"),
        ("from transformers import Seq2SeqTrainer as S\n", "Seq2SeqTrainer as S  # noqa: F811", "S(1)\n", "S(1)\n"),
        ("import transformers as t\n", "Trainer", "t\nclass T(t.Trainer): ...\n", "t\nclass T(Trainer): ...\n"),
    ],
)  # fmt: skip
def test_the_trainer_of_transformers_is_ratchets(imported: str, line: str, before: str, behind: str) -> None:
    assert changed(imported + before) == f"{imported}\nfrom ratchet.transformers import {line}\n{behind}"


def test_a_trainer_that_a_function_imports_is_ratchets_there() -> None:
    text = "def main():\n    from transformers import Trainer\n{}    Trainer().train()\n"
    assert changed(text.format("")) == text.format("    from ratchet.transformers import Trainer  # noqa: F811\n")


ACCELERATE = """
import torch
from accelerate import Accelerator, DataLoaderConfiguration

def train(accelerator, model, loader, optimizer, count):
    for epoch in range(count):
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()

def main():
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration())
    train(accelerator, *accelerator.prepare(model, loader, optimizer), 3)
"""


def test_the_accelerator_is_ratchets_and_gives_the_epochs() -> None:
    made = changed(ACCELERATE)
    assert "\nfrom accelerate import DataLoaderConfiguration\n\nfrom ratchet.accelerate import Accelerator\n" in made
    assert "    for epoch in accelerator.epochs(count):\n" in made
    loop = "{0}\nfor e in {1}:\n  for b in l:\n    a.backward(b)\n"
    alone = changed("import accelerate\n" + loop.format("a = accelerate.Accelerator()", "range(9)"))
    assert alone == "\nfrom ratchet.accelerate import Accelerator\n" + loop.format("a = Accelerator()", "a.epochs(9)")
    choice = "a = Accelerator(log_with=t) if t else Accelerator()"
    chosen = changed("from accelerate import Accelerator\n" + loop.format(choice, "range(n)"))
    assert chosen == "\nfrom ratchet.accelerate import Accelerator\n" + loop.format(choice, "a.epochs(n)")


def test_the_accelerator_of_an_object_gives_its_other_methods_the_epochs() -> None:
    text = """
    from accelerate import Accelerator

    class Training:
        def __init__(self):
            self.accelerator = Accelerator()

        def all(self, count):
            for epoch in range(count):
                self.one()

        def one(self):
            for batch in self.loader:
                self.accelerator.backward(self.model(batch))
    """
    assert "        for epoch in self.accelerator.epochs(count):\n" in changed(text)


def passing(over: str, text: str = FUNCTIONS) -> str:
    """``text`` with another loop over batches than the one of ``run_epoch``."""
    return text.replace("    for step, (inputs, labels) in enumerate(batches):\n", over)


@pytest.mark.parametrize(
    ("over", "line"),
    [
        ("    pbar = tqdm(batches, desc='x')\n    for inputs, labels in pbar:\n", 12),
        ("    with tqdm(batches) as pbar:\n     pass\n    for inputs, labels in pbar:\n", 12),
        ("    pbar = batches\n    for inputs, labels in pbar:\n", None),
        ("    pbar = tqdm(batches, initial=batches.start)\n    for inputs, labels in pbar:\n", None),
        ("    pbar = tqdm(batches) if main else batches\n    for inputs, labels in pbar:\n", 12),
        (
            "    if main:\n        bar = tqdm(batches)\n    else:\n        bar = batches\n    for inputs, labels in bar:\n",
            13,
        ),
        ("    for inputs, labels in tqdm(batches):\n", 12),
    ],
)
def test_a_loop_over_another_name_of_the_loader_is_seen(over: str, line: int | None) -> None:
    printed = Printed(passing(over))
    told = [row for row in printed.said.splitlines() if ", line " in row]
    hint = f"train.py, line {line}: its count begins at 0 where a resume goes on within an epoch: tqdm(batches, initial=batches."
    assert printed.code == 0 and [row.startswith(hint) for row in told] == [True] * (line is not None), printed.said
    assert "model, optimizer, loader = session.prepare(model, optimizer, loader)" in printed.applied()


def test_the_line_that_is_told_is_also_that_of_the_changed_file() -> None:
    loop = "for epoch in range(3):\n"
    printed = Printed(LOOP.replace(loop, f"best = 0\n{loop}    best = max(best, epoch)\n"))
    (row,) = [row for row in printed.said.splitlines() if ", line " in row]
    (before,), (after,) = (
        re.findall(pattern, row) for pattern in (r", line (\d+): ", r"line (\d+) of the changed file")
    )
    lines = printed.path.read_text().splitlines(), printed.applied().splitlines()
    assert before != after and lines[0][int(before) - 1] == lines[1][int(after) - 1] != ""


def test_another_name_of_the_loader_that_is_made_too_early_is_told() -> None:
    printed = Printed(LOOP.replace("for epoch", "again = loader\nfor epoch").replace("in loader:", "in again:"))
    assert printed.code == 5 and "train.py, line 15: again is another name of the loader, made in front" in printed.said
    assert "model, optimizer, loader = session.prepare(model, optimizer, loader)" in printed.applied()


def test_the_number_around_a_progress_bar_is_told() -> None:
    for body, code in (("print(step)", 5), ("pass", 0)):
        bar = f"    for step, (inputs, labels) in enumerate(tqdm(batches)):\n        {body}\n"
        printed = Printed(passing(bar))
        assert printed.code == code and "line 12: enumerate around a progress bar counts from 0" in printed.said


def test_what_is_carried_on_is_told_where_nothing_is_changed() -> None:
    printed = Printed(
        CARRIED.replace("range(3)", "count()").replace("    total =", "    best = max(best, 1)\n    total =")
    )
    assert printed.code == 5 and not printed.diff and "best goes on from epoch to epoch" in printed.said


def test_what_an_evaluation_counts_is_not_told() -> None:
    counted = "        correct = 0\n        for batch in others:\n            correct += model(batch)\n        print(correct)\n"
    printed = Printed(ACCELERATE.replace("            optimizer.step()\n", "            optimizer.step()\n" + counted))
    assert printed.code == 0 and ", line " not in printed.said, printed.said


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("import lightning as L\nL.Trainer(**options).fit(m)\n", 2, "strategy may be among options"),
        ('import lightning as L\nL.Trainer(strategy="fsdp")\n', 2, "Ratchet trains with DDP"),
        ("import lightning as L\nL.Trainer(strategy=args.strategy)\n", 2, "strategy is args.strategy"),
        ("import lightning as L\nL.Trainer()\nL.Trainer()\n", 3, "one of 2 Trainers"),
        (
            "import lightning as L\nt = L.Trainer()\nt.test(ckpt_path='b')\nt.fit(m, ckpt_path='a')\n",
            4,
            "ckpt_path of fit is refused",
        ),
        (
            'import lightning as L\nL.Trainer(strategy="ddp_find_unused_parameters_true")\n',
            2,
            "find_unused_parameters: true",
        ),
        ("import pytorch_lightning as pl\npl.Trainer()\n", 2, "pytorch_lightning is the package from before"),
        ("from trl import SFTTrainer\nSFTTrainer(m).train()\n", 2, "class Mine(Trainer, SFTTrainer): pass"),
        (ACCELERATE.replace("range(count)", "range(begun, count)"), 6, "it goes over range(begun, count)"),
        (ACCELERATE.replace("def train(accelerator,", "def train(a,"), 6, "accelerator is not known in its function"),
        (ACCELERATE + "    accelerator.load_state()\n", 14, "load_state: a job goes on by itself"),
        ("from accelerate import Accelerator\na = Accelerator()\n", 2, "no loop over epochs"),
        ("from accelerate import Accelerator\nf(Accelerator())\na.load_state()\n", 3, "load_state: a job goes on"),
        ("from lightning.pytorch.cli import LightningCLI\nLightningCLI(Net)\n", 2, "--trainer.strategy ratchet"),
    ],
)
def test_what_is_left_to_the_user_is_told_by_line(text: str, line: int, said: str) -> None:
    printed = Printed(text)
    rows = printed.said.splitlines()
    assert printed.code == 5 and "these places are left to you" in rows[-1]
    assert any(row.startswith(f"train.py, line {line}: ") and said in row for row in rows), printed.said


def test_of_two_trainers_the_one_that_trains_is_changed() -> None:
    made = changed("import lightning as L\na, b = 1, L.Trainer()\nc = L.Trainer()\nc.fit(m)\nb.test(m)\n")
    assert "b = 1, L.Trainer()" in made and "c = L.Trainer(strategy=SessionStrategy())" in made


def test_files_that_are_no_script_and_scripts_that_are_not_known() -> None:
    assert "jupyter nbconvert" in Printed("{}", "a.ipynb").said
    Path("a.ipynb").unlink()
    assert "line 1 is not valid Python" in Printed("def f(:\n").said
    unknown = Printed("import torch\n")
    assert (
        unknown.code == 5 and not unknown.diff and "docs/adoption.md has the change for other scripts" in unknown.said
    )
    managed = Printed("from ratchet import Session\nwith Session() as s: ...\n")
    assert managed.code == 0 and not managed.diff and "nothing is to be changed" in managed.said
    Path("below").mkdir()
    done = CliRunner().invoke(app, ["init", "--patch", "--print", "train.py"])
    assert done.exit_code == 5 and "leave the other options out" in done.stderr
    os.chdir("below")
    above = CliRunner().invoke(app, ["init", "--patch", "../train.py"])
    assert above.exit_code == 5 and "first" in above.stderr and not above.stdout


def test_where_an_imported_module_trains_that_one_is_named() -> None:
    Path("fit.py").write_text(LOOP)
    Path("train.py").write_text("import fit\n")
    done = CliRunner().invoke(app, ["init", "--patch", "train.py"])
    assert done.exit_code == 5 and "ratchet init --patch fit.py" in done.stderr, done.stderr
