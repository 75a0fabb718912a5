"""Checks that a spec names only allowed directories and object stores: the service reads what a spec names with its own rights.
Also the pre-flight of the run directory's file system."""

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
    """The directories (``code``) and prefixes of ``checkpoint.uri`` (``uris``) that specs may name; None: any. If ``code`` is
    set, specs may not name the run directory ``home``, a path in it, or a directory that contains it. Exception: a directory of
    ``code`` that lies in ``home``, and paths in this directory."""

    home: Path = Path("/")
    code: tuple[Path, ...] | None = None
    uris: tuple[str, ...] | None = None

    def check(self, spec: JobSpec, report: Report, *, copied: bool = False) -> None:
        """Add a problem to ``report`` for each forbidden path (code, start file, volumes) or object store in ``spec``. The code's
        path is not checked if ``copied`` is True, if the code was uploaded, or if an engine's nodes have it."""
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
        """True if the service may read the file or directory ``real`` for a spec. The path must contain no symbolic links."""
        if self.code is None:
            return True
        roots = [Path(os.path.realpath(root)) for root in self.code]
        home = Path(os.path.realpath(self.home))
        covering = [root for root in roots if real.is_relative_to(root)]
        if real.is_relative_to(home) or home.is_relative_to(real):
            covering = [root for root in covering if root.is_relative_to(home) and root != home]
        return bool(covering)

    def _check_path(self, pointer: str, text: str, report: Report, other: str = "") -> None:
        """Add a problem at ``pointer`` if the path ``text``, with links resolved, is not allowed. ``other``: appended advice."""
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
    """Add to ``report`` the fault or doubt of the run directory's file system for checkpoints. May write into the directory."""
    try:
        verdict = check_directory(run_directory, known=False)
    except OSError:
        return
    if verdict.status == "refused":
        report.refuse(_POINTER, "file-system-refused", f"the run directory {verdict}")
    elif verdict.status == "noted":
        report.warn(_POINTER, "file-system", f"the run directory {verdict}")
