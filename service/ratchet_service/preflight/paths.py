"""Checks that a spec names only allowed directories and object stores. That is needed where users other than the run directory's
owner submit; without configured roots everything is allowed.

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
    """The directories and object stores that specs may name. ``code``: roots, directories on the service's machine; ``uris``:
    prefixes of ``checkpoint.uri``. For both, None allows any, and an empty tuple none. ``home``: the run directory. If ``code``
    is not None, no path within ``home``, and no directory that contains ``home``, is allowed, except below a root that is itself
    within ``home``."""

    home: Path = Path("/")
    code: tuple[Path, ...] | None = None
    uris: tuple[str, ...] | None = None

    def check(self, spec: JobSpec, report: Report, *, copied: bool = False) -> None:
        """Add a problem to ``report`` for each of these in ``spec`` that is not allowed: ``code.path``, ``start_from.path``, the
        ``host_path`` of a volume (``path-not-allowed``), and ``checkpoint.uri`` (``uri-not-allowed``). ``code.path`` is not
        checked if the code was uploaded, if it is on the nodes of an engine, or with ``copied``: a snapshot exists already, as
        for a fork."""
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
        """Return True if the roots allow the service to read the file or directory ``real`` for a spec: any path if ``code`` is
        None, else one below a root, with the exception for the run directory that the class describes. File permissions are not
        checked. The path must contain no symbolic links: it comes from ``realpath``, or from ``/proc/self/fd`` of an open
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
        """Add the problem ``path-not-allowed`` at ``pointer`` if the path ``text`` is not allowed, after its links are resolved.
        ``other``: what else the user can do, appended to the text."""
        if self.code is not None and not self.allows_path(Path(os.path.realpath(text))):
            shown = _refusal_text(text, [str(root) for root in self.code], "--code-root", "directories of its machine")
            report.refuse(pointer, "path-not-allowed", shown + other)


def _is_below(uri: str, root: str) -> bool:
    """Return True if ``uri`` is the prefix ``root`` or is below it."""
    base = root.rstrip("/")
    return uri == base or uri.startswith(base + "/")


def _refusal_text(value: str, roots: Sequence[str], option: str, kind: str) -> str:
    """Return the text of a problem for ``value``; ``roots``: what is allowed; ``option``: the service's option that sets it."""
    allowed = f"only what is below {', '.join(roots)}" if roots else "none"
    return f"{value} is not allowed: of {kind} this service accepts {allowed} ({option}). Ask its administrator"


_POINTER = "/checkpoint"


def check(run_directory: Path, report: Report) -> None:
    """Add to ``report`` what the run directory's file system means for checkpoints: a refused one is a problem, a doubtful one a
    warning. If the kind of file system is not a known one, it is tested by writing into the directory. If the test is impossible
    (a full disk, a missing right), nothing is added: the processes that will write there report it."""
    try:
        verdict = check_directory(run_directory, known=False)
    except OSError:
        return
    if verdict.status == "refused":
        report.refuse(_POINTER, "file-system-refused", f"the run directory {verdict}")
    elif verdict.status == "noted":
        report.warn(_POINTER, "file-system", f"the run directory {verdict}")
