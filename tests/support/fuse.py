"""``python -m tests.support.fuse KIND FOLDER``: a FUSE file system that passes on to a directory of this machine, tried as a run
directory. Prints one JSON object. To be run in a mount namespace of its own: the mount ends with it, however it ends."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from ratchet_contract.checkpoint.resume_report import Segment
from ratchet_store.filesystem.mount_policy import check_directory
from ratchet_store.read.checkpoint_reader import verify
from ratchet_store.read.find_base import find_base
from ratchet_store.retention.delete import sweep
from tests.support.checkpoints import list_names, make_chain, make_checkpoint
from tests.support.retention import run_retention
from tests.support.server import wait_for

SFTP = Path("/usr/lib/openssh/sftp-server")
LINEAGE = [Segment(attempt=1, after_step=0)]
_WITH_US = ["setpriv", "--pdeathsig", "KILL"]


def missing_package(kind: str) -> str | None:
    """The package that is missing."""
    if kind == "sshfs" and not SFTP.exists():
        return "openssh-sftp-server"
    return None if shutil.which(kind) else kind


def serve(kind: str, behind: Path, at: Path) -> list[subprocess.Popen[bytes]]:
    """``sshfs`` speaks to a server of its own by a pair of sockets in the place of ssh."""
    if kind == "bindfs":
        return [subprocess.Popen([*_WITH_US, kind, "-f", str(behind), str(at)])]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = subprocess.Popen([*_WITH_US, str(SFTP)], stdin=theirs, stdout=theirs)
        command = [*_WITH_US, kind, "-f", "-o", "passive", f"server:{behind}", str(at)]
        return [subprocess.Popen(command, stdin=ours, stdout=ours), server]


def exercise_checkpoints(root: Path) -> dict[str, object]:
    """Checkpoints are made, one of them is damaged and set aside, retention deletes what is too many."""
    checkpoints, quarantine = root / "checkpoints", root / "quarantine"
    chain = make_chain(checkpoints, 10, 20, 30)
    with (checkpoints / chain[2].id / chain[2].files[0].name).open("r+b") as file:
        file.write(b"damage")
    base, moved = find_base(checkpoints, quarantine, LINEAGE)
    assert base == chain[1] and [one.step for one in moved] == [30]
    make_checkpoint(checkpoints, 40, parent=base.base)
    deleted = [step for step, _ in run_retention(checkpoints, keep_last=2, lineage=LINEAGE)]
    assert sweep(checkpoints, dead_attempts={1}) == []
    left = {name: verify(checkpoints / name).ok for name in list_names(checkpoints)}
    return {"deleted": deleted, "left": left, "aside": list_names(quarantine)}


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    behind, at = folder / "behind", folder / "at"
    behind.mkdir()
    at.mkdir()
    serving = serve(kind, behind, at)
    wait_for(lambda: at.is_mount() or serving[0].poll() is not None, f"{kind} to be mounted", 20)
    assert at.is_mount(), f"{kind} ended with {serving[0].returncode}"
    try:
        verdict = check_directory(at)
        print(
            json.dumps(
                {"status": verdict.status, "type": verdict.mount.type, "says": str(verdict), **exercise_checkpoints(at)}
            )
        )
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)
        for process in serving:
            process.wait(10)


if __name__ == "__main__":
    main()
