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
from ratchet_contract.script.unmanaged_script import is_unmanaged
from tests.support.fork_server import RANKS
from tests.support.server import wait_for

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[4] / "examples"
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


PLAIN = sorted([*EXAMPLES.glob("*/plain.py"), *EXAMPLES.glob("*/*_plain.py")])


def behind_the_docstring(text: str) -> str:
    """Logged metrics are an addition to the example."""
    lines = text.split('"""', 2)[2].splitlines(keepends=True)
    return "".join(line for line in lines if "session.log(" not in line)


@pytest.mark.parametrize("plain", PLAIN, ids=lambda path: path.parent.name)
def test_patch_turns_plain_example_into_documented_example(plain: Path) -> None:
    printed = Printed(plain.read_bytes(), plain.name)
    own = "lightning" in plain.parent.name  # starts its ranks itself
    command = plain.name if own else f"torchrun --nproc-per-node 2 {plain.name}"
    assert printed.code == 0 and printed.said == (
        f"next: ratchet init --patch {plain.name} | patch -p0, then: ratchet init {command}, then: "
        f"ratchet prove {plain.stem}.yaml, then: ratchet run {command}\n"
    )
    shown = plain.with_name(plain.name.replace("plain", "train")).read_text()
    assert behind_the_docstring(printed.applied()) == behind_the_docstring(shown)


def test_patch_can_be_applied_by_git() -> None:
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


def test_patched_script_trains_with_same_result(tmp_path: Path) -> None:
    """Group, model, loop and passes are in functions of their own."""
    printed = Printed(FUNCTIONS)
    command, environment = [sys.executable, "train.py"], {**os.environ, "OMP_NUM_THREADS": "1"}
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    said = Path("said")
    for _ in range(5):  # torch's own end of a group aborts or hangs now and then
        with said.open("wb") as log, Path("errors").open("wb") as errors:
            plain = RANKS.start(command, log.fileno(), errors=errors.fileno(), env=environment | alone)
        wait_for(lambda plain=plain: b"\n" in said.read_bytes() or plain.poll() is not None, "the script's line", 100)
        plain.kill()
        if before := said.read_text():
            break
    printed.applied()
    assert not is_unmanaged(Path("train.py").read_bytes())
    done = RANKS.run(command, env=environment)
    assert done.returncode == 0 and before in done.stdout.splitlines(keepends=True), done
    assert (tmp_path / "ratchet-checkpoints").is_dir()


def test_patch_passes_session_to_functions_that_need_one() -> None:
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
def test_patched_script_does_not_read_torchrun_variables(begins: str, model: str, made: str | None) -> None:
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
def test_patch_removes_process_group_guard_with_body(asked: str, left: str) -> None:
    text = changed(f"{LOOP}if {asked}:\n    dist.destroy_process_group()\n")
    assert text.endswith(f"print(model.module.weight.double().sum().item())\n{left}"), text


def test_patch_empties_function_that_set_up_process_group() -> None:
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
def test_patch_reports_remaining_torchrun_variables(read: str, line: int) -> None:
    printed = Printed(LOOP.replace(INIT, read))
    assert printed.code == 0 and printed.diff
    assert f"train.py, line {line}: " in printed.said and "ratchet run set it, and python does not" in printed.said


def test_patch_replaces_device_choice_and_keeps_other_statements() -> None:
    chosen = CHOICE.replace("else:\n", 'else:\n    print("slow")\n')
    text = changed(LOOP.replace(INIT, INIT + READ + chosen))
    assert "local_rank" not in text and '    device = session.device\nelse:\n    print("slow")\n' in text
    elif_ = "if torch.backends.mps.is_available():\n    print()\n    device = 'mps'\nel" + CHOICE
    text = changed(LOOP.replace(INIT, INIT + READ + elif_))
    assert "elif torch.cuda.is_available():" in text


STEPS = """\
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Linear(8, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
count = 0
model = DDP(net)
while True:
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    count += 1

    # the end
    if count >= 12:
        break
print(net.weight.double().sum().item())
"""
BRANCHES = LOOP.replace("model = DDP(nn.Linear(8, 2))\n", """\
model = nn.Linear(8, 2)
if torch.cuda.is_available():
    model = DDP(model.cuda())
else:
    model = DDP(model)
""").replace("DDP(model.cuda())", "DDP(model, device_ids=[0])")  # fmt: skip


