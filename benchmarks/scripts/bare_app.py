"""The least that an answer can cost with the same libraries: FastAPI and uvicorn, one row written or constant bytes sent.

``python -m benchmarks.scripts.bare_app DATABASE_URL ANSWER_FILE PORT_FILE``
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import sqlalchemy as sa
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from ratchet_service.db.engine import Database


def main() -> None:
    url, answer, port = sys.argv[1:]
    database, data = Database(url), Path(answer).read_bytes()
    rows = sa.table("bare", sa.column("body", sa.Text))
    with database.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS bare (body TEXT)")
    app = FastAPI()

    def write(body: str) -> None:
        with database.write() as session:
            session.execute(sa.insert(rows).values(body=body))

    @app.get("/answer")
    def get() -> Response:
        return Response(data, media_type="application/json")

    @app.post("/row")
    async def post(request: Request) -> Response:
        body = json.dumps(json.loads(await request.body()))
        await run_in_threadpool(write, body)
        return Response(data, 201, media_type="application/json")

    with socket.socket(proto=socket.IPPROTO_TCP) as bound:  # else asyncio does not switch Nagle's algorithm off
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        Path(port).write_text(str(bound.getsockname()[1]))
        uvicorn.Server(uvicorn.Config(app, log_config=None)).run(sockets=[bound])


if __name__ == "__main__":
    main()
