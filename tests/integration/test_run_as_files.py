"""Attempts that have a user of their own: their agents, and what the service does in their directories."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.errors import CheckpointError
from ratchet_contract.messages import AgentFile
from ratchet_contract.paths import HomePaths
from ratchet_service import file_owner, object_store, worker_user
from ratchet_service.confined import Confined, User
from ratchet_service.database import Database, sqlite_url
from ratchet_service.launchers import files, processes
from ratchet_service.launchers.base import AttemptRef, LaunchError
from ratchet_service.launchers.local import LocalLauncher
from ratchet_service.models import Checkpoint, Job
from ratchet_service.usecases.logs import LogFilter, read_lines
from ratchet_store.files import MISSING
from ratchet_store.objects import Found, ObjectStore
from ratchet_store.remote import RemoteCheckpoints
from tests.integration.test_local_launcher import launch
from tests.support.run_as import AS_ROOT, UID, USER, open_directory, open_home, status
from tests.support.server import wait_for

JOB = "job-0123456789ab"


@pytest.fixture
def home() -> Iterator[HomePaths]:
    with open_home() as paths:
        yield paths


AGENT = """
cd "$(dirname "$0")" && cat /proc/self/status > told && { cat "$0" > /dev/null && echo may-read >> told; }
sleep 3600
"""


def submitted(home: HomePaths) -> tuple[LocalLauncher, AttemptRef]:
    """An attempt whose agent is a shell, so that no interpreter need be reached by the user."""
    launcher = LocalLauncher(home, ("/bin/sh", "-c", AGENT), {"PATH": os.environ["PATH"]}, Confined(USER))
    plan = launcher.plan(launch(home))
    launcher.submit(plan)
    wait_for(lambda: "may-read" in files.tail(plan.ref.paths.root / "told", 10_000), "the agent to tell", 30)
    return launcher, plan.ref


@AS_ROOT
def test_an_agent_is_its_user_has_its_jobs_directory_and_can_be_proved_dead(home: HomePaths) -> None:
    launcher, ref = submitted(home)
    told = status((ref.paths.root / "told").read_text())
    assert told["Uid"] == [str(UID)] * 4 and told["NoNewPrivs"] == ["1"]
    root = home.job(ref.job_id).root
    assert (root.stat().st_mode & 0o777, root.parent.stat().st_uid) == (0o700, 0)
    assert {path.lstat().st_uid for path in (root, *root.rglob("*"))} == {UID}
    assert ref.paths.launch_file.stat().st_mode & 0o777 == 0o600
    again = LocalLauncher(home, confined=Confined(USER))  # after a restart
    assert again.poll(ref).alive
    found = [pid for pid, _ in processes.values_of("RATCHET_ATTEMPT_DIR") if processes.is_of(pid, UID)]
    assert again.sweep(lambda names: names) == [] and found
    assert again.kill(ref)
    wait_for(lambda: launcher.kill(ref) == [], "the attempt to be dead", 10)


@AS_ROOT
def test_a_directory_of_before_is_handed_over_and_what_is_anothers_is_not(home: HomePaths) -> None:
    root = home.job(JOB).root
    (root / "work" / "deep").mkdir(parents=True)
    (root / "work" / "deep" / "own.pt").write_text("x")
    (root / "work" / "away").symlink_to(home.home / "secret")
    (home.home / "secret").write_text("x")
    file_owner.give(root, UID, UID)
    assert {path.lstat().st_uid for path in (root, *root.rglob("*"))} == {UID}
    assert (home.home / "secret").stat().st_uid == 0
    os.link(home.home / "secret", root / "work" / "linked")  # as that user can, where the system does not protect links
    with pytest.raises(PermissionError, match="linked, which belongs to user 0"):
        file_owner.give(root, UID + 1, UID + 1)
    assert (home.home / "secret").stat().st_uid == 0 and root.stat().st_uid == UID


@AS_ROOT
def test_no_link_of_users_code_leads_the_service_anywhere_that_the_user_could_not_go(home: HomePaths) -> None:
    launcher, ref = submitted(home)
    secret, target = home.home / "ratchet.db", home.home / "made"
    secret.write_text("the service's own\n")
    secret.chmod(0o600)
    logs = ref.paths.log(0).parent
    as_user = {"user": UID, "group": UID, "check": True}
    subprocess.run(["/bin/sh", "-c", f"mkdir {logs}; ln -s {secret} {ref.paths.log(0)}"], **as_user)
    subprocess.run(["ln", "-s", str(target), str(ref.paths.fence_file)], **as_user)
    subprocess.run(["/bin/sh", "-c", f"rm {ref.paths.agent_log}; ln -s {secret} {ref.paths.agent_log}"], **as_user)
    assert list(read_lines(home.job(ref.job_id), LogFilter())) == []
    assert launcher.logs(ref, 1000) == ""
    files.fence(ref.paths)
    assert not ref.paths.fence_file.is_symlink() and ref.paths.fence_file.exists()
    assert not target.exists() and secret.read_text() == "the service's own\n"
    with file_owner.as_owner(ref.paths.root), file_owner.as_owner(ref.paths.root), pytest.raises(PermissionError):
        secret.read_text()
    assert secret.read_text()  # and outside it is the service again
    launcher.kill(ref)


@AS_ROOT
def test_users_code_that_locks_its_own_directory_is_ended_all_the_same(home: HomePaths) -> None:
    launcher, ref = submitted(home)
    subprocess.run(["chmod", "000", str(ref.paths.root)], user=UID, group=UID, check=True)
    files.fence(ref.paths)
    for wanted in (LogFilter(), LogFilter(rank=0), LogFilter(since=datetime.now(UTC))):
        assert list(read_lines(home.job(ref.job_id), wanted)) == []
    assert launcher.kill(ref)
    wait_for(lambda: launcher.kill(ref) == [], "the attempt to be dead", 10)


@AS_ROOT
def test_users_code_that_names_another_process_as_its_agent_has_it_not_ended(
    home: HomePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, ref = submitted(home)
    ended: list[int] = []
    monkeypatch.setattr(processes, "kill", lambda pid, number=signal.SIGKILL: ended.append(pid))
    with subprocess.Popen(["sleep", "60"]) as other:
        started = processes.start_time(other.pid)
        assert started is not None
        forged = AgentFile(pid=other.pid, start_time=started, host="here").model_dump_json()
        write = f"cat > {ref.paths.agent_file}; exec 9>{ref.paths.lock_file}; flock 9; exec sleep 60"
        with subprocess.Popen(["/bin/sh", "-c", write], user=UID, group=UID, stdin=subprocess.PIPE) as holder:
            assert holder.stdin is not None
            holder.stdin.write(forged.encode())
            holder.stdin.close()
            wait_for(lambda: files.lock_is_held(ref.paths.lock_file), "the lock to be held", 10)
            launcher.stop(ref, 1.0)
            assert f"process {other.pid}" in launcher.kill(ref)  # the lock is held: nothing is proved
            assert other.pid not in ended and ended  # but the agent itself
            monkeypatch.undo()
            holder.send_signal(signal.SIGKILL)
        other.kill()


def file_user() -> int:
    """By whose rights this thread's file accesses are judged."""
    return int(status(Path("/proc/thread-self/status").read_text())["Uid"][3])