def within(head: str, start: str, text: str = LOOP) -> str:
    """``text`` with ``head`` around what begins with ``start``."""
    before, behind = text.split(start)
    return before + head + textwrap.indent(start + behind, "    ")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (LOOP.replace("range(3)", "range(start, 3)"), 15, "it goes over range(start, 3): session.epochs(n)"),
        (STEPS.replace("count = 0", "count = 5"), 13, "it goes over True: session.steps(n)"),
        (STEPS.replace("    count += 1", "    if count == 7: continue\n    count += 1"), 13, "it goes over True"),
        (STEPS.replace("    count += 1", "    count += 2"), 13, "it goes over True: session.steps(n)"),
        (STEPS.replace("torch.randn(4, 8)", "next(batches)"), 12, "no loop over epochs around a loop over batches"),
        (BRANCHES.replace("    model = DDP(model)", "    model = DDP(net)"), 15, "one of 2 calls"),
        (LOOP.replace("model = DDP", "with meta():\n    model = DDP"), 14, "the loop does not stand after it in the same block"),
        (LOOP.replace("range(3)", "range(1, 4)"), 15, "session.epochs(n)"),
        (LOOP.replace("range(3)", "count()"), 15, "it goes over count()"),
        (LOOP.replace("DDP(nn.Linear(8, 2))", "torch.compile(DDP(net))"), 13, "is not what a name is given"),
        (LOOP.replace('dist.init_process_group("gloo")', "prepare_group()"), 13, "init_process_group is not called"),
        (LOOP.replace("in loader:", "in islice(loader, 9):"), 15, "the DataLoader that it goes over is not seen"),
        (LOOP.replace("loader = ", "loaders.train = "), 15, "the DataLoader that it goes over is not seen"),
        (LOOP.replace("optimizer = torch", "if True: optimizer = torch"), 14, "optimizer is made in a block of its own"),
        (within("for fold in range(5):\n", "for epoch in range(3)"), 15, "nested training loops"),
        (LOOP + "for epoch in range(9):\n    for x in loader: x.backward()\n", 22, "one of 2 training loops"),
        ("import torch.multiprocessing as mp\nmp.spawn(f, nprocs=2)\n" + LOOP, 2, "it starts its ranks itself"),
        (within("class Fit:\n  def fit(self):\n", "for epoch in range(3)"), 17, "is made in another function"),
        (within("def fit():\n    fit()\n", "while True", STEPS), 12, "no loop over epochs around a loop over batches"),
    ],
)  # fmt: skip
def test_unpatchable_script_reports_lines_and_has_no_diff(text: str, line: int, said: str) -> None:
    printed = Printed(text)
    assert printed.code == 5 and not printed.diff, printed.diff
    rows = printed.said.splitlines()
    assert any(row.startswith(f"train.py, line {line}: ") and said in row for row in rows), printed.said
    if "init_process_group" in text:
        assert any("session = Session() takes its place" in row for row in rows), printed.said


def test_patch_of_epoch_loop_from_1_keeps_one_based_counter() -> None:
    made = Printed(LOOP.replace("range(3)", "tqdm(range(1, args.epochs + 1))")).applied()
    assert (
        "for epoch in tqdm(session.epochs(args.epochs)):\n    epoch += 1  # they are counted from 0\n    loader" in made
    )
    assert Printed(LOOP.replace("range(3)", "range(1, args.epochs)")).code == 5


FIT = "def fit(model, steps=0):\n    for inputs, labels in loader:\n        model(inputs).sum().backward()\n    return steps\n"
CARRIED = LOOP.replace("for epoch", "best, total, seen, steps = 0.0, None, [], 0\nfor epoch").replace(
    "    for inputs", "    total = 0.0\n    for inputs"
)


