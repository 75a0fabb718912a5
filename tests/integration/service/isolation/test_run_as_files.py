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
from ratchet_contract.paths import HomePaths
from ratchet_contract.processes import procfs
from ratchet_contract.protocol.messages import AgentFile
from ratchet_service.checkpoints import object_store
from ratchet_service.db.engine import Database, sqlite_url
from ratchet_service.db.models import Checkpoint, Job
from ratchet_service.isolation import file_access, run_as
from ratchet_service.isolation.sandbox import Sandbox, User
from ratchet_service.job_files.log_files import LogFilter
from ratchet_service.launchers import attempt_files
from ratchet_service.launchers.base import AttemptRef, LaunchError
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_service.usecases.logs import read_lines
from ratchet_store.filesystem.durable_io import MISSING
from ratchet_store.object_store.client import Found, ObjectStore
from ratchet_store.object_store.remote_checkpoints import RemoteCheckpoints
from tests.integration.service.launchers.test_local import launch
from tests.support.run_as import AS_ROOT, UID, USER, open_directory, open_home, parse_proc_status
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
    launcher = LocalLauncher(home, ("/bin/sh", "-c", AGENT), {"PATH": os.environ["PATH"]}, Sandbox(USER))
    plan = launcher.plan(launch(home))
    launcher.submit(plan)
    wait_for(lambda: "may-read" in attempt_files.tail(plan.ref.paths.root / "told", 10_000), "the agent to tell", 30)
    return launcher, plan.ref


@AS_ROOT
def test_agent_under_run_as_owns_the_job_directory_and_can_be_killed(home: HomePaths) -> None:
    launcher, ref = submitted(home)
    told = parse_proc_status((ref.paths.root / "told").read_text())
    assert told["Uid"] == [str(UID)] * 4 and told["NoNewPrivs"] == ["1"]
    root = home.job(ref.job_id).root
    assert (root.stat().st_mode & 0o777, root.parent.stat().st_uid) == (0o700, 0)
    assert {path.lstat().st_uid for path in (root, *root.rglob("*"))} == {UID}
    assert ref.paths.launch_file.stat().st_mode & 0o777 == 0o600
    again = LocalLauncher(home, sandbox=Sandbox(USER))  # after a restart
    assert again.poll(ref).alive
    found = [pid for pid, _ in procfs.processes_with_variable("RATCHET_ATTEMPT_DIR") if procfs.runs_as(pid, UID)]
    assert again.sweep(lambda names: names) == [] and found
    assert again.kill(ref)
    wait_for(lambda: launcher.kill(ref) == [], "the attempt to be dead", 10)


@AS_ROOT
def test_give_changes_ownership_of_a_job_directory_but_not_of_foreign_files(home: HomePaths) -> None:
    root = home.job(JOB).root
    (root / "work" / "deep").mkdir(parents=True)
    (root / "work" / "deep" / "own.pt").write_text("x")
    (root / "work" / "away").symlink_to(home.home / "secret")
    (home.home / "secret").write_text("x")
    file_access.give_to_user(root, UID, UID)
    assert {path.lstat().st_uid for path in (root, *root.rglob("*"))} == {UID}
    assert (home.home / "secret").stat().st_uid == 0
    os.link(home.home / "secret", root / "work" / "linked")  # as that user can, where the system does not protect links
    with pytest.raises(PermissionError, match="linked, which belongs to user 0"):
        file_access.give_to_user(root, UID + 1, UID + 1)
    assert (home.home / "secret").stat().st_uid == 0 and root.stat().st_uid == UID


@AS_ROOT
def test_service_does_not_follow_links_of_users_code_to_protected_files(home: HomePaths) -> None:
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
    attempt_files.fence(ref.paths)
    assert not ref.paths.fence_file.is_symlink() and ref.paths.fence_file.exists()
    assert not target.exists() and secret.read_text() == "the service's own\n"
    with file_access.as_owner(ref.paths.root), file_access.as_owner(ref.paths.root), pytest.raises(PermissionError):
        secret.read_text()
    assert secret.read_text()  # and outside it is the service again
    launcher.kill(ref)


@AS_ROOT
def test_attempt_that_locks_its_own_directory_is_still_killed(home: HomePaths) -> None:
    launcher, ref = submitted(home)
    subprocess.run(["chmod", "000", str(ref.paths.root)], user=UID, group=UID, check=True)
    attempt_files.fence(ref.paths)
    for wanted in (LogFilter(), LogFilter(rank=0), LogFilter(since=datetime.now(UTC))):
        assert list(read_lines(home.job(ref.job_id), wanted)) == []
    assert launcher.kill(ref)
    wait_for(lambda: launcher.kill(ref) == [], "the attempt to be dead", 10)


