"""``ratchet files`` and ``ratchet cp``: list and download the files that a job wrote to its working directory."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.options import LOOK, JsonFlag, ReadJobId, job_id_of, open_client
from ratchet_client.cli.shared.signals import interruptible
from ratchet_contract.plural import pluralize

if TYPE_CHECKING:
    from ratchet_client.resources.client import RatchetClient
    from ratchet_contract.api import views

All = Annotated[bool, typer.Option("--all", help="Also list the job's code files that it has not changed.")]
_MAX_COUNTED = 1000
_MAX_NAMED = 3


def register(app: typer.Typer) -> None:
    for command in (files, cp):
        app.command(rich_help_panel=LOOK)(command)


def files(
    ctx: typer.Context,
    job: ReadJobId,
    path: Annotated[
        str, typer.Argument(metavar="[PATH]", help="Only this file or directory. (default: all)", show_default=False)
    ] = "",
    everything: All = False,
    limit: Annotated[int, typer.Option(min=1, max=10**9, help="Largest number of names to list.")] = 1000,
    as_json: JsonFlag = False,
) -> None:
    """List the files that a job wrote to its working directory, its outputs; `ratchet cp` fetches them."""
    with open_client(ctx) as client:
        listed = client.files(job, path, everything=everything, page_size=min(limit, 1000))
        found = list(islice(listed, limit))
        more = next(listed, None) is not None
    if as_json:
        output.emit(found)
    else:
        output.table(
            ["SIZE", "AGE", "KIND", "PATH"],
            [[output.size(f.size), output.age(f.modified_at), _kind(f), escape_path(f.path)] for f in found],
            right=["SIZE", "AGE"], drop=["KIND", "AGE", "SIZE"],
            empty=f"no files yet; files that {job} writes below its current directory are listed here",
        )  # fmt: skip
    if more:
        output.note(f"more than {limit} names: give --limit, or the PATH of a directory")


def _kind(file: views.FileView) -> str:
    """Return the table's text for a file: its kind, and whether it is unchanged code or cannot be fetched."""
    words = [file.kind, "from the code" if file.from_code else "", file.refused or ""]
    return ", ".join(word for word in words if word and word != "symbolic-link" and word != "special-file")


def escape_path(path: str) -> str:
    """Return ``path`` with its non-printable characters escaped, so that a file name cannot send control sequences to the
    terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in path)


def cp(
    ctx: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="JOB:[PATH]",
            help="The job, a colon, and a file or directory in `ratchet files`; without PATH, all.",
        ),
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Destination directory, created if missing; names are kept.")
    ],
    everything: All = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Fetch files that a job wrote: one file, or a directory with its contents. Writes nothing until everything is received."""
    name, colon, path = source.partition(":")
    if not colon or not name:
        raise typer.BadParameter(f"give JOB:PATH, or JOB: for all files, not {source!r}")
    with interruptible(), open_client(ctx) as client:
        job = job_id_of(ctx, name)
        bar = partial(output.progress, what=escape_path(path) or job)
        found = client.fetch_files(job, folder, path, everything=everything, force=force, bar=bar)
    for file in found.files:
        output.line(escape_path(str(file)))
    for text in found.notes:
        output.note(f"note: {text}")
    if not found.files:
        output.note(
            "no file in it" if path else f"{job} has written no file; `ratchet files {job} --all` shows its code"
        )


def print_outputs(client: RatchetClient, job: views.JobView) -> None:
    """Print on standard error which files the job wrote, and the commands that show and fetch them; print nothing if there are
    none or the request fails."""
    if (found := outputs_text(client, job)) is not None:
        output.note(f"outputs: {found}; see: ratchet files {job.id}; fetch: ratchet cp {job.id}: DIR")


def outputs_text(client: RatchetClient, job: views.JobView) -> str | None:
    """Return a text with the names and the total size of the files that a job has written. For many files the text has their
    number instead of the names. Return None if there are none or the request fails."""
    from ratchet_contract.errors import RatchetError

    try:
        listed = client.files(job.id)
        found = [f for f in islice(listed, _MAX_COUNTED) if f.kind == "file"]
        more = next(listed, None) is not None
    except RatchetError:
        return None
    if not found:
        return None
    few = len(found) <= _MAX_NAMED and not more
    what = ", ".join(escape_path(f.path) for f in found) if few else pluralize(len(found), "file")
    return f"{what} ({output.size(sum(f.size or 0 for f in found))})" + " or more" * more