@pytest.mark.parametrize(
    ("in_batch", "in_epoch", "line", "said", "code"),
    [
        (
            "best = max(best, loss(inputs))",
            "pass",
            23,
            "best is carried from one iteration to the next, and no checkpoint",
            5,
        ),
        ("steps += 1", "print(steps)", 23, "steps starts from its initial value after a resume; it is only printed", 0),
        ("if steps % 9: steps = 3", "pass", 23, "steps is carried from one iteration to the next", 5),
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
def test_patch_reports_variables_carried_across_iterations(
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


ENDS = "        optimizer.zero_grad()\n"


@pytest.mark.parametrize(
    ("changes", "after", "kept"),
    [
        ("    best = max(best, accuracy(model))\n", "", ["best"]),
        ("    best = max(best, 1)\n    print(f'{best}')\n", "save(best)\n", ["best"]),
        ("    best, steps = max(best, 1), steps + 1\n    if steps > 2: break\n    save(best)\n", "", ["best", "steps"]),
        ("    best = max(best, 1)\n    if best > 2: break\n", "save(best)\n", []),
        ("    best = max(best, 1)\n    if best > 2: continue\n    save(best)\n", "", []),
        ("    best = max(best, 1)\n    for x in y:\n        continue\n    save(best)\n", "", ["best"]),
        ("    seen.append(accuracy(model))\n", "save(seen)\n", ["seen"]),
        ("        seen.append(inputs.sum())\n", "save(seen)\n", ["seen"]),
        ("        best = max(best, 1)\n", "save(best)\n", []),
        ("    best = iter(loader) if best is None else best\n    next(best)\n", "", []),
        ("    optimizer = wrap(optimizer)\n", "", []),
        ("    best = max(best, 1)\n", "def later():\n    return best\nsave(later())\n", ["best"]),
        ("    best = max(best, fit(model))\n", "", ["best"]),
        ("    steps = fit(model, steps)\n", "", []),
        ("    best += fit(model)\n", "", ["best"]),
        ("    best = max(best, 1)\n", "def later():\n    global best\n    best = 2\nsave(best)\n", []),
    ],
)  # fmt: skip
def test_patch_keeps_variables_changed_at_epoch_end_in_session(changes: str, after: str, kept: list[str]) -> None:
    printed = Printed(UNRUNNABLE + (FIT if "fit(" in changes else "") + CARRIED.replace(ENDS, ENDS + changes) + after)
    made = printed.applied()
    assert ("session.keep(" in made, printed.code) == (bool(kept), 0 if kept else 5), printed.said
    if kept:
        listed, held = ", ".join(kept), ", ".join(f"kept.{name}" for name in kept)
        assert (
            f"kept = session.keep({', '.join(f'{name}={name}' for name in kept)})\nfor epoch in session.epochs(3):\n"
            in made
        )
        assert f"(3):\n    {listed} = {held}\n" in made and f"\n    {held} = {listed}\n" in made, made
        assert (f"\n{listed} = {held}\n" in made) == ("save" in after), made


def test_patch_turns_global_used_by_one_function_into_local() -> None:
    """A change of a module's variable is never restored, so that the resume would not be exact."""
    loop = (
        CARRIED.replace(ENDS, ENDS + "    best = max(best, 1)\n    save(best)\n")
        .replace("best, total", "total")
        .replace("0.0, None", "None")
    )
    head, body = loop.split(INIT)
    text = f"{head}best = 0\ndef main():\n    global best\n{textwrap.indent(INIT + body, '    ')}\nmain()\n"
    made = changed(text)
    assert "best = 0\ndef main():\n    best = 0\n    session = Session()" in made and "global" not in made, made
    for other in ("def shown():\n    return best\n", "best += 1\n"):
        printed = Printed(text + other)
        assert printed.code == 5 and "session.keep(best=...) before the loop" in printed.said, printed.said


HELPER = "def helper():\n    best, count = 0, 0\n    return best\n"
IN_EPOCH = "    best = max(best, 1)\n    save(best)\n"
OWN = "class Own:\n    def draw(self):\n        return 1\n\nown = Own()\n"
TRAIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
net = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = DDP(net)

def train(epoch):
    for i in range(9):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HELPER + LOOP.replace(ENDS, ENDS + "    if epoch % 2: best = 1\n    save(best)\n"), "give it a value on every rank"),
        (LOOP.replace("for epoch", "if first: best = 0\nfor epoch").replace(ENDS, ENDS + IN_EPOCH), "give it a value on every"),
        (CARRIED.replace("    total = 0.0\n", "    shuffle(seen)\n").replace(ENDS, ENDS + "    seen.append(1)\n    save(seen)\n"),
         "code before an epoch's batches runs again on a resume"),
        (STEPS.replace("count >= 12", "count >= n").replace("    count +=", "    n = 9\n    count +="), "it goes over True"),
        (STEPS.replace("count >= 12", "count >= len(seen)"), "it goes over True"),
        (STEPS.replace("count >= 12", "count >= a.n").replace("    count +=", "    a.n = 9\n    count +="), "it goes over True"),
        (HELPER + STEPS.replace("count = 0", "count = 1"), "it goes over True"),
        (TRAIN + "for epoch in range(3):\n    train(epoch)\n", "the DataLoader that it goes over is not seen"),
        (TRAIN.replace("range(9)", "batches") + "train(0)\n", "no loop over epochs around a loop over batches"),
        (OWN + STEPS.replace("    model(", "    x = own.draw()\n    model("), "own = session.prepare(own) before the loop"),
        (STEPS.replace("count = 0", "count = 0\ndef draw():\n    return next(batches)").replace("torch.randn(4, 8)", "draw()"),
         "no loop over epochs around a loop over batches"),
        (LOOP.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", "optimizer, scheduler = build(model)"),
         "no optimizer is seen to be made before the loop"),
        (LOOP.replace("    for inputs", "    noise = torch.randn(8)\n    for inputs"), "a resume within an epoch draws other"),
        (LOOP.replace("for epoch", "n = 0\ndef f():\n    global n\n    n += 1\nfor epoch").replace(ENDS, ENDS + "        f()\n"),
         "kept.n wherever a function uses it"),
        (CARRIED.replace(ENDS, ENDS + "        total += inputs.sum()\n    stops(total)\n"), "reset kept.total only if loader"),
        (LOOP.replace("    for inputs", "    random.shuffle(data)\n    for inputs"), "a resume within an epoch draws other"),
        (LOOP.replace("for epoch", "extra = cycle(others)\nfor epoch").replace(ENDS, ENDS + "        next(extra)\n"),
         "extra starts from its beginning after a resume"),
        (LOOP.replace("for epoch", "e = copy.deepcopy(model)\nfor epoch").replace(ENDS, ENDS + "        f(*e.parameters())\n"),
         "e = session.prepare(e.requires_grad_(False)) before the loop"),
        (LOOP.replace("for epoch", "state = Namespace()\nfor epoch").replace(ENDS, ENDS + "    state.best = 1\n"),
         "state = session.prepare(state) before the loop"),
        (LOOP.replace("for epoch", "for s in several: pass\nfor epoch").replace(ENDS, ENDS + "    for s in several: s.step()\n"),
         "s: where training or a file depends on its state, give it to session.prepare before the loop"),
        (BRANCHES.replace("else:\n    model", "if other:\n    model"), "one of 2 calls of DistributedDataParallel"),
    ],
)  # fmt: skip
def test_patch_leaves_changes_that_alter_training_to_user(text: str, said: str) -> None:
    printed = Printed(UNRUNNABLE + text)
    assert printed.code == 5 and said in printed.said, printed.said


