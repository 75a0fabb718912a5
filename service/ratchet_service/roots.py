"""Which directories and object stores a spec may name, where others than the run directory's owner submit.

The service reads what a spec names with its own rights: without this a submitter could have any file of the service's machine
snapshotted and look at it. Links are followed before the comparison, and the snapshot itself takes no link that leads out. A path
may lead elsewhere by the time it is copied: the snapshot asks again of every file that it has opened (``Roots.allows``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ratchet_contract.spec import JobSpec
from ratchet_service.preflight_report import Report


@dataclass(frozen=True)
class Roots:
    """None: anything; an empty tuple: nothing. ``uris`` are prefixes of ``checkpoint.uri``. ``home``: the run directory, which is
    nobody's code, unless a root lies within it."""

    home: Path = Path("/")
    code: tuple[Path, ...] | None = None
    uris: tuple[str, ...] | None = None

    def check(self, spec: JobSpec, report: Report, *, copied: bool = False) -> None:
        """Problems ``path-not-allowed`` and ``uri-not-allowed``. ``copied``: of the code there is a snapshot already, as of a
        fork's, so that nobody reads ``code.path``."""
        code = None if copied else spec.code
        if code is not None and code.digest is None and (code.source == "snapshot" or spec.launcher.kind == "local"):
            self._path("/code/path", code.path, report, " or send it (`ratchet submit FILE --upload`)")
        if spec.start_from is not None:
            self._path("/start_from/path", spec.start_from.path, report)
        for i, volume in enumerate(spec.volumes):
            if volume.host_path is not None:
                self._path(f"/volumes/{i}/host_path", volume.host_path, report)
        uri = spec.checkpoint.uri
        if uri is not None and self.uris is not None and not any(_below(uri, root) for root in self.uris):
            report.refuse(
                "/checkpoint/uri", "uri-not-allowed", _refusal(uri, self.uris, "--checkpoint-uri-root", "object stores")
            )

    def allows(self, real: Path) -> bool:
        """``real``: without links, as ``realpath`` gives it, or ``/proc/self/fd`` of what was opened."""
        if self.code is None:
            return True
        roots = [Path(os.path.realpath(root)) for root in self.code]
        home = Path(os.path.realpath(self.home))
        covering = [root for root in roots if real.is_relative_to(root)]
        if real.is_relative_to(home) or home.is_relative_to(real):
            covering = [root for root in covering if root.is_relative_to(home) and root != home]
        return bool(covering)

    def _path(self, pointer: str, text: str, report: Report, other: str = "") -> None:
        if self.code is not None and not self.allows(Path(os.path.realpath(text))):
            shown = _refusal(text, [str(root) for root in self.code], "--code-root", "directories of its machine")
            report.refuse(pointer, "path-not-allowed", shown + other)


def _below(uri: str, root: str) -> bool:
    base = root.rstrip("/")
    return uri == base or uri.startswith(base + "/")


def _refusal(what: str, roots: Sequence[str], option: str, kind: str) -> str:
    allowed = f"only what is below {', '.join(roots)}" if roots else "none"
    return f"{what} is not allowed: of {kind} this service takes {allowed} ({option}). Ask who runs it"
