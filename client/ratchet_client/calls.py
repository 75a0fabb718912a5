"""How the methods of ``RatchetClient`` reach the service: one request, one model; pages as one iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from ratchet_client.transport import Params, Transport

M = TypeVar("M", bound=BaseModel)
PAGE = 100


class Calls:
    """Base of the client; ``_transport`` is the constructor's."""

    _transport: Transport

    def _get(self, path: str, model: type[M], params: Params | None = None) -> M:
        return model.model_validate(self._transport.request("GET", path, params=params).json())

    def _post(self, path: str, model: type[M], **options: Any) -> M:
        return model.model_validate(self._transport.request("POST", path, **options).json())

    def _pages(self, path: str, model: type[M], params: Params) -> Iterator[M]:
        """Every item; a page is asked for when the one before has been read."""
        cursor: str | None = None
        while True:
            body = self._transport.request("GET", path, params={**params, "cursor": cursor}).json()
            yield from (model.model_validate(item) for item in body["items"])
            cursor = body.get("next_cursor")
            if cursor is None:
                return


def job_path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def checkpoint_path(job_id: str, checkpoint_id: str) -> str:
    return f"{job_path(job_id)}/checkpoints/{quote(checkpoint_id, safe='')}"


def quota_path(owner: str) -> str:
    return f"/v1/quotas/{quote(owner, safe='*')}"
