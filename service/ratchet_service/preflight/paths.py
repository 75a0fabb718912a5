"""Which directories and object stores a spec may name, where users other than the run directory's owner submit.

The service reads what a spec names with its own rights: without this check a submitter could have any file of the service's
machine snapshotted and read it. Links are resolved before the comparison, and the snapshot itself takes no link that leads out. A
path may lead elsewhere by the time it is copied, so the snapshot checks every file again once it is open (``Roots.allows_path``).

``check`` is the pre-flight of the run directory: can checkpoints be trusted to the file system that it is on? Rank 0 tests that
before the first step, where the job runs; here it is checked before anything is queued.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ratchet_contract.spec.job import JobSpec
from ratchet_service.preflight.report import Report
from ratchet_store.filesystem.mount_policy import check_directory


@dataclass(frozen=True)
class Roots:
    """None: anything; an empty tuple: nothing. ``uris`` are prefixes of ``checkpoint.uri``. ``home``: the run directory; no path
    within or above it is allowed, except below a root that is within it."""

    home: Path = Path("/")
    code: tuple[Path, ...] | None = None
    uris: tuple[str, ...] | None = None

    def check(self, spec: JobSpec, report: Report, *, copied: bool = False) -> None:
        """Report the problems ``path-not-allowed`` and ``uri-not-allowed``. ``copied``: a snapshot of the code exists already, as
        for a fork, so ``code.path`` is not read."""
        code = None if copied else spec.code
        if code is not None and code.digest is None and (code.source == "snapshot" or spec.launcher.kind == "local"):
            self._check_path("/code/path", code.path, report, " or upload it (`ratchet submit FILE --upload`)")
        if spec.start_from is not None:
            self._check_path("/start_from/path", spec.start_from.path, report)
        for i, volume in enumerate(spec.volumes):
            if volume.host_path is not None:
                self._check_path(f"/volumes/{i}/host_path", volume.host_path, report)
        uri = spec.checkpoint.uri
        if uri is not None and self.uris is not None and not any(_is_below(uri, root) for root in self.uris):
            report.refuse(
                "/checkpoint/uri",
                "uri-not-allowed",
                _refusal_text(uri, self.uris, "--checkpoint-uri-root", "object stores"),
            )

    def allows_path(self, real: Path) -> bool:
        """True if ``real`` may be read. It must be free of links: from ``realpath``, or from ``/proc/self/fd`` of an open
        file."""
        if self.code is None:
            return True
        roots = [Path(os.path.realpath(root)) for root in self.code]
        home = Path(os.path.realpath(self.home))
        covering = [root for root in roots if real.is_relative_to(root)]
        if real.is_relative_to(home) or home.is_relative_to(real):
            covering = [root for root in covering if root.is_relative_to(home) and root != home]
        return bool(covering)

    def _check_path(self, pointer: str, text: str, report: Report, other: str = "") -> None:
        if self.code is not None and not self.allows_path(Path(os.path.realpath(text))):
            shown = _refusal_text(text, [str(root) for root in self.code], "--code-root", "directories of its machine")
            report.refuse(pointer, "path-not-allowed", shown + other)


def _is_below(uri: str, root: str) -> bool:
    base = root.rstrip("/")
    return uri == base or uri.startswith(base + "/")


def _refusal_text(value: str, roots: Sequence[str], option: str, kind: str) -> str:
    allowed = f"only what is below {', '.join(roots)}" if roots else "none"
    return f"{value} is not allowed: of {kind} this service accepts {allowed} ({option}). Ask its administrator"


_POINTER = "/checkpoint"


def check(run_directory: Path, report: Report) -> None:
    """Report what is known about the run directory's file system; an unknown one is tested. What cannot be tested (a full disk, a
    missing right) is left to the processes that will write there, which report it."""
    try:
        verdict = check_directory(run_directory, known=False)
    except OSError:
        return
    if verdict.status == "refused":
        report.refuse(_POINTER, "file-system-refused", f"the run directory {verdict}")
    elif verdict.status == "noted":
        report.warn(_POINTER, "file-system", f"the run directory {verdict}")