def test_patch_reports_stateful_object_used_in_epoch_loop() -> None:
    printed = Printed(OWN + LOOP.replace(ENDS, ENDS + "    if own.draw(): break\n"))
    assert (
        printed.code == 5
        and "own: where training or a file depends on its state, own = session.prepare(own)" in printed.said
    )
    assert f"{ENDS}    if own.draw(): break\nsession.finish()  # the loop may end early\n" in printed.applied()


def test_patch_prepares_generator_used_in_loop() -> None:
    made = "draws = torch.Generator().manual_seed(0)\n"
    text = changed(STEPS.replace("count = 0\n", f"count = 0\n{made}").replace("(4, 8)", "(4, 8, generator=draws)"))
    assert "model, optimizer, draws = session.prepare(net, optimizer, draws)\n" in text, text
    of_data = LOOP.replace("batch_size=4", "batch_size=4, generator=draws").replace("data = ", f"{made}data = ")
    assert "session.prepare(model, optimizer, loader)\n" in changed(of_data)


@pytest.mark.parametrize(
    "use", ["step = partial(f, model)", "ema = {n: p for n, p in model.named_parameters()}", "run = lambda x: model.module(x)",
            "model.load_state_dict(saved)", "model = torch.compile(model)"]
)  # fmt: skip
def test_patch_prepares_model_first_where_used_before_other_objects(use: str) -> None:
    made = changed(LOOP.replace("optimizer = torch", f"{use}\noptimizer = torch"))
    assert f"model = session.prepare(nn.Linear(8, 2))\n{use}\n" in made, made
    assert "optimizer, loader = session.prepare(optimizer, loader)\nfor epoch" in made


def test_patch_prepares_scheduler_returned_by_function() -> None:
    text = LOOP.replace("for epoch", "warm: Any = get_warmup(optimizer)\nfor epoch").replace(
        ENDS, ENDS + "        warm.step()\n"
    )
    assert "model, optimizer, warm, loader = session.prepare(model, optimizer, warm, loader)\n" in changed(text)


def test_patch_reports_missing_set_epoch() -> None:
    printed = Printed(LOOP.replace("    loader.sampler.set_epoch(epoch)\n", ""))
    assert printed.code == 0 and "without set_epoch all epochs had one order" in printed.said


def test_patch_inserts_session_import_before_first_use() -> None:
    text = changed(LOOP.replace("torch.manual_seed(0)", "import sys\nprint(sys.argv)"))
    assert text.index("from ratchet import Session") < text.index("session = Session()")


def test_patch_leaves_append_before_epoch_batches_to_user() -> None:
    """A resume within the epoch does that once more."""
    printed = Printed(CARRIED.replace("    total = 0.0\n", "    seen.append(epoch)\n") + "print(sum(seen), file=out)\n")
    assert printed.code == 5 and "code before an epoch's batches runs again on a resume" in printed.said, printed.said


def test_patch_removes_ddp_from_all_branches() -> None:
    printed = Printed(BRANCHES)
    made = printed.applied()
    assert printed.code == 0 and "DDP" not in made and "model, optimizer, loader = session.prepare(model, " in made, (
        made
    )
    assert "model is now wrapped in DDP in a run of one process, too" in printed.said


def test_patch_moves_session_out_of_distributed_condition() -> None:
    group = f"ddp = 'RANK' in os.environ\nif ddp:\n    {INIT}    rank = int(os.environ['RANK'])\n    print(rank)\n"
    text = LOOP.replace(INIT, group)
    text = text.replace("model = DDP(nn.Linear(8, 2))\n", "model = nn.Linear(8, 2)\nif ddp:\n    model = DDP(model)\n")
    text = text.replace("for epoch", "raw = model.module if ddp else model\nfor epoch")
    made = changed(text)
    assert "\nsession = Session()  # starts the process group\nif ddp:\n    rank = session.rank\n" in made, made
    assert (
        "model = nn.Linear(8, 2)\noptimizer = " in made
        and "prepare(model, optimizer, loader)\nraw = model.module\nfor" in made
    )


