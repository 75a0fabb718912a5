"""What ``ratchet init`` reads in a script, and what it makes of it. The scripts are never run: each would end the test."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ratchet_client.init import advice, project, render_yaml
from ratchet_client.init.command_line import parse_command
from ratchet_client.init.proposal import propose
from ratchet_client.init.read_script import read_script
from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.spec.parse import load_spec_text, parse_spec
from ratchet_hooks.specs.registry import HOOKS, HookEntry

EXAMPLES = Path(__file__).parents[4] / "examples"
UNRUNNABLE = "raise SystemExit('a script that is read must not be run')\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "train.py") -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(UNRUNNABLE + textwrap.dedent(text))


def look(line: str = "train.py", code: str | None = None) -> tuple[dict[str, Any], dict[str, str], str]:
    """The spec of the rendered file, the notes by code, and its text."""
    command = parse_command(line.split(), {})
    place = project.locate(command.script, Path(code) if code else None)
    facts = read_script(place.script, place.code)
    way = advice.run_mode(facts, place)
    notes = advice.notes(command, facts, place, None)
    spec = render_yaml.make_spec(command, facts, place, way, name=None)
    text = render_yaml.render(
        spec, notes, facts, place, way, command=command, typed=line, file="train.yaml", base=Path.cwd(), python=None
    )
    return load_spec_text(text), {note.code: note.text for note in notes}, text


PLAIN = """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powerSGD
    OUT = "out/model.pt"
    def main(args):
        dist.init_process_group("gloo")
        model = DDP(torch.nn.Linear(2, 2))
        state = powerSGD.PowerSGDState(None, 4, start_powerSGD_iter=args.start, warm_start=False)
        model.register_comm_hook(state, powerSGD.powerSGD_hook)
        torch.save(model.state_dict(), OUT)
        open("log.txt", "a").write("x")
"""


def test_init_of_script_with_own_hook_writes_spec_and_notes() -> None:
    write(PLAIN)
    spec, notes, text = look("torchrun --nproc-per-node 2 --max-restarts 4 train.py --lr 0.1 --name é")
    assert spec["script"] == ["train.py", "--lr", "0.1", "--name", "é"] and spec["policy"] == {"max_failures": 4}
    assert spec["world"] == {"ranks_per_node": 2, "device": "cpu"}, "it names gloo, and needs no GPU"
    assert "hook" not in spec and "lost at each restart" in notes["hook-state"] and "line 11" in notes["hook-state"]
    assert "# hook: {name: powerSGD, matrix_approximation_rank: 4, warm_start: false}" in text
    assert notes["hook-parameter"].startswith("start_powerSGD_iter of powerSGD_hook is args.start in train.py, line 11")
    assert '"out/model.pt" (train.py, line 12)' in notes["saves"] and '"log.txt", "out/model.pt"' in notes["writes"]
    assert '"unmanaged"' in notes["unmanaged"]


def test_init_spec_is_valid_with_each_commented_key_enabled() -> None:
    write(PLAIN)
    for line in ("train.py", "torchrun --standalone --nproc-per-node 3 -r 3 train.py --a b:c #x {y}"):
        spec, _, text = look(line)
        parse_spec(spec)
        assert max(map(len, text.splitlines())) <= 120
        for off in ("python", "env", "hook", "policy"):
            (found,) = [row for row in text.splitlines() if row.startswith(f"# {off}: ")]
            parse_spec(spec | load_spec_text(found.removeprefix("# ")))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("model.register_comm_hook(None, default_hooks.fp16_compress_hook)", "keeps no state"),
        ("model.register_comm_hook(state=s, hook=my_hook)", "a hook of your own: my_hook"),
        ("register_ddp_comm_hook(DDPCommHookType.POWER_SGD_RANK2, model, s)", "powerSGD_hook is registered"),
        (
            "model.register_comm_hook(s, fp16_compress_wrapper(powerSGD_hook))",
            r"fp16_compress_wrapper\(powerSGD_hook\)",
        ),
    ],
)
def test_init_notes_name_other_hooks_of_script(call: str, said: str) -> None:
    write(call)
    _, notes, _ = look()
    assert any(said.replace("\\", "") in notes.get(code, "") for code in ("hook", "hook-state")), notes


def test_init_of_session_script_moves_hook_to_spec() -> None:
    write("""
        from ratchet_worker.session import Session
        dist.init_process_group("nccl")
        with Session() as s:
            model.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=9), powerSGD_hook)
    """)
    spec, notes, _ = look()
    assert spec["hook"] == {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 9}
    assert "remove that line" in notes["hook"] and "remove init_process_group" in notes["backend"]
    assert "session" in notes and "saves-nothing" not in notes and spec["world"]["device"] == "cuda"


MANAGED = """
    from ratchet_hooks.specs import *
    from ratchet_worker.session import Session
    with Session() as s:
        model, hook = managed_ddp(net, {})
