"""Options of torchrun (torch 2.9 to 2.15), each with a rule that translates its value for a job spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


@dataclass(frozen=True)
class Keep:
    """Result of a rule: the option sets ``key`` of the spec. ``world`` stands for ranks and device."""

    key: str


@dataclass(frozen=True)
class Drop:
    """Result of a rule: the option is left out, since a job does not need it. ``why``: the reason."""

    why: str


@dataclass(frozen=True)
class Refuse:
    """Result of a rule: the option is not supported. ``cure``: a sentence that says what to do instead."""

    cure: str


Rule = Callable[[str], Keep | Drop | Refuse]


@dataclass(frozen=True)
class Option:
    """An option of torchrun. ``flags``: its names. ``rule``: maps its value to a result. ``switch``: it takes no value."""

    flags: tuple[str, ...]
    rule: Rule
    switch: bool = False

    @property
    def name(self) -> str:
        """The flag under which torchrun's documentation lists the option: the first that begins with ``--``."""
        return next(flag for flag in self.flags if flag.startswith("--"))

    @property
    def dest(self) -> str:
        """The name of the option's attribute in argparse. In upper case, it is the ``NAME`` of the option's environment variable
        ``PET_<NAME>``, if there is one."""
        return self.name[2:].replace("-", "_")


def _keep(key: str) -> Rule:
    return lambda _: Keep(key)


def _drop(why: str) -> Rule:
    return lambda _: Drop(why)


def _refuse(cure: str) -> Rule:
    return lambda _: Refuse(cure)


def _default_only(plain: str, why: str, cure: str) -> Rule:
    """Return a rule that drops the option for the value ``plain``, torchrun's default, and refuses it otherwise."""
    return lambda value: Drop(why) if value == plain else Refuse(cure)


_ONE_MACHINE: Final = (
    "leave it out, and give the spec its world.nodes and a launcher of several machines (docs/cluster.md)"
)
_RENDEZVOUS: Final = "the agent binds a free port for the ranks of this machine itself"


def _nodes(value: str) -> Keep | Drop | Refuse:
    return Drop("one machine is the default") if value in ("1", "1:1") else Refuse(_ONE_MACHINE)


def _local_address(value: str) -> Keep | Drop | Refuse:
    """Return ``Drop`` if the host of ``value``, without the port, is in ``LOOPBACK`` or empty, else ``Refuse``."""
    host = value.partition(":")[0] if value.count(":") == 1 else value
    if value.startswith("["):
        host = value[1:].partition("]")[0]
    return Drop(_RENDEZVOUS) if host in ("", *LOOPBACK) else Refuse(f"{value} names another machine; {_ONE_MACHINE}")


def _backend(value: str) -> Keep | Drop | Refuse:
    """Return ``Drop`` for the rendezvous backends "static" and "c10d", and ``Refuse`` for any other."""
    if value in ("static", "c10d"):
        return Drop(_RENDEZVOUS)
    return Refuse(
        f"{value} is not needed on one machine, and {_RENDEZVOUS}: leave it out, with --rdzv-endpoint and --rdzv-conf"
    )


def _signals(value: str) -> Keep | Drop | Refuse:
    """Return ``Drop`` if every name in ``value`` is a signal that torchrun handles by default, else ``Refuse``."""
    more = set(value.split(",")) - {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}
    if not more:
        return Drop("SIGTERM stops a job at a step that all ranks agree on")
    return Refuse(
        f"{', '.join(sorted(more))}: no signal is forwarded to ranks; use `ratchet preempt`, `suspend` or `checkpoint`"
    )


_LOGS: Final = "every rank's output is kept: ratchet logs JOB --rank N"
_GREP: Final = "every rank's output is kept and can be searched: ratchet logs JOB --grep WORD"

OPTIONS: Final[tuple[Option, ...]] = (
    Option(("--nnodes",), _nodes),
    Option(("--nproc-per-node", "--nproc_per_node"), _keep("world")),
    Option(("--rdzv-backend", "--rdzv_backend"), _backend),
    Option(("--rdzv-endpoint", "--rdzv_endpoint"), _local_address),
    Option(("--rdzv-id", "--rdzv_id"), _drop("every attempt has a rendezvous of its own")),
    Option(
        ("--rdzv-conf", "--rdzv_conf"),
        _drop(f"{_RENDEZVOUS}; the time limit for the start of ranks is policy.startup_deadline"),
    ),
    Option(("--standalone",), _drop(_RENDEZVOUS), switch=True),
    Option(("--max-restarts", "--max_restarts"), _keep("policy.max_failures")),
    Option(("--monitor-interval", "--monitor_interval"), _drop("the agent detects a rank's end at once")),
    Option(
        ("--start-method", "--start_method"),
        _default_only(
            "spawn",
            "ranks are fresh processes",
            "ranks are fresh processes, as torchrun's are for a script: leave it out",
        ),
    ),
    Option(
        ("--event-log-handler", "--event_log_handler"),
        _default_only(
            "null", "it writes nothing", "events are kept by the service: leave it out and use ratchet events JOB"
        ),
    ),
    Option(
        ("--role",),
        _default_only(
            "default", "it is the default", "ROLE_NAME is `default` for all ranks: leave it out; labels name jobs"
        ),
    ),
    Option(
        ("-m", "--module"), _refuse("a spec names a file"), switch=True
    ),  # the caller, which knows the module, words the message
    Option(
        ("--no-python", "--no_python"),
        _refuse("ranks are Python processes: write a .py file that does what the program did, or calls it"),
        switch=True,
    ),
    Option(("--run-path", "--run_path"), _drop("scripts are run by runpy.run_path in every case"), switch=True),
    Option(("--log-dir", "--log_dir"), _drop(_LOGS)),
    Option(("-r", "--redirects"), _drop(_LOGS)),
    Option(("-t", "--tee"), _drop(_LOGS)),
    Option(("--local-ranks-filter", "--local_ranks_filter"), _drop(_LOGS)),
    Option(("--duplicate-stdout-filters", "--duplicate_stdout_filters"), _drop(_GREP)),
    Option(("--duplicate-stderr-filters", "--duplicate_stderr_filters"), _drop(_GREP)),
    Option(("--log-line-prefix-template", "--log_line_prefix_template"), _drop(_LOGS)),
    Option(("--node-rank", "--node_rank"), _default_only("0", "one machine is the default", _ONE_MACHINE)),
    Option(("--master-addr", "--master_addr"), _local_address),
    Option(("--master-port", "--master_port"), _drop(_RENDEZVOUS)),
    Option(("--local-addr", "--local_addr"), _local_address),
    Option(("--logs-specs", "--logs_specs"), _refuse(f"your own logging class is not called; leave it out: {_LOGS}")),
    Option(
        ("--numa-binding", "--numa_binding"),
        _refuse("ranks are not bound to CPUs: leave it out, and start `ratchet serve` under numactl if it matters"),
    ),
    Option(("--signals-to-handle", "--signals_to_handle"), _signals),
    Option(("--shutdown-timeout", "--shutdown_timeout"), _keep("policy.stop_grace")),
    Option(
        ("--virtual-local-rank", "--virtual_local_rank"),
        _refuse(
            "LOCAL_RANK counts the ranks of a machine, and every rank sees all GPUs of the job: leave it out, and choose the "
            'device by int(os.environ["LOCAL_RANK"])'
        ),
        switch=True,
    ),
    Option(("--print-completion", "--print_completion"), _refuse("torchrun starts nothing with it: leave it out")),
)
