"""Stores the messages that an attempt's dead agents left in their own and in their ranks' spools, each once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

from pydantic import TypeAdapter, ValidationError

from ratchet_contract.errors import Refused
from ratchet_contract.paths import JobPaths
from ratchet_contract.phases import EventType, NoteType
from ratchet_contract.plural import pluralize
from ratchet_contract.protocol.messages import AGENT_RANK, Note, RankBatch, RankMessage, node_of_agent_rank, node_rank
from ratchet_service.agent_reports.checkpoint_effects import hook_iterations
from ratchet_service.agent_reports.fast_rows import read_shape
from ratchet_service.agent_reports.ingest import ingest_batches
from ratchet_service.config.output_limits import DEFAULT_BOUNDS, Bounds
from ratchet_service.db.engine import Database
from ratchet_service.db.leases import Lease, lock_leased_job
from ratchet_service.db.models import Attempt, AttemptNode
from ratchet_service.db.transitions import add_event
from ratchet_service.isolation.file_access import OF_THE_SYSTEM, open_read

BATCH: Final = 500
_MAX_LINE_BYTES: Final = 16 << 20  # bytes of a line: as much as a report may have
_MESSAGE: Final[TypeAdapter[RankMessage]] = TypeAdapter(RankMessage)


def ingest_leftover(
    database: Database,
    job_paths: JobPaths,
    lease: Lease,
    nodes: int,
    ranks_per_node: int,
    bounds: Bounds = DEFAULT_BOUNDS,
) -> int:
    """Store the messages in the attempt's spools that are not stored yet, and return how many were stored. Agents and ranks must
    be dead. A spool's unreadable rest is left out, with an event. Raise ``LeaseLost``, and ``OSError`` for errors of the disk
    or of this process."""
    paths = job_paths.attempt(lease.attempt)
    with database.read() as session:
        rows = [session.get(AttemptNode, (lease.job_id, lease.attempt, node)) for node in range(nodes)]
        acked = {int(rank): seq for row in rows if row is not None for rank, seq in row.acked.items()}
    stored = 0
    spools = {rank: paths.spool(rank) for rank in range(nodes * ranks_per_node)}
    spools[AGENT_RANK] = paths.agent_spool  # after them: it refers to what rank 0 has reported
    spools |= {node_rank(node): paths.node_spool(node) for node in range(nodes)}
    unread = list[str]()
    for rank, spool in spools.items():
        for batch in _readable_batches(spool, rank, acked.get(rank, 0), unread):
            iterations = hook_iterations([batch], job_paths)
            with database.write() as session:
                job = lock_leased_job(session, lease)
                attempt = session.get_one(Attempt, (job.id, lease.attempt))
                agent_node = node_of_agent_rank(rank)
                number = max(0, rank) // ranks_per_node if agent_node is None else agent_node
                node = session.get_one(AttemptNode, (job.id, lease.attempt, number))
                shape = read_shape(session, job.id)._replace(nodes=nodes, ranks_per_node=ranks_per_node)
                try:
                    stored += ingest_batches(session, job, attempt, node, [batch], iterations, bounds, shape)
                except Refused as error:  # user code wrote the file: it is to keep no attempt from ending
                    text = f"{spool.name} is not read: {error}"
                    add_event(session, job.id, EventType.MESSAGE_DROPPED, text, attempt=lease.attempt)
                    break
    if unread:
        others = f" (and {pluralize(len(unread) - 1, 'other file')})" if len(unread) > 1 else ""
        with database.write() as session:
            job = lock_leased_job(session, lease)
            add_event(session, job.id, EventType.MESSAGE_DROPPED, unread[0] + others, attempt=lease.attempt)
    return stored


def _readable_batches(spool: Path, rank: int, acked: int, unread: list[str]) -> Iterator[RankBatch]:
    """Yield what ``batches`` yields. An ``OSError`` that user code may have caused ends the iteration, and a text about it is
    added to ``unread``. Errors in ``OF_THE_SYSTEM`` are raised."""
    try:
        yield from batches(spool, rank, acked)
    except OSError as error:
        # other errors may be of user code, which must not keep the attempt from ending
        if error.errno in OF_THE_SYSTEM:
            raise
        unread.append(f"{spool.name} is not read: {error}")


def batches(spool: Path, rank: int, acked: int) -> Iterator[RankBatch]:
    """Yield a spool file's complete lines in batches, without the first ``acked`` lines. If there is no file, yield nothing. A
    line that is too long becomes a note, and the lines after it are not read. Raise ``OSError``."""
    try:
        handle = open_read(spool)
    except FileNotFoundError:
        return
    with handle:
        rest = islice(_lines(handle), acked, None)
        seq = acked + 1
        while chunk := list(islice(rest, BATCH)):
            messages = [_parse(line, rank, seq + i, spool.name) for i, line in enumerate(chunk)]
            yield RankBatch(rank=rank, from_seq=seq, messages=messages)
            seq += len(chunk)


def _lines(handle: BinaryIO) -> Iterator[bytes]:
    """Yield the complete lines of a spool file. A line that is too long is cut, and is the last one that is yielded."""
    while line := handle.readline(_MAX_LINE_BYTES):
        whole = line.endswith(b"\n")
        if whole or len(line) == _MAX_LINE_BYTES:
            yield line
        if not whole:
            return


def _parse(line: bytes, rank: int, seq: int, name: str) -> RankMessage:
    """Parse one line of a spool; for an invalid line, return a note that says so. ``name``: the file's name."""
    try:
        return _MESSAGE.validate_json(line)
    except ValidationError as error:  # the line keeps its number, so the ones after it are not lost
        first = error.errors(include_url=False, include_input=False)[0]["msg"]
        at = datetime.now(UTC).isoformat()
        return Note(
            rank=rank,
            at=at,
            type=NoteType.BAD_MESSAGE,
            message=f"line {seq} of {name} is not a valid message: {first}"[:4000],
        )