def test_patch_replaces_start_epoch_with_session_epochs() -> None:
    option = "args = parser.add_argument('--start-epoch', default=0)\n"
    printed = Printed(option + LOOP.replace("range(3)", "range(args.start_epoch, 3)"))
    assert (
        printed.code == 0
        and "it began at args.start_epoch; session.epochs begins at the last checkpoint" in printed.said
    )
    assert "for epoch in session.epochs(3):\n" in printed.applied()


@pytest.mark.parametrize(
    ("head", "test", "made"),
    [
        ("while True:", "    if count >= 12:\n        break\n", "for count in session.steps(12):\n"),
        ("while 1:", "    if count > args.last:\n        break\n", "for count in session.steps(args.last + 1):\n"),
        ("while count < 12:", "", "for count in session.steps(12):\n"),
        ("while (count <= 2 * 6):  # all", "", "for count in session.steps((2 * 6) + 1):  # all\n"),
        ("while (count < 12  # all: of them\n):", "", "for count in session.steps(12):\n"),
        ("for count in range(12):", "", "for count in session.steps(12):\n"),
    ],
)
def test_patch_turns_batch_drawing_loop_into_session_steps(head: str, test: str, made: str) -> None:
    text = STEPS.replace("while True:", head).replace("    # the end\n    if count >= 12:\n        break\n", test)
    text = text.replace("    count += 1\n", "") if head.startswith("for") else text
    text = changed(text)
    assert made in text and "break" not in text and "the end" not in text, text
    assert "model, optimizer = session.prepare(net, optimizer)\n" in text


def test_patch_sets_loop_counter_for_loop_with_no_iterations_left() -> None:
    counts = changed(STEPS.replace("    count += 1\n", "    count += 1\n    print(count)\n") + "print(count)\n")
    assert "\ncount = 12  # where none is left to do\nfor count in session.steps(12):\n" in counts, counts
    epochs = changed(LOOP + "print(epoch)\n")
    assert "\nepoch = 3 - 1  # where none is left to do\nfor epoch in session.epochs(3):\n" in epochs, epochs
    left = Printed(LOOP.replace("    for inputs", "    if ended(): break\n    for inputs") + "print(epoch)\n")
    assert left.code == 5 and "epoch is read after the loop, which has no iteration if none is left" in left.said


@pytest.mark.parametrize(
    ("total", "last"),
    [
        ("args.epochs or 10", "(args.epochs or 10) - 1"),
        ("3 if quick else 90", "(3 if quick else 90) - 1"),
        ("count() << 1", "(count() << 1) - 1"),
        ('config["epochs"]', 'config["epochs"] - 1'),
        ("len(args.epochs)", "len(args.epochs) - 1"),
    ],
)
def test_patch_computes_last_epoch_from_whole_total(total: str, last: str) -> None:
    text = changed(LOOP.replace("range(3)", f"range({total})") + "print(epoch)\n")
    assert f"\nepoch = {last}  # where none is left to do\nfor epoch in session.epochs({total}):\n" in text, text


def test_patch_computes_last_epoch_before_loop_that_changes_its_total() -> None:
    text = changed(LOOP.replace("range(3):\n", "range(count):\n    count = 5\n") + "print(epoch)\n")
    assert "\nepoch = count - 1  # where none is left to do\nfor epoch in session.epochs(count):\n" in text, text


@pytest.mark.parametrize(
    ("head", "begin"), [("range(3)", "    epoch += 1\n"), ("range(epoch)", ""), ("tqdm(range(3), initial=epoch)", "")]
)
def test_patch_leaves_last_epoch_to_user_where_loop_uses_its_variable_otherwise(head: str, begin: str) -> None:
    text = LOOP.replace("range(3):\n", f"{head}:\n{begin}") + "print(epoch)\n"
    printed = Printed(text.replace("for epoch", "epoch = 3\nfor epoch"))
    assert printed.code == 5 and "epoch is read after the loop, which has no iteration if none is left" in printed.said


def test_patch_prepares_optimizer_returned_by_function() -> None:
    text = changed(STEPS.replace("torch.optim.SGD(net.parameters(), lr=0.1)", "net.configure_optimizers(0.1)"))
    assert "model, optimizer = session.prepare(net, optimizer)\n" in text


@pytest.mark.parametrize(
    "use", ["'cuda' in device", "device.startswith('cuda')", "model.to(device)", "model.to(device.index)"]
)
def test_patch_keeps_device_used_as_string_a_string(use: str) -> None:
    text = changed(LOOP.replace(INIT, INIT + READ + f"device = f'cuda:{{local_rank}}'\nprint({use})\n"))
    assert ("device = str(session.device)\n" in text) == ("model" not in use) and "session.device" in text
    assert "device = 'cuda'\n" in changed(LOOP.replace(INIT, INIT + "device = 'cuda'\n"))