@AS_ROOT
def test_copies_are_asked_for_by_the_services_rights_and_written_by_the_jobs_users(
    home: HomePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client reads its credentials from files, too, and keeps the threads that it starts for everybody's requests."""
    asked, wrote = set[int](), list[int]()

    class Copies(ObjectStore):
        def head(self, name: str) -> Found:
            asked.add(file_user())
            raise CheckpointError("gone", code=MISSING)

        def get_range(self, name: str, begin: int, end: int) -> memoryview:
            asked.add(file_user())
            return memoryview(b"")

        def list(self, prefix: str = "") -> dict[str, int]:
            asked.add(file_user())
            return {}

    def fetch(remote: RemoteCheckpoints, folder: str, checkpoints: Path, quarantine: Path) -> None:
        wrote.append(file_user())
        objects = remote.objects
        for act in (objects.list, lambda: objects.get_range("", 0, 0), lambda: wrote.append(file_user())):
            thread = threading.Thread(target=act)
            thread.start()
            thread.join()
        remote.raw_manifest(folder)

    file_owner.give(home.job(JOB).root, UID, UID)
    monkeypatch.setattr(object_store, "open_job", lambda *_: RemoteCheckpoints(Copies(None, "s3://copies"), JOB))
    monkeypatch.setattr(object_store, "fetch", fetch)
    job = Job(id=JOB, spec={"checkpoint": {"uri": "s3://copies"}})
    row = Checkpoint(job_id=JOB, step=6, epoch=1, state="committed", uploaded_at=datetime.now(UTC))
    object_store.provide(home, job, row)
    assert asked == {0} and wrote == [UID, UID] and file_user() == 0


def test_an_attempt_of_two_nodes_has_an_agent_of_its_users_for_each(home: HomePaths) -> None:
    made = launch(home)
    world = made.spec.world.model_copy(update={"nodes": 2})
    made = made.model_copy(update={"spec": made.spec.model_copy(update={"world": world})})
    told = 'cat /proc/self/status > "$(dirname "$0")/told$2"; sleep 3600'
    confined = Confined(USER if os.geteuid() == 0 else None)
    launcher = LocalLauncher(home, ("/bin/sh", "-c", told), {"PATH": os.environ["PATH"]}, confined)
    plan = launcher.plan(made)
    launcher.submit(plan)
    for node in (0, 1):
        file = plan.ref.paths.root / f"told{node}"
        wait_for(lambda file=file: "NoNewPrivs" in files.tail(file, 10_000), "both agents to tell", 30)  # type: ignore[misc]
        uid = os.geteuid() if confined.user is None else UID
        assert status(file.read_text())["Uid"] == [str(uid)] * 4
        assert plan.ref.paths.node(node).agent_log.stat().st_uid == uid
    assert len(launcher.kill(plan.ref)) >= 2
    wait_for(lambda: launcher.kill(plan.ref) == [], "the attempt to be dead", 10)


@AS_ROOT
def test_a_launch_file_that_leads_elsewhere_starts_nothing(home: HomePaths) -> None:
    launcher = LocalLauncher(home, ("/bin/true",), {}, Confined(USER))
    elsewhere = home.home / "elsewhere" / "attempts" / "0001"
    with pytest.raises(LaunchError, match="no attempt of the run directory"):
        launcher.submit(launcher.plan(launch(home).model_copy(update={"attempt_dir": str(elsewhere)})))
    assert not elsewhere.exists()


def test_what_a_starting_process_is_told_is_open_to_nobody_else() -> None:
    """It says whom to become: who could write it, by a link of his that the service follows to its own /proc, would be root."""
    with Confined(USER).command(["/bin/true"], {"KEY": "secret"}) as started:
        assert os.fstat(started.fds[0]).st_mode & 0o777 == 0


@AS_ROOT
def test_no_link_leads_to_what_the_service_has_open(home: HomePaths) -> None:
    launcher, ref = submitted(home)
    with Confined(USER).command(["/bin/true"], {"KEY": "secret"}) as started:
        for target in (f"/proc/self/fd/{started.fds[0]}", "/proc/self/maps"):
            script = f"ln -sf {target} {ref.paths.agent_log}"
            subprocess.run(["/bin/sh", "-c", script], user=UID, group=UID, check=True)
            assert launcher.logs(ref, 1000) == ""
            with pytest.raises(OSError, match=r"Too many levels of symbolic links"):
                launcher._start(launcher.plan(launch(home)), 0, {})
    launcher.kill(ref)


@AS_ROOT
def test_a_name_that_changes_hands_while_a_directory_is_handed_over_takes_nothing_with_it(
    home: HomePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the former user's processes do between the look and the act."""
    root, secret, real = home.job(JOB).root, home.home / "secret", os.chown
    root.mkdir(parents=True)
    (root / "own.pt").write_text("x")
    secret.write_text("x")
    mine = (root / "own.pt").stat().st_ino

    def swapped(path: str, uid: int, gid: int, **more: Any) -> None:
        if os.stat(path, dir_fd=more.get("dir_fd")).st_ino == mine:
            (root / "own.pt").unlink()
            os.link(secret, root / "own.pt")
        real(path, uid, gid, **more)

    monkeypatch.setattr(os, "chown", swapped)
    file_owner.give(root, UID, UID)
    assert secret.stat().st_uid == 0


@pytest.mark.parametrize(("before", "after"), [(0o700, 0o700), (0o755, 0o755)])
def test_what_the_run_directory_kept_from_everybody_stays_so(before: int, after: int) -> None:
    """Copies of the database in a directory of their own: the run directory is opened, they are not."""
    with open_directory() as root:
        home = HomePaths(root / "home")
        (home.home / "copies").mkdir(parents=True)
        (home.home / "copies").chmod(0o755)
        home.home.chmod(before)
        worker_user._shut(home, None)
        worker_user._shut(home, None)  # the next start
        assert home.home.stat().st_mode & 0o777 == home.jobs.stat().st_mode & 0o777 == 0o711
        assert (home.home / "copies").stat().st_mode & 0o777 == after


def acting() -> int:
    """This thread's user for files."""
    return file_owner._present()[0]


@AS_ROOT
def test_rights_that_would_leak_are_refused(home: HomePaths, tmp_path: Path) -> None:
    """An event loop's other tasks, a generator that stands still, a thread that was started within: each would read, or write the
    database, as a job's user, or what a job's user may not as root."""
    root = home.job(JOB).root
    file_owner.give(root, UID, UID)
    database = Database(sqlite_url(tmp_path / "ratchet.db"))

    async def within() -> None:
        with file_owner.as_owner(root):
            await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="other tasks"):
        asyncio.run(within())
    assert acting() == 0

    def standing() -> Iterator[int]:
        with file_owner.as_owner(root):
            yield acting()

    stands = standing()
    assert next(stands) == UID
    for session in (database.read, database.write):
        with pytest.raises(RuntimeError, match=f"opens files as user {UID}"), session():
            pass
    inner = file_owner.as_user(User(UID + 1, UID + 1, (), "/", "x"))
    inner.__enter__()
    with pytest.raises(RuntimeError, match="before one within it"):
        stands.close()
    inner.__exit__(None, None, None)
    assert acting() == UID
    file_owner._become(0, 0)

    told: list[BaseException] = []

    def child() -> None:
        try:
            with database.read():
                pass
        except RuntimeError as error:
            told.append(error)

    with file_owner.as_owner(root):
        started = threading.Thread(target=child)
        started.start()
        with file_owner.as_service(), database.read():
            pass
    started.join(30)
    assert len(told) == 1 and acting() == 0
    database.dispose()


@AS_ROOT
def test_a_block_that_another_thread_leaves_is_told(home: HomePaths) -> None:
    root = home.job(JOB).root
    file_owner.give(root, UID, UID)
    block = file_owner.as_owner(root)
    told: list[str] = []

    def leave() -> None:
        with pytest.raises(RuntimeError, match="left by another thread"):
            block.__exit__(None, None, None)
        told.append("refused")

    block.__enter__()
    try:
        other = threading.Thread(target=leave)
        other.start()
        other.join(30)
        assert told == ["refused"] and acting() == UID
    finally:
        file_owner._become(0, 0)
