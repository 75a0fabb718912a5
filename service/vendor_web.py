"""``python service/vendor_web.py``: write the files of ``ratchet_service/web/vendor`` from the npm packages of its lock file.

Needs npm. ``lock.json`` has, for each file, the package, its version and licence, the file's path in the package, the edit that
makes it an ES module without bare imports and without parts that the pages do not use, and the SHA-384 of the result.
``--check`` only compares the digests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).parent / "ratchet_service" / "web" / "vendor"


def digest(data: bytes) -> str:
    return f"sha384-{base64.b64encode(hashlib.sha384(data).digest()).decode()}"


def packed(package: str, version: str, path: str) -> bytes:
    """Return one file of a package of npm's registry."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", f"{package}@{version}"], cwd=folder, check=True, capture_output=True)
        [archive] = Path(folder).iterdir()
        with tarfile.open(archive) as tar:
            file = tar.extractfile(f"package/{path}")
            assert file is not None
            return file.read()


def edited(data: bytes, edits: dict[str, Any]) -> bytes:
    """Apply an entry's ``cut`` (each from its first text, which occurs once, up to its second, which stays), its ``replace``
    (text by text, each occurs once), then its ``append``; drop a reference to a source map."""
    text = data.decode()
    for start, end in edits.get("cut", []):
        assert text.count(start) == 1, start
        head, tail = text.split(start)
        text = head + tail[tail.index(end) :]
    for old, new in edits.get("replace", {}).items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    lines = [line for line in text.rstrip().splitlines() if not line.startswith("//# sourceMappingURL")]
    return ("\n".join(lines) + "\n" + edits.get("append", "")).encode()


def main() -> int:
    lock = json.loads((VENDOR / "lock.json").read_text())
    changed = []
    for name, entry in lock.items():
        if "--check" not in sys.argv:
            (VENDOR / name).write_bytes(edited(packed(entry["package"], entry["version"], entry["file"]), entry))
        found = digest((VENDOR / name).read_bytes())
        if entry.get("integrity") != found:
            changed.append(name)
            entry["integrity"] = found
    if changed and "--check" in sys.argv:
        print(f"not as in lock.json: {', '.join(changed)}", file=sys.stderr)
        return 1
    if "--check" not in sys.argv:
        (VENDOR / "lock.json").write_text(json.dumps(lock, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
