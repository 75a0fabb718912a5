"""A throw-away real Slurm: munged, slurmctld and a slurmd per node, on loopback, all state below one directory.

The daemons, the steps that they start and everything that these start belong to one guard process. It ends them all by their
pids when the pipe from the process that made it closes, so nothing is left after SIGKILL of a test either: Slurm's step
daemons leave their parent on purpose, and come back to the guard, which is a subreaper. Needs root and the packages
``slurm-wlm`` and ``munge``; ``missing_reason()`` says what is not there.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.server import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "srun", "sinfo")
PARTITION = "main"
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_TRIES = 3  # a port that was free a moment ago may not be now

_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge.sock,cred_expire=120
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={root}/jobcomp.txt
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PriorityType=priority/basic
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pidfile
SlurmdPidFile={root}/slurmd-%n.pidfile
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={node_timeout}
MessageTimeout=60
TCPTimeout=2
KillWait=10
UnkillableStepTimeout=20
MinJobAge={job_age}
JobRequeue=1
CompleteWait=0
PropagateResourceLimits=NONE
{nodes}
PartitionName={partition} Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=CANCEL GraceTime=20
PartitionName=short Nodes=ALL MaxTime=1 State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN"
)


def missing_reason() -> str | None:
    """Why there can be no Slurm here, for a skip; None where there can."""
    if os.geteuid() != 0:
        return "a Slurm of our own needs root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"{', '.join(absent)} not found: apt-get install --no-install-recommends slurm-wlm munge" if absent else None


class Slurm:
    """A running cluster. ``variables``: what its commands need in their environment."""

    def __init__(self, root: Path, nodes: int, cpus: int, node_timeout: int, job_age: int) -> None:
        self.root = root
        self.nodes = [f"n{i + 1}" for i in range(nodes)]
        self.variables = {"SLURM_CONF": str(root / "slurm.conf")}
        self._limits = (cpus, node_timeout, job_age)
        self._guard: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Raises ``AssertionError`` with the daemons' logs when the nodes do not come up."""
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.root / name).mkdir(mode=0o700)
        (self.root / "munge.key").write_bytes(os.urandom(1024))
        (self.root / "munge.key").chmod(0o600)
        self._configure()
        self._guard = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("slurm_guard.py")), str(self.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={"PATH": _PATH, **self.variables},
            cwd=self.root,
        )
        self._start_munge()
        self.start_daemon("slurmctld", ["slurmctld", "-D"])
        for node in self.nodes:
            self.start_node(node)
        try:
            wait_for(self.idle, "the nodes to be idle", 30)
        except AssertionError as error:
            logs = "\n".join(p.read_text(errors="replace")[-1500:] for p in sorted(self.root.glob("*.log")))
            raise AssertionError(f"{error}\n{logs}") from None

    def close(self) -> None:
        """End everything of it."""
        if self._guard is not None:
            assert self._guard.stdin is not None and self._guard.stdout is not None
            self._guard.stdin.close()
            self._guard.wait(30)
            self._guard.stdout.close()

    def run(self, *command: str, check: bool = True) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            command, env=os.environ | {"PATH": _PATH} | self.variables, capture_output=True, text=True, timeout=60
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def start_node(self, node: str) -> int:
        return self.start_daemon(node, ["slurmd", "-D", "-N", node])

    def start_daemon(self, name: str, command: Sequence[str]) -> int:
        """Have the guard start a daemon; its pid, also in ``<name>.pid``."""
        assert self._guard is not None and self._guard.stdin is not None and self._guard.stdout is not None
        self._guard.stdin.write("\t".join([str(self.root / f"{name}.out"), *command]) + "\n")
        self._guard.stdin.flush()
        pid = int(self._guard.stdout.readline())
        (self.root / f"{name}.pid").write_text(str(pid))
        return pid

    def kill_daemon(self, name: str, number: int = signal.SIGKILL) -> None:
        pid = int((self.root / f"{name}.pid").read_text())
        os.kill(pid, number)
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), f"{name} to end", 30)

    def _start_munge(self) -> None:
        command = ["munged", "--foreground", "--force", "--num-threads=2"]
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pidfile", "log-file": "munge.log"}
        files["seed-file"] = "munge.seed"
        self.start_daemon("munged", [*command, *(f"--{key}={self.root / name}" for key, name in files.items())])
        wait_for((self.root / "munge.sock").exists, "munged's socket", 30)

    def _configure(self) -> None:
        cpus, node_timeout, job_age = self._limits
        host = socket.gethostname().partition(".")[0]
        control, *ports = _free_ports(1 + len(self.nodes))
        nodes = [_NODE.format(name=n, host=host, port=p, cpus=cpus) for n, p in zip(self.nodes, ports, strict=True)]
        text = _CONF.format(
            root=self.root,
            host=host,
            control=control,
            nodes="\n".join(nodes),
            node_timeout=node_timeout,
            job_age=job_age,
            partition=PARTITION,
        )
        (self.root / "slurm.conf").write_text(text)

    def resume_drained(self) -> None:
        """Return drained nodes to service. Slurm drains a node if a step that was cancelled during its launch does not end."""
        for node in self.run("sinfo", "-h", "-N", "-p", PARTITION, "-t", "drain", "-o", "%N", check=False).split():
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)

    def idle(self) -> bool:
        """Are all nodes up, with nothing on them?"""
        found = self.run("sinfo", "-h", "-N", "-p", PARTITION, "-t", "idle", "-o", "%N", check=False)
        return found.split() == self.nodes


@contextmanager
def slurm_cluster(nodes: int = 2, cpus: int = 4, node_timeout: int = 60, job_age: int = 300) -> Iterator[Slurm]:
    """A cluster of ``nodes`` with ``cpus`` each, all of them this machine. ``node_timeout``: seconds until a silent node is
    down; ``job_age``: until Slurm forgets a job that has ended.

    The timeouts are longer than a busy machine stands still. When slurmd takes a launch after slurmctld's MessageTimeout, Slurm
    keeps the job in COMPLETING for many minutes, and no cancellation ends it.
    """
    root = Path(tempfile.mkdtemp(prefix="ratchet-slurm-", dir="/tmp"))  # a socket's path must be short
    root.chmod(0o755)
    try:
        for again in range(_TRIES):
            place = root / str(again)
            place.mkdir(mode=0o755, parents=True)
            cluster = Slurm(place, nodes, cpus, node_timeout, job_age)
            try:
                cluster.start()
                break
            except AssertionError:
                cluster.close()
                if again == _TRIES - 1:
                    raise
        try:
            yield cluster
        finally:
            cluster.close()
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
