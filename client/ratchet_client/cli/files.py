"""``ratchet files`` and ``ratchet cp``: what a job left in its working directory, listed and fetched."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli import output
from ratchet_client.cli.common import LOOK, JsonFlag, ReadJobId, job_id_of, open_client
from ratchet_client.cli.signals import interruptible
from ratchet_contract.plural import counted

if TYPE_CHECKING:
    from ratchet_client.client import RatchetClient
    from ratchet_contract import api

All = Annotated[bool, typer.Option("--all", help="With the code that the job began with and has not changed.")]
_COUNTED = 1000
_NAMED = 3


def register(app: typer.Typer) -> None:
    for command in (files, cp):
        app.command(rich_help_panel=LOOK)(command)


def files(
    ctx: typer.Context,
    job: ReadJobId,
    path: Annotated[
        str, typer.Argument(metavar="[PATH]", help="A file or directory of it. (default: all)", show_default=False)
    ] = "",
    everything: All = False,
    limit: Annotated[int, typer.Option(min=1, help="Largest number of names to list.")] = 1000,
    as_json: JsonFlag = False,
) -> None:
    """List what a job wrote to its working directory, its outputs; `ratchet cp` fetches them."""
    with open_client(ctx) as client:
        listed = client.files(job, path, everything=everything, page_size=min(limit, 1000))
        found = list(islice(listed, limit))
        more = next(listed, None) is not None
    if as_json:
        output.emit(found)
    else:
        output.table(
            ["SIZE", "AGE", "KIND", "PATH"],
            [[output.size(f.size), output.age(f.modified_at), _kind(f), shown(f.path)] for f in found],
            right=["SIZE", "AGE"], drop=["KIND", "AGE", "SIZE"],
            empty=f"nothing yet; what {job} writes below its current directory is listed here",
        )  # fmt: skip
    if more:
        output.note(f"more than {limit} names: give --limit, or the PATH of a directory")


def _kind(file: api.FileView) -> str:
    words = [file.kind, "from the code" if file.from_code else "", file.refused or ""]
    return ", ".join(word for word in words if word and word != "symbolic-link" and word != "special-file")


def shown(path: str) -> str:
    """For a terminal, which characters of a name must not steer."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in path)


def cp(
    ctx: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="JOB:[PATH]", help="The job, a colon, and a file or directory of `ratchet files`; without PATH all."
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where it goes, under its own name; made if need be.")],
    everything: All = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Fetch what a job wrote: a file, or a directory with all that is in it. Nothing is written unless all of it has arrived."""
    name, colon, path = source.partition(":")
    if not colon or not name:
        raise typer.BadParameter(f"give JOB:PATH, or JOB: for all of it, not {source!r}")
    with interruptible(), open_client(ctx) as client:
        job = job_id_of(ctx, name)
        bar = partial(output.progress, what=shown(path) or job)
        found = client.fetch_files(job, folder, path, everything=everything, force=force, bar=bar)
    for file in found.files:
        output.line(shown(str(file)))
    for text in found.notes:
        output.note(f"note: {text}")
    if not found.files:
        output.note(
            "no file in it" if path else f"{job} has written no file; `ratchet files {job} --all` shows its code"
        )


def tell(client: RatchetClient, job: api.JobView) -> None:
    """On stderr, where what an ended job wrote is; nothing where it wrote nothing."""
    if (found := written(client, job)) is not None:
        output.note(f"outputs: {found}; see: ratchet files {job.id}; fetch: ratchet cp {job.id}: DIR")


def written(client: RatchetClient, job: api.JobView) -> str | None:
    """What a job has written: up to three files by their names, or how many, and their size. None where it wrote nothing, or the
    service does not answer."""
    from ratchet_contract.errors import RatchetError

    try:
        listed = client.files(job.id)
        found = [f for f in islice(listed, _COUNTED) if f.kind == "file"]
        more = next(listed, None) is not None
    except RatchetError:
        return None
    if not found:
        return None
    few = len(found) <= _NAMED and not more
    what = ", ".join(shown(f.path) for f in found) if few else counted(len(found), "file")
    return f"{what} ({output.size(sum(f.size or 0 for f in found))})" + " or more" * more
