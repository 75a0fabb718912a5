"""torch's ``SummaryWriter`` for a job: TensorBoard shows each step once, although steps are repeated after a kill."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

try:
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams
except ImportError as error:
    raise ImportError("tensorboard is not installed here: pip install tensorboard") from error

from ratchet_contract import env_vars as names
from ratchet_contract.errors import UserError
from ratchet_contract.phases import NoteType
from ratchet_contract.plural import pluralize
from ratchet_worker.session.event_files import EventFiles

if TYPE_CHECKING:
    from ratchet_worker.training.runtime import Runtime


class JobWriter(SummaryWriter):
    """A ``SummaryWriter`` on rank 0 whose files a later attempt rewinds to its checkpoint. Takes the same arguments. Raises
    ``UserError`` for a directory that is not local."""

    def __init__(self, runtime: Runtime, log_dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        directory = Path(default_directory(runtime) if log_dir is None else log_dir).resolve()
        if "://" in str(log_dir):
            raise UserError(
                f"log_dir: {log_dir} is not a local directory, and only local files can be rewound after a kill. Give a "
                "directory in the job's working directory, or none"
            )
        files = runtime.event_files.get(directory) or _open(runtime, directory)
        options["filename_suffix"] = options.get("filename_suffix", "") + files.suffix
        super().__init__(str(directory), **options)
        files.writers.append(self)
        atexit.register(self.close)  # what is logged after the last save

    @override
    def add_hparams(
        self,
        hparam_dict: Any,
        metric_dict: Any,
        hparam_domain_discrete: Any = None,
        run_name: str | None = None,
        global_step: int | None = None,
    ) -> None:
        """Add hyperparameters as torch's ``SummaryWriter`` does, but to this writer's own directory instead of a new one for each
        call. ``run_name`` is ignored."""
        for summary in hparams(hparam_dict, metric_dict, hparam_domain_discrete):  # type: ignore[no-untyped-call]
            self._get_file_writer().add_summary(summary)  # type: ignore[no-untyped-call]
        for name, value in metric_dict.items():
            self.add_scalar(name, value, global_step)


def _open(runtime: Runtime, directory: Path) -> EventFiles:
    """Let the runtime rewind the event files in ``directory`` before the first step, and record their sizes at each save."""
    launch = runtime.launch
    files = EventFiles(directory, launch.job_id, launch.attempt)
    if unknown := files.open():
        runtime.reporter.note(
            NoteType.EVENT_FILES_UNKNOWN,
            f"{directory}: {pluralize(unknown, 'event file')} of earlier attempts cannot be rewound, since the file "
            f"{files.journal.name} is missing or does not name their attempts: repeated steps are shown twice. Move this file "
            "together with the event files",
        )
    if runtime.restored:
        files.rewind(runtime.chosen.base)
    runtime.event_files[directory] = files
    return files


class NoWriter:
    """Has the methods of a ``SummaryWriter``, and writes nothing: for ranks other than 0."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = str(log_dir)

    def get_logdir(self) -> str:
        """Return the directory that rank 0 writes to."""
        return self.log_dir

    def __enter__(self) -> NoWriter:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: None


def default_directory(runtime: Runtime) -> Path:
    """Return the job's directory for TensorBoard, ``RATCHET_TENSORBOARD_DIR``. Without a service it is in the Session's
    directory."""
    environ: Mapping[str, str] = os.environ
    return Path(environ.get(names.TENSORBOARD_DIR) or Path(runtime.launch.job_root, "tensorboard"))
