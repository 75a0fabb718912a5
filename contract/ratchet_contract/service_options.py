"""The options of the service's commands. ``python -m ratchet_service`` reads them; ``ratchet serve``, ``reconcile`` and
``agent-host`` pass them on to it. This module is plain data, because the base install lacks the service's packages, and
``ratchet --help`` does not wait for pydantic."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ratchet_contract import env_vars


@dataclass(frozen=True)
class Option:
    """An option. ``metavar``: its value in help texts; None: the ``choices``. ``kind``: the type of its value; bool: the option
    has no value. ``default``: a text like that of a value; None: no value, as ``default_text`` explains. ``variable``: the
    environment variable that replaces the default. ``separator``: the option may be repeated; its values are added to those in
    ``variable``, which this text separates (" ": any blanks). ``minimum``, ``maximum``: of a number, both permitted."""

    flag: str
    help: str
    metavar: str | None = None
    kind: Callable[[str], Any] = str
    default: str | None = None
    default_text: str | None = None
    variable: str | None = None
    separator: str | None = None
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float = math.inf

    @property
    def name(self) -> str:
        """The option's name as an identifier, like ``cpu_slots``."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def description(self) -> str:
        """The help text: the meaning, then the variable and the default."""
        sources = ", else ".join(filter(None, (self.variable, self.default_text or self.default)))
        return f"{self.help} (default: {sources})" if sources else self.help

    @property
    def value_name(self) -> str:
        """The option's value in help texts and usage lines."""
        return self.metavar or "|".join(self.choices)

    def parse(self, text: str) -> Any:
        """Return the option's value. Raises ``ValueError``, whose message is for users."""
        with suppress(ValueError):
            value = self.kind(text)
            if self.minimum is not None and self.minimum <= value <= self.maximum:
                return value
            if self.minimum is None and (not self.choices or value in self.choices):
                return value
        raise ValueError(f"must be {self._expected()}, not {text!r}")

    def split(self, text: str) -> list[Any]:
        """Return the values in the text of ``variable``, for an option with a ``separator``."""
        return [self.parse(part) for part in text.split(None if self.separator == " " else self.separator) if part]

    def _expected(self) -> str:
        """Return what the value must be, for a message."""
        if self.choices:
            return " or ".join(self.choices)
        if self.kind is ipaddress.ip_network:
            return "a network without host bits, such as 10.0.0.0/8"
        number = "a whole number" if self.kind is int else "a number"
        if self.maximum == math.inf:
            return f"{number} of at least {self.minimum}"
        return f"{number} from {self.minimum} to {self.maximum}"