@AS_ROOT
def test_kill_does_not_end_a_process_named_in_a_forged_agent_file(
    home: HomePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, ref = submitted(home)
    ended: list[int] = []
    monkeypatch.setattr(procfs, "kill", lambda pid, number=signal.SIGKILL: ended.append(pid))
    with subprocess.Popen(["sleep", "60"]) as other:
        started = procfs.start_time(other.pid)
        assert started is not None
        forged = AgentFile(pid=other.pid, start_time=started, host="here").model_dump_json()
        write = f"cat > {ref.paths.agent_file}; exec 9>{ref.paths.lock_file}; flock 9; exec sleep 60"
        with subprocess.Popen(["/bin/sh", "-c", write], user=UID, group=UID, stdin=subprocess.PIPE) as holder:
            assert holder.stdin is not None
            holder.stdin.write(forged.encode())
            holder.stdin.close()
            wait_for(lambda: attempt_files.lock_is_held(ref.paths.lock_file), "the lock to be held", 10)
            launcher.stop(ref, 1.0)
            assert f"process {other.pid}" in launcher.kill(ref)  # the lock is held: nothing is proved
            assert other.pid not in ended and ended  # but the agent itself
            monkeypatch.undo()
            holder.send_signal(signal.SIGKILL)
        other.kill()


def file_user() -> int:
    """By whose rights this thread's file accesses are judged."""
    return int(parse_proc_status(Path("/proc/thread-self/status").read_text())["Uid"][3])


@AS_ROOT
def test_object_store_fetch_reads_as_service_and_writes_as_the_jobs_user(
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

    file_access.give_to_user(home.job(JOB).root, UID, UID)
    monkeypatch.setattr(
        object_store, "open_job_checkpoints", lambda *_: RemoteCheckpoints(Copies(None, "s3://copies"), JOB)
    )
    monkeypatch.setattr(object_store, "fetch", fetch)
    job = Job(id=JOB, spec={"checkpoint": {"uri": "s3://copies"}})
    row = Checkpoint(job_id=JOB, step=6, attempt=1, state="committed", uploaded_at=datetime.now(UTC))
    object_store.ensure_local(home, job, row)
    assert asked == {0} and wrote == [UID, UID] and file_user() == 0


@pytest.mark.parametrize("size", [17, 1 << 30])
def test_damaged_copy_in_the_object_store_is_reported_with_its_place(
    home: HomePaths, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    class Damaged(ObjectStore):
        def head(self, name: str) -> Found:
            return Found(size, None)

        def get_range(self, name: str, begin: int, end: int) -> memoryview:
            return memoryview(b"no manifest at all"[begin:end])

    store = RemoteCheckpoints(Damaged(None, "s3://copies/team"), JOB)
    monkeypatch.setattr(object_store, "open_job_checkpoints", lambda *_: store)
    job = Job(id=JOB, spec={"checkpoint": {"uri": "s3://copies/team"}})
    row = Checkpoint(job_id=JOB, step=6, attempt=1, state="committed", uploaded_at=datetime.now(UTC))
    with pytest.raises(CheckpointError, match=r"its copy cannot be fetched: s3://copies/team/step-0*6\.a0001/MANIFEST"):
        object_store.ensure_local(home, job, row)


def test_two_node_attempt_has_one_agent_per_node_under_the_jobs_user(home: HomePaths) -> None:
    made = launch(home)
    world = made.spec.world.model_copy(update={"nodes": 2})
    made = made.model_copy(update={"spec": made.spec.model_copy(update={"world": world})})
    told = 'cat /proc/self/status > "$(dirname "$0")/told$2"; sleep 3600'
    confined = Sandbox(USER if os.geteuid() == 0 else None)
    launcher = LocalLauncher(home, ("/bin/sh", "-c", told), {"PATH": os.environ["PATH"]}, confined)
    plan = launcher.plan(made)
    launcher.submit(plan)
    for node in (0, 1):
        file = plan.ref.paths.root / f"told{node}"
        wait_for(lambda file=file: "NoNewPrivs" in attempt_files.tail(file, 10_000), "both agents to tell", 30)  # type: ignore[misc]
        uid = os.geteuid() if confined.user is None else UID
        assert parse_proc_status(file.read_text())["Uid"] == [str(uid)] * 4
        assert plan.ref.paths.node(node).agent_log.stat().st_uid == uid
    assert len(launcher.kill(plan.ref)) >= 2
    wait_for(lambda: launcher.kill(plan.ref) == [], "the attempt to be dead", 10)


@AS_ROOT
def test_launch_with_an_attempt_directory_outside_the_home_is_refused(home: HomePaths) -> None:
    launcher = LocalLauncher(home, ("/bin/true",), {}, Sandbox(USER))
    elsewhere = home.home / "elsewhere" / "attempts" / "0001"
    with pytest.raises(LaunchError, match="not an attempt in the run directory"):
        launcher.submit(launcher.plan(launch(home).model_copy(update={"attempt_dir": str(elsewhere)})))
    assert not elsewhere.exists()


def test_sandbox_start_file_is_accessible_to_nobody_else() -> None:
    """It says whom to become: who could write it, by a link of his that the service follows to its own /proc, would be root."""
    with Sandbox(USER).command(["/bin/true"], {"KEY": "secret"}) as started:
        assert os.fstat(started.fds[0]).st_mode & 0o777 == 0


@AS_ROOT
def test_agent_log_link_into_proc_self_is_not_followed(home: HomePaths) -> None:
    launcher, ref = submitted(home)
    with Sandbox(USER).command(["/bin/true"], {"KEY": "secret"}) as started:
        for target in (f"/proc/self/fd/{started.fds[0]}", "/proc/self/maps"):
            script = f"ln -sf {target} {ref.paths.agent_log}"
            subprocess.run(["/bin/sh", "-c", script], user=UID, group=UID, check=True)
            assert launcher.logs(ref, 1000) == ""
            with pytest.raises(OSError, match=r"Too many levels of symbolic links"):
                launcher._start(launcher.plan(launch(home)), 0, {})
    launcher.kill(ref)


@AS_ROOT
def test_give_does_not_chown_a_file_swapped_for_a_link_meanwhile(
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
    file_access.give_to_user(root, UID, UID)
    assert secret.stat().st_uid == 0


@pytest.mark.parametrize(("before", "after"), [(0o700, 0o700), (0o755, 0o755)])
def test_opening_the_run_directory_for_run_as_keeps_subdirectories_private(before: int, after: int) -> None:
    """Copies of the database in a directory of their own: the run directory is opened, they are not."""
    with open_directory() as root:
        home = HomePaths(root / "home")
        (home.home / "copies").mkdir(parents=True)
        (home.home / "copies").chmod(0o755)
        home.home.chmod(before)
        run_as._restrict_permissions(home, None)
        run_as._restrict_permissions(home, None)  # the next start
        assert home.home.stat().st_mode & 0o777 == home.jobs.stat().st_mode & 0o777 == 0o711
        assert (home.home / "copies").stat().st_mode & 0o777 == after


def acting() -> int:
    """This thread's user for files."""
    return file_access._current_fs_user()[0]


@AS_ROOT
def test_as_owner_refuses_use_across_tasks_generators_and_database_sessions(home: HomePaths, tmp_path: Path) -> None:
    """An event loop's other tasks, a generator that stands still, a thread that was started within: each would read, or write the
    database, as a job's user, or what a job's user may not as root."""
    root = home.job(JOB).root
    file_access.give_to_user(root, UID, UID)
    database = Database(sqlite_url(tmp_path / "ratchet.db"))

    async def within() -> None:
        with file_access.as_owner(root):
            await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="other tasks"):
        asyncio.run(within())
    assert acting() == 0

    def standing() -> Iterator[int]:
        with file_access.as_owner(root):
            yield acting()

    stands = standing()
    assert next(stands) == UID
    for session in (database.read, database.write):
        with pytest.raises(RuntimeError, match=f"opens files as user {UID}"), session():
            pass
    inner = file_access.as_user(User(UID + 1, UID + 1, (), "/", "x"))
    inner.__enter__()
    with pytest.raises(RuntimeError, match="before a nested one"):
        stands.close()
    inner.__exit__(None, None, None)
    assert acting() == UID
    file_access._set_fs_user(0, 0)

    told: list[BaseException] = []

    def child() -> None:
        try:
            with database.read():
                pass
        except RuntimeError as error:
            told.append(error)

    with file_access.as_owner(root):
        started = threading.Thread(target=child)
        started.start()
        with file_access.as_service(), database.read():
            pass
    started.join(30)
    assert len(told) == 1 and acting() == 0
    database.dispose()


@AS_ROOT
def test_as_owner_block_left_by_another_thread_raises(home: HomePaths) -> None:
    root = home.job(JOB).root
    file_access.give_to_user(root, UID, UID)
    block = file_access.as_owner(root)
    told: list[str] = []

    def leave() -> None:
        with pytest.raises(RuntimeError, match="exited by another thread"):
            block.__exit__(None, None, None)
        told.append("refused")

    block.__enter__()
    try:
        other = threading.Thread(target=leave)
        other.start()
        other.join(30)
        assert told == ["refused"] and acting() == UID
    finally:
        file_access._set_fs_user(0, 0)
