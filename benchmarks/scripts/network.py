"""One rank of ``make bench ONLY=network``: a Session that does as many steps as it is told, when it is its turn.

Groups of several loops are alive at the same time and share one link, so only one of them may train at any time: the benchmark
says which; while it is not their turn the processes are stopped.
"""

from __future__ import annotations

import torch
from loops import Loop, net, take_turns, turns_parser

from ratchet_worker.session.session import Session


def main() -> None:
    parser = turns_parser()
    args = parser.parse_args()
    with Session() as session:
        torch.manual_seed(session.rank)
        loop = Loop(session.wrap(net(args.width, args.depth)), torch.randn(args.batch, args.width))
        session.register(optimizer=loop.optimizer)
        steps = session.steps()
        next(steps)

        def run(count: int) -> None:
            """``count`` steps with all that a Session does at their ends; the next one is then open."""
            for _ in range(count):
                session.log({"loss": loop.step()})
                next(steps)

        take_turns(args.turns, run)


if __name__ == "__main__":
    main()