"""


@pytest.mark.parametrize("entry", HOOKS.values(), ids=lambda entry: entry.name)
def test_init_moves_every_spec_of_managed_ddp_to_spec(entry: HookEntry) -> None:
    given = {"hook": "hooks:mine"} if entry.name == "custom" else {}
    write(MANAGED.format(f"{entry.spec.__name__}({''.join(f'{k}={v!r}' for k, v in given.items())})"))
    spec, notes, _ = look()
    assert spec["hook"] == {"name": entry.name, **given} and "remove that line" in notes["hook"]
    assert parse_spec(spec).hook.name == entry.name


def test_init_moves_spec_with_parameters_and_spec_given_by_keyword() -> None:
    write(MANAGED.format("spec=BatchedPowerSGDSpec(matrix_approximation_rank=2)"))
    assert look()[0]["hook"] == {"name": "batched_powerSGD", "matrix_approximation_rank": 2}


@pytest.mark.parametrize("given", ["OwnSpec(rank=2)", "make_spec()", "noop"])
def test_init_reports_unknown_spec_and_writes_no_hook(given: str) -> None:
    write(MANAGED.format(given))
    spec, notes, _ = look()
    assert "hook" not in spec and f"the spec {given}" in notes["hook"] and "set `hook` in the spec" in notes["hook"]


def test_init_of_task_script_maps_options_to_constructor_arguments() -> None:
    write("""
        import ratchet_worker.task
        class Net:
            def __init__(self, lr: float = 0.1, steps: int = 3, wide: bool = False): ...
            def build(self, ctx): ...
            def loss(self, model, batch): ...
    """)
    spec, _, _ = look("--nproc-per-node 2 train.py --lr=0.5 --steps 7 --wide")
    assert spec["task"] == {"entrypoint": "train:Net", "args": {"lr": 0.5, "steps": 7, "wide": True}}
    with pytest.raises(Refused, match=r"Net takes no argument --widht; its constructor has: lr, steps, wide"):
        look("train.py --widht 3")


def test_init_notes_missing_modules_arguments_and_unsafe_calls() -> None:
    write("""
        import argparse, nowhere_to_be_found, helper
        try:
            import optional_thing
        except ImportError: ...
        if args.board:
            import a_tracker, nowhere_to_be_found
        parser = argparse.ArgumentParser()
        parser.add_argument("--data", required=True)
        parser.add_argument("--local-rank", type=int)
        model.to("cuda:0"); model.cuda()
        mp.spawn(main, nprocs=4)
        table = np.loadtxt("data/table.csv")
        metric = evaluate.load("glue", "mrpc")
    """)
    write("import also_missing\n", "helper.py")
    _, notes, text = look("train.py --batch 3")
    assert "--data" in notes["argument-missing"] and "LOCAL_RANK" in notes["local-rank"]
    assert "same GPU" in notes["device"] and "its rank's own" in notes["cuda"] and "mp.spawn" in notes["spawn"]
    assert "also_missing, nowhere_to_be_found:" in notes["module-missing"] and "optional" not in text
    assert "no module a_tracker, imported within a function or a condition" in notes["module-perhaps-missing"]
    assert "data/table.csv" in notes["reads"] and "glue" not in text and "first step" in notes["saves-nothing"]
    assert "environment:" not in notes["module-missing"]
    write("nowhere-to-be-found\n", "requirements.txt")
    _, notes, _ = look("train.py --batch 3")
    assert "environment: {requirements: requirements.txt} in the spec" in notes["module-missing"]
    assert "# ! " in text
    assert "argument-missing" not in look("train.py --data=x")[1]


@pytest.mark.parametrize(
    ("arguments", "lacking"),
    [
        ("--data=x -n 3", []),
        ("--da x -n3", []),  # as argparse takes an abbreviation, and a value behind a short option
        ("--epochs 3", ["--data", "-n"]),
        ("more -- --data x -n 3", ["--data", "-n"]),  # behind -- there are no options
        ("more --", ["--data", "-n"]),
        ("- more", ["--data", "-n"]),
    ],
)
def test_init_notes_required_options_that_the_command_lacks(arguments: str, lacking: list[str]) -> None:
    write("""
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--data", required=True)
        parser.add_argument("-n", required=True)
    """)
    note = look(f"train.py {arguments}")[1].get("argument-missing")
    assert note == (f"the script needs {', '.join(lacking)}, which is not among its arguments: add it after the script"
                    if lacking else None)  # fmt: skip


def test_init_of_script_in_subdirectory_suggests_code_option() -> None:
    write("import sibling", "pkg/train.py")
    write("", "pkg/sibling.py")
    write("", "conf.yaml")
    spec, notes, _ = look("pkg/train.py --config conf.yaml")
    assert spec["code"] == {"path": "./pkg"} and spec["script"][0] == "train.py"
    assert "give --code ." in notes["argument-path"] and "module-missing" not in notes
    spec, notes, _ = look("pkg/train.py --config conf.yaml", code=".")
    assert spec["code"] == {"path": "."} and spec["script"][0] == "pkg/train.py" and "argument-path" not in notes
    Path("elsewhere").mkdir()
    with pytest.raises(Refused, match="not below --code"):
        look("pkg/train.py", code="elsewhere")


def test_init_does_not_guess_reassigned_names() -> None:
    write("""
        def save(out, model):
            out = out / "step"
            torch.save(model, out / "a.pt")
        name = "x.pt"
        name = make(name)
        torch.save(model, name)
    """)
    _, notes, _ = look()
    assert "a path computed at run time" in notes["saves"] and "writes" not in notes
    write("""
        state = PowerSGDState(None, 1) if small else make_state()
        model.register_comm_hook(state, powerSGD_hook)
    """)
    assert look()[1]["hook-parameter"].startswith("the state of powerSGD_hook is PowerSGDState(None, 1) if small else")


def test_init_finds_session_in_imported_module() -> None:
    write("import lib.loop")
    write("from ratchet_worker.session import Session\nwith Session() as s: ...\n", "lib/loop.py")
    _, notes, _ = look()
    assert "lib/loop.py, line 3" in notes["session"] and "lib/loop.py" in notes["session-elsewhere"]


@pytest.mark.parametrize(
    ("first", "second", "made"),
    [
        ("from .loop import fit", "", "loop.py"),
        ("from . import loop", "from .sub.deep import fit", "sub/deep.py"),
        ("from .sub import deep", "", "sub/deep.py"),
        ("from .sub import deep", "from ..loop import fit", "loop.py"),
    ],
)
def test_init_finds_session_in_relatively_imported_module(first: str, second: str, made: str) -> None:
    write("from pkg import fit\nfrom ..... import beyond")
    write(first, "pkg/__init__.py")
    for file in ("loop.py", "sub/deep.py"):
        write(second, f"pkg/{file}")
    write("from ratchet_worker.session import Session\nwith Session() as s: ...\n", f"pkg/{made}")
    _, notes, _ = look()
    assert f"pkg/{made}, line 3" in notes["session"] and "unmanaged" not in notes


def test_init_reads_package_and_not_module_of_same_name() -> None:
    write("import a")
    write("from ratchet_worker.session import Session\nwith Session() as s: ...\n", "a/__init__.py")
    write("", "a.py")
    assert "a/__init__.py, line 3" in look()[1]["session"]


def test_init_notes_modules_that_were_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    write("import a, b")
    write("import a", "a.py")
    write("import a", "b.py")
    assert "files-left-out" not in look()[1]
    monkeypatch.setattr("ratchet_client.init.read_script._MAX_FILES", 2)
    assert "read only 2 files of the script and its modules" in look()[1]["files-left-out"]


@pytest.mark.parametrize("text", ['print "of Python 2"', f"x = '{'x' * (2 << 20)}'", "x = " + "(" * 5000])
@pytest.mark.parametrize(
    ("first", "name", "serious"),
    [("import pkg", "pkg/odd.py", False), ("import pkg.odd", "pkg/odd.py", False), ("import odd", "odd.py", True)],
)
def test_init_leaves_out_modules_that_cannot_be_read(text: str, first: str, name: str, serious: bool) -> None:
    write(first)
    write("try:\n    from . import odd\nexcept SyntaxError: ...\nfrom . import fine", "pkg/__init__.py")
    write("x.cuda()", "pkg/fine.py")
    write(text, name)
    facts = read_script(Path("train.py").resolve(), Path.cwd())
    assert facts.is_partial and (serious or facts.cuda)
    place = project.locate("train.py", None)
    notes = advice.notes(parse_command(["train.py"], {}), facts, place, None)
    assert [note.serious for note in notes if note.code == "files-left-out"] == [serious]


def test_init_reads_few_files_of_package_beside_script_with_session() -> None:
    made = "from ratchet_worker.session import Session\nwith Session() as s: ...\n"
    write("".join(f"from . import m{n}\n" for n in range(100)), "big/__init__.py")
    for n in range(100):
        write("", f"big/m{n}.py")
    write(f"import big, own\n{made}")
    write("", "own.py")
    assert sorted(file.name for file in read_script(Path("train.py").resolve(), Path.cwd()).files) == [
        "__init__.py", "own.py", "train.py",
    ]  # fmt: skip
    write("import big, own")
    facts = read_script(Path("train.py").resolve(), Path.cwd())
    assert facts.is_partial and not facts.lacks_own and len(facts.files) == 60


def test_init_notes_large_directories_included_in_snapshot(tmp_path: Path) -> None:
    write("")
    for name in ("dataset/a.bin", ".git/objects.bin", "env/pyvenv.cfg", "env/lib.bin"):
        Path(name).parent.mkdir(exist_ok=True)
        with Path(name).open("wb") as file:
            file.truncate(150 * 10**6)  # sparse
    _, notes, _ = look()
    assert "dataset/ 150 MB" in notes["large"] and "git" not in notes["large"] and "env/" not in notes["large"]


def test_init_notes_directories_with_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "MANY", 40)
    write("")
    Path("images").mkdir()
    for number in range(45):
        Path(f"images/{number}.png").touch()
    _, notes, _ = look()
    assert "46 files (images/ 45 files)" in notes["large"]


def test_init_refuses_files_that_are_not_python_scripts() -> None:
    for name, error, said in (
        ("train.sh", Refused, "the command that it starts"), ("train.ipynb", Refused, "nbconvert"),
        ("gone.py", NotFound, "no such file: gone.py"), (".", Refused, "is a directory"),
    ):  # fmt: skip
        if name.startswith("train"):
            Path(name).touch()
        with pytest.raises(error, match=said):
            project.locate(name, None)
    for number, text in enumerate((f"x = {'+'.join(['1'] * 20_000)}\n", f"if x{'.a' * 3000}: pass\n", "#" * (3 << 20))):
        Path(f"deep{number}.py").write_text(text)
        with pytest.raises(Refused, match="to be read"):
            look(f"deep{number}.py")
    Path("broken.py").write_text("x = (\n")
    with pytest.raises(Refused, match=r"broken\.py, line 1 is not valid Python"):
        look("broken.py")


@pytest.mark.parametrize(
    ("stem", "name"), [("train", "train"), ("2_fit.GPU", "job-2-fit-gpu"), ("_", "job"), ("é", "job")]
)
def test_init_derives_job_name_from_script_name(stem: str, name: str) -> None:
    write("", f"{stem}.py")
    assert look(f"{stem}.py")[0]["name"] == name


def test_init_detects_other_python_environment(tmp_path: Path) -> None:
    assert project.environment_of(None, {"VIRTUAL_ENV": sys.prefix}) is None
    assert project.environment_of(Path(sys.executable), {}) is None
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    assert project.environment_of(None, {"VIRTUAL_ENV": str(tmp_path / "env")}) == tmp_path / "env"
    assert project.environment_of(tmp_path / "env" / "bin" / "python", {}) == tmp_path / "env"
    assert project.missing_modules(tmp_path / "env", {"torch", "json"}, []) == ["torch"]
    assert project.missing_modules(tmp_path / "nothing", {"torch"}, []) is None


LIGHTNING = """
    import lightning as L
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=3)
    args = parser.parse_args()
    trainer = L.Trainer(accelerator="cpu", {})
    trainer.fit(model)
