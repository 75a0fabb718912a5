"""The command line of training, read as torchrun reads it: honoured, named as not needed, or refused with the cure."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from ratchet_client.init.command_line import Command, count_ranks, parse_command
from ratchet_client.init.torchrun_options import OPTIONS, Drop, Keep, Refuse
from ratchet_contract.errors import Refused


def parse(line: str, **environ: str) -> Command:
    return parse_command(line.split(), environ)


def test_options_table_covers_every_torchrun_option_and_alias() -> None:
    actions = [a for a in get_args_parser()._actions if a.option_strings and a.dest != "help"]
    assert {(frozenset(a.option_strings), a.dest, a.nargs == 0) for a in actions} <= {
        (frozenset(o.flags), o.dest, o.switch) for o in OPTIONS
    }


def test_torchrun_default_values_are_accepted() -> None:
    """What torchrun does when nothing is said can be said."""
    parser = get_args_parser()
    for option in OPTIONS:
        default = parser.get_default(option.dest)
        if not option.switch and default not in (None, []):
            assert isinstance(option.rule(str(default)), Keep | Drop), option.name


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc-per-node 4 train.py --lr 0.1",
        "torchrun --standalone --nproc_per_node=4 train.py --lr 0.1",
        "/usr/bin/env torchrun --nproc-per-node 4 train.py --lr 0.1",
        "torchrun --stand --nproc-per-node 4 train.py --lr 0.1",  # argparse takes abbreviations, so does torchrun
        "torchrun --nnodes=1 --rdzv-backend c10d --rdzv-endpoint localhost:0 -r 3 --nproc-per-node 4 train.py --lr 0.1",
        "python -m torch.distributed.run --nproc-per-node 4 train.py --lr 0.1",
        "python3.11 -u -m torch.distributed.launch --use-env --nproc-per-node 4 train.py --lr 0.1",
        "--nproc-per-node 4 train.py --lr 0.1",
    ],
)
def test_equivalent_launch_commands_parse_to_same_result(line: str) -> None:
    command = parse(line.removeprefix("/usr/bin/"))
    assert (command.script, command.arguments, command.ranks) == ("train.py", ["--lr", "0.1"], 4)


def test_script_or_python_command_has_one_rank() -> None:
    for line in ("train.py --lr 0.1", "train.py -- --lr 0.1", "python train.py --lr 0.1"):
        command = parse(line)
        assert (command.script, command.arguments, command.ranks) == ("train.py", ["--lr", "0.1"], 1)
    assert parse("torchrun train.py --nproc-per-node 4").ranks == 1, "behind the script all options are the script's"


def test_supported_torchrun_options_are_written_to_spec() -> None:
    command = parse(
        "A=1 OMP_NUM_THREADS=2 torchrun --max-restarts 5 --shutdown-timeout 60 --nproc-per-node cpu train.py"
    )
    assert command.policy == {"max_failures": 5, "stop_grace": 60}
    assert (command.ranks, command.device) == (os.cpu_count(), "cpu")
    assert command.env == {"A": "1", "OMP_NUM_THREADS": "2"}
    assert parse("torchrun train.py", PET_NPROC_PER_NODE="3", PET_MAX_RESTARTS="2").ranks == 3


def test_unneeded_torchrun_options_are_dropped_with_reason() -> None:
    dropped = parse("torchrun --standalone --tee 3 --log-dir logs --monitor-interval 5 train.py").dropped
    assert set(dropped) == {"--standalone", "--tee=3", "--log-dir=logs", "--monitor-interval=5"}
    assert "ratchet logs" in dropped["--tee=3"]


@pytest.mark.parametrize(
    "address", ["localhost", "localhost:0", "127.0.0.1:29500", "0.0.0.0:1", "::1", "[::1]", "[::1]:29500", ":29500"]
)
def test_rendezvous_at_an_address_of_this_machine_is_dropped(address: str) -> None:
    assert set(parse(f"torchrun --rdzv-endpoint {address} train.py").dropped) == {f"--rdzv-endpoint={address}"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torchrun --nnodes 2 train.py", "--nnodes=2: leave it out, and give the spec its world.nodes"),
        ("torchrun --nnodes 1:4 train.py", "--nnodes=1:4"),
        ("torchrun --rdzv-backend etcd-v2 train.py", "--rdzv-backend=etcd-v2: .* leave it out"),
        ("torchrun --rdzv-endpoint node0:29500 train.py", "--rdzv-endpoint=node0:29500: .*another machine"),
        ("torchrun --rdzv-endpoint [2001:db8::1] train.py", r"--rdzv-endpoint=\[2001:db8::1\]: .*another machine"),
        ("torchrun --master-addr 10.0.0.1 train.py", "--master-addr=10.0.0.1: .*another machine"),
        ("torchrun --node-rank 1 train.py", "--node-rank=1: leave it out"),
        ("torchrun -m pkg.train --lr 1", r'run_train.py: `import runpy; runpy.run_module\("pkg.train"'),
        ("python -m pkg.train", r'runpy.run_module\("pkg.train"'),
        ("torchrun --no-python ./train", "--no-python: .*write a .py file"),
        ("torchrun --start-method fork train.py", "--start-method=fork: .*leave it out"),
        ("torchrun --numa-binding node train.py", "--numa-binding=node: .*numactl"),
        ("torchrun --virtual-local-rank train.py", "--virtual-local-rank: .*LOCAL_RANK"),
        ("torchrun --logs-specs mine train.py", "--logs-specs=mine: .*leave it out"),
        ("torchrun --role trainer train.py", "--role=trainer: .*labels"),
        ("torchrun --event-log-handler mine train.py", "ratchet events"),
        ("torchrun --signals-to-handle SIGTERM,SIGUSR1 train.py", "SIGUSR1: no signal is forwarded"),
        ("torchrun --nproc-per-node xpu train.py", "--nproc-per-node=xpu: give a number"),
        ("torchrun --nproc-per-node 0 train.py", "whole number from 1"),
        ("torchrun --max-restarts=-1 train.py", "--max-restarts is a whole number from 0"),
        ("torchrun --n 2 train.py", "ambiguous option"),
        ("torchrun --frobnicate 2 train.py", "unrecognized|required"),
        ("torchrun --nproc-per-node 2", "required: script"),
        ("python -m torch.distributed.launch --nproc-per-node 2 train.py", "LOCAL_RANK.*torchrun"),
        ("python -O train.py", "-O of python"),
        ("CUDA_VISIBLE_DEVICES=1 torchrun train.py", "CUDA_VISIBLE_DEVICES: the service allocates GPUs"),
        ("accelerate launch train.py", "accelerate launch is not read"),
        ("/nowhere/bin/python train.py", "there is no interpreter /nowhere/bin/python"),
    ],
)  # fmt: skip
def test_unsupported_torchrun_option_is_refused_with_cure(line: str, said: str) -> None:
    with pytest.raises(Refused, match=said):
        parse(line)


def test_command_suggested_for_other_launcher_can_be_parsed() -> None:
    with pytest.raises(Refused, match="accelerate launch is not read") as refused:
        parse("accelerate launch --num_processes 4 train.py --lr 0.1")
    command = parse(str(refused.value).partition(", like ")[2])
    assert (command.script, command.arguments, command.ranks) == ("train.py", ["--lr", "0.1"], 4)


def test_every_option_rule_has_text_without_trailing_period() -> None:
    for option in OPTIONS:
        answer = option.rule("7")
        text = answer.cure if isinstance(answer, Refuse) else answer.why if isinstance(answer, Drop) else answer.key
        assert text and not text.endswith(".")


def test_torchrun_path_selects_python_of_same_directory(tmp_path: Path) -> None:
    beside = Path(sys.executable).parent
    assert parse(f"{beside}/torchrun train.py").python == beside / "python"
    assert parse("torchrun train.py").python is None


def test_auto_rank_count_follows_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(visible: str) -> tuple[Any, ...]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return count_ranks("auto")

    assert count("0,1,2") == (3, "cuda") and count("") == (os.cpu_count(), "cpu")
    with pytest.raises(Refused, match="no GPU"):
        count_ranks("gpu")
