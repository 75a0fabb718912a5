"""A receiver of webhooks that accepts everything, and appends a byte per request to a file.

``python -m benchmarks.scripts.receiver FILE``: writes its URL to ``FILE.url``, and runs until it is killed.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        with Path(sys.argv[1]).open("ab") as out:
            out.write(b".")
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Path(sys.argv[1]).with_suffix(".url").write_text(f"http://127.0.0.1:{server.server_address[1]}/")
    server.serve_forever()
