"""Request bodies: size, media type, syntax, and only values that both databases can hold."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from ratchet_contract.errors import FieldProblem, Refused, SpecError
from ratchet_contract.spec.parse import load_spec_text, pointer_of, problem_of

M = TypeVar("M", bound=BaseModel)
JSON_TYPES: Final = frozenset({"application/json", "application/merge-patch+json"})
YAML_TYPES: Final = frozenset({"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"})
MAX_DEPTH: Final = 64
MAX_VALUES: Final = 200_000
_MOST_PROBLEMS: Final = 10
BODY_SECONDS: Final = 120.0
"""Time limit in seconds for a body that is read as a whole."""
PART_SECONDS: Final = 30.0
"""Time limit in seconds for the next part of any body."""
_MAX_INT: Final = 2**63 - 1
_UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")


class Nothing(BaseModel):
    """The body of an action without parameters: no body, or an empty object."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class RawBody:
    """A request body, and its media type: without parameters, in lower case, "" if the request has none."""

    media_type: str
    content: bytes


async def read_body(request: Request, limit: int) -> RawBody:
    """Return the whole request body, at most ``limit`` bytes. Raises ``Refused`` for a large or slow one, and
    ``ClientDisconnect``."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            content = b"".join([part async for part in iter_body(request, limit)])
    except TimeoutError:
        raise _too_slow(BODY_SECONDS) from None
    return RawBody(media_type_of(request), content)


async def iter_body(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Yield the parts of the request body, at most ``limit`` bytes. Raises ``Refused`` for a large or slow one, and
    ``ClientDisconnect``."""
    too_large = Refused(f"the body is larger than {limit} bytes", code="body-too-large")
    if (content_length(request) or 0) > limit:
        raise too_large
    size = 0
    parts = request.stream()
    while True:
        try:
            async with asyncio.timeout(PART_SECONDS):
                part = await anext(parts)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise _too_slow(PART_SECONDS) from None
        size += len(part)
        if size > limit:
            raise too_large
        yield part


def _too_slow(seconds: float) -> Refused:
    """Return the error (``body-too-slow``) for a body that does not arrive within ``seconds``."""
    return Refused(f"the body was not received within {seconds:g} s", code="body-too-slow")


def content_length(request: Request) -> int | None:
    """Return the size of the body in bytes according to the Content-Length header; None if there is no valid header."""
    announced = request.headers.get("content-length", "")
    return int(announced[:20]) if announced.isascii() and announced.isdigit() else None


def media_type_of(request: Request) -> str:
    """Return the media type of the request body: without parameters, in lower case; "" if there is no Content-Type header."""
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


def decode(body: RawBody, *, yaml: bool = False, check_storable: bool = True) -> Any:
    """Return the data of a JSON body, or with ``yaml`` of a JSON or YAML body; ``{}`` for an empty one. Raises ``Refused`` and
    ``SpecError``."""
    if not body.content.strip():
        return {}
    allowed = JSON_TYPES | YAML_TYPES if yaml else JSON_TYPES
    if body.media_type not in allowed:
        wanted = "application/json or application/yaml" if yaml else "application/json"
        raise Refused(
            f"content type {body.media_type or 'missing'!r} is not supported here: send {wanted}",
            code="unsupported-media-type",
        )
    data = _yaml(body.content) if body.media_type in YAML_TYPES else _json(body.content)
    problems = find_unstorable(data) if check_storable else []
    if problems:
        raise SpecError(f"{problems[0].pointer or '/'}: {problems[0].detail}", code="invalid-value", errors=problems)
    return data


def _json(content: bytes) -> Any:
    """Return the data of a JSON text in UTF-8. Raises ``Refused`` (``invalid-json``), also for NaN and Infinity."""
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(f"not valid JSON: {_error_text(error)}", code="invalid-json") from None


def _refuse_constant(name: str) -> Any:
    """Raise ``ValueError`` for NaN or an infinity in JSON. The JSON parser calls it."""
    raise ValueError(f"{name} is not a JSON value")


def _yaml(content: bytes) -> Any:
    """Return the data of a YAML text in UTF-8. Raises ``Refused`` or ``SpecError``, both with the code ``invalid-yaml``."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"not valid YAML: {_error_text(error)}", code="invalid-yaml") from None
    return load_spec_text(text)


def _error_text(error: BaseException) -> str:
    """Return the text of a parser's error, at most 300 characters."""
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:300]


def find_unstorable(data: Any) -> list[FieldProblem]:
    """Return problems, at most ten, with values in ``data`` that cannot be stored, such as NaN."""
    out: list[FieldProblem] = []
    stack: list[tuple[Any, tuple[str | int, ...]]] = [(data, ())]
    visits = 0
    while stack and len(out) < _MOST_PROBLEMS:
        value, path = stack.pop()
        visits += 1
        # with YAML anchors, a small text can stand for a huge document
        if visits > MAX_VALUES:
            return [FieldProblem(pointer="", code="too-many-values", detail=f"more than {MAX_VALUES} values")]
        fault = _unstorable_reason(value) or (
            ("too-deep", f"nested deeper than {MAX_DEPTH}") if len(path) > MAX_DEPTH else None
        )
        if fault:
            out.append(FieldProblem(pointer=pointer_of(path), code=fault[0], detail=fault[1]))
        elif isinstance(value, dict):
            for key, item in value.items():
                if len(out) >= _MOST_PROBLEMS:
                    break
                fault = (
                    _unstorable_reason(key)
                    if isinstance(key, str)
                    else ("key-not-text", f"the key {key!r} must be text: quote it")
                )
                if fault:
                    out.append(FieldProblem(pointer=pointer_of(path), code=fault[0], detail=fault[1]))
                else:
                    stack.append((item, (*path, key)))
        elif isinstance(value, list):
            stack.extend((item, (*path, i)) for i, item in enumerate(value))
    return out


def _unstorable_reason(value: Any) -> tuple[str, str] | None:
    """Return code and text of the reason why a value, apart from its items, cannot be stored; None if it can."""
    if isinstance(value, str):
        if _UNSTORABLE.search(value):
            return "invalid-character", "text with a NUL character or half a surrogate pair cannot be stored"
    elif isinstance(value, int):  # bool too
        if abs(value) > _MAX_INT:
            return "number-too-large", "whole numbers must fit 64 bits"
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            return "not-finite", "NaN and infinity are not JSON values"
    elif value is not None and not isinstance(value, dict | list):
        return "not-json", f"a {type(value).__name__} is not a JSON value: quote it to make it text"
    return None


def parse(model: type[M], data: Any) -> M:
    """Return ``data`` as an instance of ``model``. Raises ``SpecError`` (``invalid-body``)."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = [problem_of(e, model) for e in error.errors(include_url=False)[:50]]
    first = problems[0]
    raise SpecError(f"{first.pointer or '/'}: {first.detail}", code="invalid-body", errors=problems)
