"""A ``farmed_service`` with what the web pages are compared with: the page ``/modules``, of which a browser loads each module by
itself, and ``/every-point/JOB``, which has every point of a metric.

``python -m benchmarks.scripts.pages_service HOME INBOX SLOTS``
"""

from __future__ import annotations

import gzip
import json
from functools import lru_cache
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from fastapi.responses import Response

import ratchet_service
from benchmarks.scripts import farmed_service
from ratchet_service.api.authentication import OPEN
from ratchet_service.api.dependencies import ServiceDep
from ratchet_service.api.routes.pages import router
from ratchet_service.db.models import Metric

_WEB: Final = Path(ratchet_service.__file__).with_name("web")
_STYLE: Final = '<link rel="stylesheet" href="web/style.css">'
_TYPES: Final = {".js": "text/javascript", ".css": "text/css"}
_HEADERS: Final = {"Content-Encoding": "gzip", "Cache-Control": "no-cache"}


@lru_cache
def _packed(path: Path) -> bytes:
    return gzip.compress(path.read_bytes(), 9)


@router.get("/modules", dependencies=[OPEN])
def modules() -> Response:
    text = (_WEB / "index.html").read_text().replace("web/main.js", "web/app/main.js")
    text = text.replace(
        _STYLE, '<link rel="stylesheet" href="web/vendor/uPlot.css"><link rel="stylesheet" href="web/app/style.css">'
    )
    return Response(gzip.compress(text.encode(), 9), headers=_HEADERS, media_type="text/html")


@router.get("/web/{folder}/{path:path}", dependencies=[OPEN])
def module(folder: str, path: str) -> Response:
    file = _WEB / "style.css" if path == "style.css" else _WEB / folder / path
    return Response(_packed(file), headers=_HEADERS, media_type=_TYPES[file.suffix])


@router.get("/every-point/{job_id}", dependencies=[OPEN])
def every_point(
    service: ServiceDep, job_id: str, name: str, max_points: int, from_step: int = 0, to_step: int = 2**62
) -> Response:
    """As the API's metrics but for ``max_points``, with what a chart over steps needs of each point."""
    del max_points
    rows = sa.select(Metric.step, Metric.value).where(Metric.job_id == job_id, Metric.name == name)
    with service.database.read() as session:
        found = session.execute(rows.where(Metric.step.between(from_step, to_step)).order_by(Metric.step)).all()
    points = [{"step": step, "value": value} for step, value in found]
    series = {"name": name, "every": 1, "total": len(points), "points": points, "superseded": []}
    return Response(json.dumps({"job_id": job_id, "series": [series]}), media_type="application/json")


if __name__ == "__main__":
    farmed_service.main()