def test_patch_reports_variables_carried_in_batch_loop_of_function() -> None:
    text = FUNCTIONS.replace("    for step, (", "    running = 0.0\n    for step, (").replace(
        "        optimizer.step()\n", "        optimizer.step()\n        running = 0.9 * running + model.loss\n"
    )
    printed = Printed(text)
    assert printed.code == 0 and printed.diff, printed.said
    (told,) = [row for row in printed.said.splitlines() if "train.py, line" in row]
    assert "line 16: running starts from its initial value where a resume continues within an epoch" in told, told


def test_patch_of_patched_script_reports_carried_variables() -> None:
    text = CARRIED.replace(
        "        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n        best = max(best, 1)\n"
    )
    again = Printed(Printed(UNRUNNABLE + text).applied())
    assert again.code == 5 and not again.diff and "already uses Ratchet\n" in again.said
    assert "best is carried from one iteration to the next, and no checkpoint contains it" in again.said, again.said


def test_patch_adds_variables_to_existing_keep_instead_of_second_one() -> None:
    body = f"{ENDS}        total = total + 1\n        seen.append(total)\n    best = max(best, 1)\n    save(best, total, seen)\n"
    text = CARRIED.replace("    total = 0.0\n", "").replace(
        "total, seen, steps = 0.0, None", "total, seen, steps = 0.0, 0"
    )
    printed = Printed(text.replace(ENDS, body))
    assert printed.code == 5 and " = session.keep(total" not in printed.said, printed.said
    added = "add total=... to the line `kept = session.keep(best=best, seen=seen)` of this patch, and kept.total where"
    assert added in printed.said, printed.said
    held = text.replace("for epoch", "held = session.keep(a=a)\nfor epoch")
    held = held.replace('dist.init_process_group("gloo")', "from ratchet import Session\nsession = Session()").replace(
        ENDS, body
    )
    line = held.splitlines().index("held = session.keep(a=a)") + 1
    again = Printed(held)
    assert f"add total=... to the session.keep(...) in line {line}, and held.total " in again.said, again.said
    assert f"add best=... to the session.keep(...) in line {line}, and held.best " in again.said, again.said
    assert "kept" not in again.said, again.said
    alone = Printed(held.replace("held = session.keep(a=a)\n", ""))
    (first, *more) = re.findall(r"kept = session\.keep\(.*?\)", alone.said)
    assert "best=..., " in first and {*more} == {first}, alone.said


@pytest.mark.parametrize(
    ("line", "is_known"),
    [
        ("", False), ("own = session.prepare(own)\n", True), ("session.register(own=own)\n", True),
        ("kept = session.keep(own=own)\n", True), ("if session.checkpoint(): pass\n", False),
    ],
)  # fmt: skip
def test_patch_of_patched_script_reports_objects_that_session_lacks(line: str, is_known: bool) -> None:
    first = Printed(OWN + LOOP.replace(ENDS, ENDS + "    if own.draw(): pass\n"))
    text = first.applied().replace("for epoch", f"{line}for epoch")
    again = Printed(text.replace(ENDS, f"{ENDS}    if session.checkpoint(): pass\n"))
    (cure,) = [row.partition(": ")[2].partition(" (line")[0] for row in first.said.splitlines() if " own: " in row]
    assert again.code == 0 and (cure in again.said) is not is_known, again.said
    assert ("no change is needed" in again.said) is is_known and "session:" not in again.said, again.said


@pytest.mark.parametrize("folder", ["reference", "user_project", "adoption/2_session", "image_loop", "trainer_clm"])
def test_patch_of_examples_with_session_needs_no_change(folder: str) -> None:
    printed = Printed((EXAMPLES / folder / "train.py").read_text())
    assert (printed.code, printed.said) == (0, "train.py already uses Ratchet: no change is needed\n")


def test_patch_of_example_with_steps_reports_only_objects_that_session_lacks() -> None:
    text = (EXAMPLES / "token_loop" / "train.py").read_text()
    assert Printed(text).said == "train.py already uses Ratchet: no change is needed\n"
    text = text.replace("    best = math.inf\n", "    best = math.inf\n    own = Own()\n")
    text = text.replace("        optimizer.step()\n", "        optimizer.step()\n        own.draw()\n")
    again = Printed(text.replace("def main(", "class Own: ...\ndef main("))
    assert again.code == 0 and "own = session.prepare(own) before the loop" in again.said, again.said
    assert again.said.count("train.py, line") == 1, again.said


def test_patch_of_script_with_session_names_no_objects_that_hold_no_state_of_training() -> None:
    """A loop over prepared optimizers, a loss of a class of the file, objects of packages."""
    text = (EXAMPLES / "token_loop" / "train.py").read_text()
    text = text.replace("    best = math.inf\n", "    best = math.inf\n    loss_of, cut = Loss(), re.compile('x')\n")
    text = text.replace(
        "        optimizer.step()\n",
        "        for one in (optimizer,):\n            one.step()\n        a = loss_of(x), cut.match('')\n",
    )
    again = Printed("import re\n" + text.replace("def main(", "class Loss(nn.CrossEntropyLoss): ...\ndef main("))
    assert again.said == "train.py already uses Ratchet: no change is needed\n"


