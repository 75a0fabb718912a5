"""What ``network.py`` is compared with: the same training under torch's own hook, written by hand, without Ratchet.

Started with torchrun's variables. Settings are those of a job: deterministic algorithms, one thread.
"""

from __future__ import annotations

import ctypes
import json
import signal

import torch
import torch.distributed as dist
from loops import Loop, net, take_turns, turns_parser
from stock import mend_batched_powersgd, register
from torch.nn.parallel import DistributedDataParallel

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parser = turns_parser()
    parser.add_argument("--hook", type=json.loads, help="arguments of stock.register as JSON; without: DDP has no hook")
    parser.add_argument("--bucket-cap-mb", type=float)
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # stopped as it may be, it goes with the benchmark
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(net(args.width, args.depth), bucket_cap_mb=args.bucket_cap_mb)
    mend_batched_powersgd()
    if args.hook is not None:
        register(model, **args.hook)
    loop = Loop(model, torch.randn(args.batch, args.width))

    def run(count: int) -> None:
        for _ in range(count):
            loop.step().item()

    take_turns(args.turns, run)


if __name__ == "__main__":
    main()