"""


@pytest.mark.parametrize(
    ("line", "given", "ranks"),
    [
        ("python train.py", "devices=2", 2),
        ("python train.py", "devices=[0, 1, 2, 3]", 4),
        ("python train.py", 'devices="auto"', 1),
        ("python train.py", "", 1),
        ("python train.py", "devices=args.devices", 3),
        ("python train.py --devices 2", "devices=args.devices", 2),
        ("train.py --devices=2", "devices=args.devices", 2),
        ("train.py --devices 4 --dev 2", "devices=args.devices", 2),
        ("torchrun --nproc-per-node 2 train.py", "devices=2", 2),
    ],
)
def test_init_takes_rank_count_from_lightning_devices(line: str, given: str, ranks: int) -> None:
    write(LIGHTNING.format(given))
    made = propose(line.split(), {}, {}, code=None, name=None)
    notes = {note.code: note for note in made.notes}
    assert made.spec["world"] == {"ranks_per_node": ranks, "device": "cpu"} and "devices" not in notes
    assert "saves-nothing" not in notes, "its ModelCheckpoint does"
    assert "Lightning's Trainer (train.py, line 8) runs the training" in notes["framework"].text
    assert "ratchet init --patch train.py" in notes["unmanaged"].text


@pytest.mark.parametrize(
    ("line", "given", "said"),
    [
        ("python train.py", "devices=count()", "the number of devices=count() is unknown (train.py, line 8)"),
        ("torchrun --nproc-per-node 4 train.py", "devices=2", "devices=2 in train.py, line 8, but 4 ranks"),
    ],
)
def test_init_notes_unknown_or_conflicting_lightning_devices(line: str, given: str, said: str) -> None:
    write(LIGHTNING.format(given))
    (note,) = [n for n in propose(line.split(), {}, {}, code=None, name=None).notes if n.code == "devices"]
    assert said in note.text and note.serious


@pytest.mark.parametrize(
    ("text", "named", "saves"),
    [
        ("import lightning as L\nL.Trainer(enable_checkpointing=False)", "Lightning's Trainer", False),
        ("from transformers import Trainer, TrainingArguments\nTrainer(args=TrainingArguments('x'))", "transformers", True),
        ("from transformers import Trainer, TrainingArguments as A\nTrainer(1, A(save_strategy='no'))", "transformers", False),
        ("from transformers import Seq2SeqTrainer\nclass Mine(Seq2SeqTrainer): ...", "transformers", True),
        ("from accelerate import Accelerator\na = Accelerator()", "Accelerate", False),
        ("from accelerate import Accelerator\na = Accelerator()\na.save_state('x')", "Accelerate", True),
        ("from mine import Trainer\nTrainer(devices=2)", None, False),
    ],
)  # fmt: skip
def test_init_notes_training_framework_and_saving(text: str, named: str | None, saves: bool) -> None:
    write(text)
    _, notes, _ = look()
    assert (named is None) == ("framework" not in notes) and (named or "") in notes.get("framework", "")
    assert ("saves-nothing" not in notes) == saves
    assert ("ratchet init --patch train.py" in notes["unmanaged"]) == (named is not None)


def test_init_finds_session_of_lightning_cli_in_command_or_file() -> None:
    text = "from lightning.pytorch.cli import LightningCLI\nLightningCLI(Net)\n"
    write("import ratchet.lightning\n" + text)
    _, notes, _ = look()
    assert "--trainer.strategy ratchet" in notes["session"] and "no-session" not in notes
    write(text)
    assert "unmanaged" in look()[1]


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*/train.py")), ids=lambda path: path.parent.name)
def test_init_finds_session_of_every_example(script: Path) -> None:
    notes = {note.code: note for note in propose([str(script)], {}, {}, code=None, name=None).notes}
    assert "session" in notes and not notes.keys() & {"no-session", "unmanaged", "saves-nothing", "backend", "hook"}