def test_patch_reports_ddp_settings_and_hooks_to_move_to_spec() -> None:
    text = LOOP.replace(
        "Linear(8, 2))", "Linear(8, 2), find_unused_parameters=True, device_ids=[0])\nmodel.register_comm_hook(s, h)"
    )
    printed = Printed(text)
    assert printed.code == 5 and "these places are left to you" in printed.said
    assert (
        "train.py, line 13: find_unused_parameters=True goes into the spec: ddp: {find_unused_parameters: ...}"
        in printed.said
    )
    assert "train.py, line 14: removed: the hook of a job is set in the spec" in printed.said
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
def test_patch_leaves_unrelated_text_unchanged(old: str, new: str) -> None:
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
def test_patch_adds_session_strategy_to_lightning_trainer(imported: str, name: str, given: str, made: str) -> None:
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
def test_patch_replaces_transformers_trainer_import(imported: str, line: str, before: str, behind: str) -> None:
    assert changed(imported + before) == f"{imported}\nfrom ratchet.transformers import {line}\n{behind}"


def test_patch_replaces_trainer_import_inside_function() -> None:
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


def test_patch_replaces_accelerator_and_uses_accelerator_epochs() -> None:
    made = changed(ACCELERATE)
    assert "\nfrom accelerate import DataLoaderConfiguration\n\nfrom ratchet.accelerate import Accelerator\n" in made
    assert "    for epoch in accelerator.epochs(count):\n" in made
    loop = "{0}\nfor e in {1}:\n  for b in l:\n    a.backward(b)\n"
    alone = changed("import accelerate\n" + loop.format("a = accelerate.Accelerator()", "range(9)"))
    assert alone == "\nfrom ratchet.accelerate import Accelerator\n" + loop.format("a = Accelerator()", "a.epochs(9)")
    choice = "a = Accelerator(log_with=t) if t else Accelerator()"
    chosen = changed("from accelerate import Accelerator\n" + loop.format(choice, "range(n)"))
    assert chosen == "\nfrom ratchet.accelerate import Accelerator\n" + loop.format(choice, "a.epochs(n)")


def test_patch_with_accelerator_sets_epoch_for_loop_with_no_epochs_left() -> None:
    made = changed(ACCELERATE.replace("step()\n", "step()\n    print(epoch)\n"))
    assert "\n    epoch = count - 1  # where none is left to do\n    for epoch in accelerator.epochs(count):\n" in made
    left = Printed(ACCELERATE.replace("step()\n", "step()\n        if ended(): break\n    print(epoch)\n"))
    assert left.code == 5 and "epoch is read after the loop, which has no iteration if none is left" in left.said


def test_patch_with_accelerator_reports_unprepared_user_object() -> None:
    made = "    optimizer = accelerator.prepare(optimizer)\n    own = Own()\n"
    text = ACCELERATE.replace("    for epoch", f"{made}    for epoch")
    printed = Printed(
        "class Own: pass\n" + text.replace("optimizer.step()\n", "optimizer.step()\n        own.hit(1)\n")
    )
    assert printed.code == 5 and "own = accelerator.session.prepare(own) before the loop" in printed.said, printed.said
    assert "optimizer: " not in printed.said


def test_patch_uses_accelerator_epochs_across_methods_of_class() -> None:
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
def test_patch_recognises_loop_over_alias_of_loader(over: str, line: int | None) -> None:
    printed = Printed(passing(over))
    told = [row for row in printed.said.splitlines() if ", line " in row]
    hint = f"train.py, line {line}: its count begins at 0 if a resume continues within an epoch: tqdm(batches, initial=batches."
    assert printed.code == 0 and [row.startswith(hint) for row in told] == [True] * (line is not None), printed.said
    assert "model, optimizer, loader = session.prepare(model, optimizer, loader)" in printed.applied()


def test_patch_reports_line_numbers_of_original_and_patched_file() -> None:
    loop = "for epoch in range(3):\n"
    printed = Printed(LOOP.replace(loop, f"best = 0\n{loop}    best = max(best, epoch)\n"))
    (row,) = [row for row in printed.said.splitlines() if ", line " in row]
    (before,), (after,) = (
        re.findall(pattern, row) for pattern in (r", line (\d+): ", r"line (\d+) of the changed file")
    )
    lines = printed.path.read_text().splitlines(), printed.applied().splitlines()
    assert before != after and lines[0][int(before) - 1] == lines[1][int(after) - 1] != ""


def test_patch_reports_loader_alias_created_before_prepare() -> None:
    printed = Printed(LOOP.replace("for epoch", "again = loader\nfor epoch").replace("in loader:", "in again:"))
    assert printed.code == 5 and "train.py, line 15: again is set from the loader before the loop" in printed.said
    assert "model, optimizer, loader = session.prepare(model, optimizer, loader)" in printed.applied()


