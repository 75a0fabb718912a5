from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import Server, processes_below


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service of the module's own; afterwards nothing of it is alive."""
    home: Path = tmp_path_factory.mktemp("home")
    server = Server(home)
    try:
        yield server.start()
    finally:
        server.stop()
        assert not processes_below(home)