_BASE: Final = (
    Option(
        "--home",
        "Run directory: database, jobs, checkpoints.",
        "DIR",
        Path,
        default="./.ratchet",
        variable=env_vars.HOME,
    ),
    Option(
        "--log-format",
        "Format of the log on standard error; json: one object per line.",
        default="text",
        variable=env_vars.LOG_FORMAT,
        choices=("text", "json"),
    ),
    Option(
        "--log-level",
        "Level of that log.",
        default="info",
        choices=("debug", "info", "warning", "error"),
    ),
)
DATABASE: Final = (
    *_BASE,
    Option(
        "--database-url",
        "Database: sqlite:///FILE or postgresql://...",
        "URL",
        default_text="SQLite in the run directory",
        variable=env_vars.DATABASE_URL,
    ),
)
"""The options of all commands that use the database, such as ``token``."""
_CPU_SLOTS: Final = Option(
    "--cpu-slots",
    "CPU slots to give to jobs.",
    "NUMBER",
    int,
    default_text="all cores that the process may use",
    minimum=1,
)
_RECONCILER: Final = (
    *DATABASE,
    _CPU_SLOTS,
    Option(
        "--launchers",
        "Launchers file, YAML: which engines jobs may run on.",
        "FILE",
        Path,
        default_text="local alone",
        variable=env_vars.LAUNCHERS,
    ),
    Option(
        "--run-as",
        "User that runs local jobs' agents and ranks, and checks of users' code; the service must be root, and needs "
        "--auth token.",
        "USER[:GROUP]",
        default_text="the service's own user",
        variable=env_vars.RUN_AS,
    ),
    Option(
        "--run-as-limits",
        "Limits of that user for all jobs together: the number of processes and threads, and the size of any file that it "
        "writes, like 100Gi.",
        "processes=NUMBER,file_size=SIZE",
        default="",
        default_text="half of the machine's processes, files of any size",
        variable=env_vars.RUN_AS_LIMITS,
    ),
    Option(
        "--preemption",
        "Whose jobs may be stopped for a job of higher priority that waits for slots: its owner's; any owner's (each submitter "
        "can then stop all others' jobs); none.",
        default="owner",
        choices=("owner", "any", "off"),
    ),
    Option(
        "--preemption-min-run",
        "Seconds that a job preempted this way trains before it is preempted again.",
        "SECONDS",
        float,
        default="60",
        minimum=0,
        maximum=10**9,
    ),
    Option(
        "--standby",
        "Agents that the local launcher parks for later attempts, with the imports already made: off, on, or bounds.",
        "off|on|processes=NUMBER,seconds=DURATION,memory=SIZE",
        default="on",
        variable=env_vars.STANDBY,
    ),
    Option(
        "--bounds",
        "Limits on the kept output of a job; docs/limits.md lists the names.",
        "NAME=NUMBER,...",
        default="",
        default_text="those of docs/limits.md",
        variable=env_vars.BOUNDS,
    ),
)
_SERVE: Final = (
    *_RECONCILER,
    Option("--host", "Address to listen on.", "ADDRESS", default="127.0.0.1"),
    Option(
        "--port", "Port; 0 takes a free one (found through service.json).", "PORT", int, "0", minimum=0, maximum=65535
    ),
    Option("--url", "URL at which agents reach the service.", "URL", default_text="the address that it listens on"),
    Option("--no-reconciler", "Only the API; `ratchet reconcile` runs elsewhere.", kind=bool),
    Option(
        "--drain",
        "Seconds after SIGTERM in which requests are still accepted; /readyz is already 503.",
        "SECONDS",
        float,
        default="0",
        minimum=0,
        maximum=10**9,
    ),
    Option(
        "--auth",
        "auto: no token with SQLite and a loopback address, else every caller needs one; token: every caller needs one, "
        "always.",
        default="auto",
        variable=env_vars.AUTH,
        choices=("auto", "token"),
    ),
    Option("--tls-cert", "Certificate, PEM.", "FILE", Path, variable=env_vars.TLS_CERT),
    Option("--tls-key", "Its key, PEM.", "FILE", Path, variable=env_vars.TLS_KEY),
    Option(
        "--ca-file",
        "CA certificates with which agents verify it, PEM.",
        "FILE",
        Path,
        default_text="the system's",
        variable=env_vars.CA_FILE,
    ),
    Option(
        "--insecure-http",
        "Allow plain HTTP at an address that other machines reach: a proxy terminates TLS.",
        kind=bool,
    ),
    Option(
        "--code-root",
        "Directory below which specs may name code and files; may be repeated, and adds to RATCHET_CODE_ROOTS, separated by :.",
        "DIR",
        Path,
        default_text="any directory if no token is needed and --run-as is not set, else only uploaded code",
        variable=env_vars.CODE_ROOTS,
        separator=":",
    ),
    Option(
        "--checkpoint-uri-root",
        "Allowed prefix of checkpoint.uri; may be repeated, and adds to RATCHET_CHECKPOINT_URI_ROOTS, separated by spaces.",
        "URI",
        default_text="any if no token is needed, else none",
        variable=env_vars.URI_ROOTS,
        separator=" ",
    ),
    Option(
        "--webhook-network",
        "Network that is not public, such as 10.0.0.0/8, to which webhooks may be sent; may be repeated, and adds to "
        "RATCHET_WEBHOOK_NETWORKS, separated by spaces.",
        "NETWORK",
        ipaddress.ip_network,
        default_text="none: only public addresses",
        variable=env_vars.WEBHOOK_NETWORKS,
        separator=" ",
    ),
    Option(
        "--tensorboard-dir",
        "Directory that gets jobs' metrics as event files of TensorBoard.",
        "DIR",
        Path,
        default_text="none",
        variable=env_vars.TRACKER_TENSORBOARD_DIR,
    ),
    Option(
        "--mlflow-uri",
        "MLflow server that gets jobs' metrics.",
        "URI",
        default_text="none",
        variable=env_vars.TRACKER_MLFLOW_URI,
    ),
    Option(
        "--wandb-dir",
        "Directory that gets jobs' metrics for W&B.",
        "DIR",
        Path,
        default_text="none",
        variable=env_vars.TRACKER_WANDB_DIR,
    ),
    Option(
        "--wandb-mode",
        "Offline: runs in --wandb-dir that `wandb sync` uploads; online: the service uploads them, with WANDB_API_KEY.",
        default="offline",
        variable=env_vars.TRACKER_WANDB_MODE,
        choices=("offline", "online"),
    ),
    Option(
        "--request-rate",
        "Maximum requests per second of one caller, with bursts of ten times as many.",
        "NUMBER",
        float,
        default="100",
        minimum=0.01,
        maximum=10**6,
    ),
)
_RECONCILE: Final = (
    *_RECONCILER,
    Option(
        "--metrics-port",
        "Port that serves /metrics, /healthz and /readyz, without a token.",
        "PORT",
        int,
        default_text="none",
        minimum=0,
        maximum=65535,
    ),
    Option("--metrics-host", "Address of that port.", "ADDRESS", default="127.0.0.1"),
)


@dataclass(frozen=True)
class Command:
    """A command of the service that ``ratchet`` has as well."""

    description: str
    options: tuple[Option, ...]


COMMANDS: Final = {
    "serve": Command(
        "Run the service (API and reconciler) in the foreground. Ctrl-C ends it; jobs continue, the next service finds them.",
        _SERVE,
    ),
    "reconcile": Command(
        "Run only a reconciler, for a service started with --no-reconciler. Several may share one database.", _RECONCILE
    ),
    "agent-host": Command(
        "Only start agents, for a reconciler in another process; needs no database. On SIGTERM every job saves and stops.",
        (*_BASE, _CPU_SLOTS),
    ),
}