def test_patch_reports_enumerate_around_progress_bar() -> None:
    for body, code in (("print(step)", 5), ("pass", 0)):
        bar = f"    for step, (inputs, labels) in enumerate(tqdm(batches)):\n        {body}\n"
        printed = Printed(passing(bar))
        assert printed.code == code and "line 12: enumerate around a progress bar counts from 0" in printed.said


def test_patch_without_diff_still_reports_carried_variables() -> None:
    printed = Printed(
        CARRIED.replace("range(3)", "count()").replace("    total =", "    best = max(best, 1)\n    total =")
    )
    assert printed.code == 5 and not printed.diff and "best is carried from one iteration to the next" in printed.said


def test_patch_does_not_report_counters_of_evaluation_loop() -> None:
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
        ("import lightning as L\na, b = L.Trainer(), L.Trainer()\na.fit(m, ckpt_path='a')\n", 3, "ckpt_path of fit is"),
        (
            "from lightning.pytorch import Trainer, cli\nTrainer()\nTrainer()\ncli.LightningCLI()\n",
            4,
            "LightningCLI makes its Trainer",
        ),
        (
            'import lightning as L\nL.Trainer(strategy="ddp_find_unused_parameters_true")\n',
            2,
            "find_unused_parameters: true",
        ),
        ("import pytorch_lightning as pl\npl.Trainer()\n", 2, "pytorch_lightning is the package from before"),
        ("from trl import SFTTrainer\nSFTTrainer(m).train()\n", 2, "class Mine(Trainer, SFTTrainer): pass"),
        (ACCELERATE.replace("range(count)", "range(begun, count)"), 6, "it goes over range(begun, count)"),
        (ACCELERATE.replace("def train(accelerator,", "def train(a,"), 6, "accelerator is not defined in its function"),
        (ACCELERATE + "    accelerator.load_state()\n", 14, "load_state: a job resumes automatically"),
        ("from accelerate import Accelerator\na = Accelerator()\n", 2, "no loop over epochs"),
        ("from accelerate import Accelerator\nf(Accelerator())\na.load_state()\n", 3, "load_state: a job resumes"),
        ("from lightning.pytorch.cli import LightningCLI\nLightningCLI(Net)\n", 2, "--trainer.strategy ratchet"),
    ],
)
def test_patch_lists_places_left_to_user_by_line(text: str, line: int, said: str) -> None:
    printed = Printed(text)
    rows = printed.said.splitlines()
    assert printed.code == 5 and "these places are left to you" in rows[-1]
    assert any(row.startswith(f"train.py, line {line}: ") and said in row for row in rows), printed.said


def test_patch_says_nothing_of_ckpt_path_in_script_without_lightning() -> None:
    printed = Printed(LOOP + "mine.fit(model, ckpt_path='a')\n")
    assert printed.code == 0 and "ckpt_path" not in printed.said


def test_patch_changes_only_the_trainer_that_calls_fit() -> None:
    made = changed("import lightning as L\na, b = 1, L.Trainer()\nc = L.Trainer()\nc.fit(m)\nb.test(m)\n")
    assert "b = 1, L.Trainer()" in made and "c = L.Trainer(strategy=SessionStrategy())" in made


def test_patch_refuses_non_scripts_and_unknown_scripts() -> None:
    assert "jupyter nbconvert" in Printed("{}", "a.ipynb").said
    Path("a.ipynb").unlink()
    assert "line 1 is not valid Python" in Printed("def f(:\n").said
    unknown = Printed("import torch\n")
    assert (
        unknown.code == 5 and not unknown.diff and "docs/adoption.md has the change for other scripts" in unknown.said
    )
    managed = Printed("from ratchet import Session\nwith Session() as s: ...\n")
    assert managed.code == 0 and not managed.diff and "no change is needed" in managed.said
    Path("below").mkdir()
    done = CliRunner().invoke(app, ["init", "--patch", "--print", "train.py"])
    assert done.exit_code == 5 and "leave out the other options" in done.stderr
    os.chdir("below")
    above = CliRunner().invoke(app, ["init", "--patch", "../train.py"])
    assert above.exit_code == 5 and "first" in above.stderr and not above.stdout


def test_patch_names_imported_module_that_contains_training_loop() -> None:
    Path("fit.py").write_text(LOOP)
    Path("train.py").write_text("import fit\n")
    done = CliRunner().invoke(app, ["init", "--patch", "train.py"])
    assert done.exit_code == 5 and "ratchet init --patch fit.py" in done.stderr, done.stderr


def test_patch_names_calls_of_loggers_that_would_write_repeated_steps_twice() -> None:
    text = "from torch.utils.tensorboard import SummaryWriter\n" + LOOP + "w = SummaryWriter('runs/a')\n"
    line = text.count("\n")
    printed = Printed(text)
    assert f"SummaryWriter in train.py, line {line}: TensorBoard would show repeated steps twice" in printed.said
    assert printed.code == 0, "the weights do not depend on it"
    again = Printed(printed.applied())
    assert "already uses Ratchet\n" in again.said and "session.summary_writer()" in again.said and again.code == 0
