"""The executable ``ratchet`` against a real service without a reconciler: jobs wait, everything else is as in earnest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import SPEC, Cli
from tests.support.server import Server

NO_JOB = "job-000000000000"
UNSEEN = "no reconciler has processed it yet"


def test_submit_prints_only_the_job_id_and_get_shows_that_job(cli: Cli) -> None:
    job_id = cli(
        "submit", "spec.yaml", "--name", "other", "--label", "team=a", "--set", "hook.random_seed=7"
    ).text.strip()
    job = cli("get", job_id, "--json").data
    assert (job["id"], job["name"], job["phase"]) == (job_id, "other", "QUEUED")
    assert job["labels"] == {"team": "a"} and job["spec"]["hook"]["random_seed"] == 7
    plain = cli("get", job_id).text
    warned = (
        r"^warnings +hook-caution \(/hook\)(, file-system \(/checkpoint\))?; in full: --json$"  # the latter in a tmpfs
    )
    assert re.search(warned, plain, re.MULTILINE), plain
    assert "team=a" in plain and "\x1b" not in plain
    groups = [[line.split("  ")[0] for line in group.splitlines()] for group in plain.split("\n\n")]
    assert [group[0] for group in groups] == ["id", "phase", "step", "attempt", "hook", "created"], plain
    assert re.search(r"^preemptions +0 \(no limit\)$", plain, re.MULTILINE)


def test_submit_refuses_labels_that_are_no_mapping_together_with_a_label(cli: Cli) -> None:
    refused = cli("submit", "-", "--set", "labels=[a]", "--label", "team=b", stdin=SPEC, expect=5)
    assert "/labels: must be a mapping" in refused.errors


def test_submit_from_stdin_with_the_same_idempotency_key_gives_the_same_job(cli: Cli) -> None:
    arguments = ("submit", "-", "--json", "--idempotency-key", "k-1")
    first, second = (cli(*arguments, stdin=SPEC).data["id"] for _ in range(2))
    assert first == second


def test_submit_resolves_relative_code_path_against_the_spec_files_directory(cli: Cli, tmp_path: Path) -> None:
    project = tmp_path / "specs" / "project"
    project.mkdir(parents=True)
    (project / "train.py").write_text("print('hello')\n")
    spec = "name: s\nscript: [train.py]\ncode: {path: ./project}\nworld: {ranks_per_node: 1, device: cpu}\n"
    (tmp_path / "specs" / "s.yaml").write_text(spec)
    job = cli("submit", "specs/s.yaml", "--json").data
    assert job["spec"]["code"]["path"] == str(project.resolve()) and job["resolved"]["code_digest"]


MISTAKES = """
name: My Job
script: [trian.py]
code: {path: project}
hook: powerSDG
world: {ranks_per_node: 2, device: cpu, rank: 3}
checkpoint: {every_steps: 0}
env: {OMP_NUM_THREADS: many, SEED: 1}
secrets: {KEY: {from_env: NOT_SET_WHERE_THE_SERVICE_RUNS}, SEED: {from_env: PATH}}
python: /nowhere/bin/python
lables: {team: vision}
"""


def test_submit_reports_all_mistakes_of_a_spec_at_once(server: Server, tmp_path: Path) -> None:
    """Of its keys, of the hook's name, of several keys together, of what this machine has, of the code."""
    cli = Cli(server.home, tmp_path)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("from ratchet_worker.session import Session\n")
    (tmp_path / "mistakes.yaml").write_text(MISTAKES)
    expected = {
        "/name: 'My Job' is not a valid name": "string-pattern-mismatch",
        "/script/0: there is no file 'trian.py'": "script-not-found",
        "/hook/name: no hook is named 'powerSDG'; did you mean 'powerSGD'?": "unknown-hook",
        "/world/rank: unknown key 'rank'": "unknown-key",
        "/checkpoint/every_steps: ": "value-error",
        "/env/OMP_NUM_THREADS: OMP_NUM_THREADS must be a number": "invalid-value",
        "/secrets/SEED: SEED is set in env and in secrets": "duplicate-variable",
        "/secrets/KEY: NOT_SET_WHERE_THE_SERVICE_RUNS is not set": "secret-missing",
        "/python: there is no interpreter '/nowhere/bin/python'": "python-not-found",
        "/lables: unknown key 'lables'; did you mean 'labels'?": "unknown-key",
    }
    told = cli("submit", "mistakes.yaml", expect=5)
    header, *lines = [line.strip() for line in told.errors.splitlines() if "next:" not in line]
    assert header == "ratchet: 10 mistakes:" and len(lines) == 10, told.errors
    for start, code in expected.items():
        [line] = [line for line in lines if line.startswith(start)]
        assert line.endswith(f"[{code}]")


def test_a_dry_run_shows_the_launch_and_stores_nothing(cli: Cli) -> None:
    plan = cli("submit", "spec.yaml", "--dry-run", "--name", "dry", "--json").data
    assert plan["resolved"]["backend"] == "gloo" and plan["launch"]
    assert cli("list", "--name", "dry", "--json").data == []


def test_list_filters_jobs_and_prints_an_aligned_table_without_colour(cli: Cli) -> None:
    one = cli("submit", "spec.yaml", "--name", "listed", "--label", "set=x", "--json").data["id"]
    cli("submit", "spec.yaml", "--name", "listed", "--label", "set=y", "--json")
    assert [j["id"] for j in cli("list", "--label", "set=x", "--json").data] == [one]
    assert len(cli("list", "--name", "listed", "--phase", "queued", "--json").data) == 2
    assert len(cli("list", "--name", "listed", "--limit", "1", "--json").data) == 1
    table = cli("list", "--name", "listed").text
    header, *rows = table.splitlines()
    assert header.split()[:4] == ["ID", "NAME", "PHASE", "HOOK"] and len(rows) == 2 and "\x1b" not in table
    assert all(row.index("QUEUED") == header.index("PHASE") for row in rows)


def test_job_actions_change_the_phase_or_exit_with_conflict(cli: Cli) -> None:
    job_id = cli("submit", "spec.yaml", "--json").data["id"]
    cli("suspend", job_id)
    assert cli("wait", job_id, "--until", "suspended", "--json").data["phase"] == "SUSPENDED"
    several = cli(
        "resume", job_id, "--world", "1", "--nodes", "2", "--on-hook-mismatch", "redistribute", expect=5
    ).errors
    assert "/world/nodes: the launcher local has 1 node" in several
    assert cli("resume", job_id, "--json").data["phase"] == "QUEUED"
    conflict = cli("preempt", job_id, expect=4)
    assert "QUEUED" in conflict.errors
    assert cli("label", job_id, "team=b", "x-", "--priority", "5", "--json").data["labels"] == {"team": "b"}
    cli("delete", job_id, expect=4)
    assert cli("cancel", job_id, "--json").data["phase"] == "CANCELLED"
    cli("wait", job_id, expect=1)
    events = [e["id"] for e in cli("events", job_id, "--json").data]
    followed = [json.loads(line)["id"] for line in cli("events", job_id, "-f", "--json").text.splitlines()]
    assert followed == events and len(events) >= 5
    cli("delete", job_id)
    cli("get", job_id, expect=3)


def test_empty_results_are_noted_on_standard_error(cli: Cli) -> None:
    job_id = cli("submit", "spec.yaml", "--json").data["id"]
    assert "no attempt yet" in cli("attempts", job_id).errors
    assert cli("logs", job_id, "--json").data == []
    hook = cli("hook", job_id, "--json").data
    assert hook["name"] == "powerSGD" and hook["phase"] is None


def test_hooks_command_lists_hooks_and_their_parameters(cli: Cli) -> None:
    names = {h["name"]: h["available"] for h in cli("hooks", "--json").data}
    assert names["powerSGD"] and names["allreduce"] and names["post_localSGD"]
    shown = cli("hooks", "powerSGD").text
    assert "matrix_approximation_rank" in shown and "fp16_compress_wrapper, bf16_compress_wrapper" in shown
    assert "matrix_approximation_rank: whole number, at least 1, at most 4096; default 1\n" in shown
    assert "min_compression_rate: number, more than 0; default 2.0\n  Compress" in shown
    assert "wrapper" not in cli("hooks", "quantization_perchannel").text.partition("bucket_size")[2]
    assert "\nhook: text; required\n" in cli("hooks", "custom").text


def test_hooks_command_shows_every_parameter_within_eighty_columns(cli: Cli) -> None:
    assert cli.run_on_terminal("hooks").longest_line_length <= 80
    parameters = {h["name"]: h["parameters"]["properties"] for h in cli("hooks", "--json").data}
    for name in ("powerSGD", "post_localSGD"):
        shown = cli.run_on_terminal("hooks", name)
        assert shown.longest_line_length <= 80
        words = " ".join(shown.text.split())
        for key, schema in parameters[name].items():
            assert key == "name" or (f"{key}: " in words and " ".join(schema["description"].split()) in words), key


def test_wait_ends_at_its_timeout_and_notes_that_the_job_goes_on(cli: Cli) -> None:
    job_id = cli("submit", "spec.yaml", "--json").data["id"]
    assert "continues" in cli("wait", job_id, "--timeout", "0.3", expect=7).errors


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("get", "job-none"), 3, "ratchet list"),
        (("get", NO_JOB), 3, "ratchet list"),
        (("submit", "missing.yaml"), 3, "missing.yaml"),
        (("submit", "spec.yaml", "--set", "hook.matrix_aproximation_rank=2"), 5, "matrix_approximation_rank"),
        (("submit", "spec.yaml", "--set", "hook.start_powerSGD_iter=1"), 5, "must be > 1"),
        (("submit", "spec.yaml", "--set", "name.x=1"), 2, "not a mapping"),
        (("submit", "spec.yaml", "--set", "task.args.day=2026-01-01"), 5, "quote it"),
        (("fork", NO_JOB, "--set", "task.args.rate=.nan"), 5, "quote it"),
        (("list", "--sort", "nonsense"), 5, "sort"),
        (("wait", NO_JOB, "--until", "SLEEPING"), 2, "SUSPENDED"),
        (("checkpoints", "show", NO_JOB), 2, "CHECKPOINT"),
        (("logs", NO_JOB, "--attempt", "0"), 2, "--attempt"),
        (("logs", NO_JOB, "--since", "soon"), 2, "2026-01-31T12:00:00Z"),
        (("list", "--phase", "SLEEPING"), 2, "'SLEEPING' is not a phase"),
        (("doctor", "--hook", "powerSGD"), 2, "--exactness"),
        (("submit", "spec.yaml", "--dry-run", "--follow"), 2, "stores nothing"),
        (("submit", "spec.yaml", "--name", ""), 5, "/name"),
        (("resume", NO_JOB, "--nodes", "2"), 2, "--world"),
        (("submit", "-"), 5, "standard input is empty"),
        (("attempts", NO_JOB), 3, "there is no job"),
        (("checkpoints", "pin", NO_JOB, "step-000000000001.a0001"), 3, "there is no job"),
        (("lst",), 2, "list"),
        (("--server", "nonsense", "list"), 5, "http://"),
        (("--server", "http://127.0.0.1:9", "list"), 6, "ratchet serve"),
    ],
)
def test_cli_errors_go_to_standard_error_with_a_distinct_exit_code(
    cli: Cli, arguments: tuple[str, ...], code: int, says: str
) -> None:
    result = cli(*arguments, expect=code)
    assert says in result.errors and result.text == "" and "Traceback" not in result.errors


def test_get_with_misspelt_job_name_suggests_the_existing_one(cli: Cli) -> None:
    cli("submit", "spec.yaml", "--name", "misspelt-one")
    assert "misspelt-one" in cli("get", "misspelt-oen", expect=3).errors


def test_submit_of_invalid_yaml_is_refused_with_line_or_advice(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "torn.yaml").write_text("name: x\ntask: {entrypoint: \n")
    assert "line 3" in cli("submit", "torn.yaml", expect=5).errors
    (tmp_path / "date.yaml").write_text("name: 2026-01-01\n")
    assert "quote it" in cli("submit", "date.yaml", expect=5).errors


def test_list_without_a_service_names_the_command_to_start_one(tmp_path: Path) -> None:
    result = Cli(tmp_path / "nowhere", tmp_path)("list", expect=6)
    assert "ratchet serve" in result.errors


def test_help_names_the_exit_codes_and_version_prints_the_version(cli: Cli) -> None:
    text = cli("--help").text
    assert "Exit codes" in text and "the service does not answer" in text
    assert cli("--version").text.startswith("ratchet ")


def test_cli_exits_zero_when_the_reader_of_its_pipe_has_gone(cli: Cli) -> None:
    process = subprocess.Popen(
        cli.command("hooks"), env=cli.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(20) == 0 and errors == b""


@pytest.mark.parametrize(
    ("imported", "forbidden"),
    [
        ("ratchet_client.client", ["torch", "fastapi", "sqlalchemy", "ratchet_service", "ratchet_worker"]),
        (
            "ratchet_client.cli.app",
            ["torch", "httpx", "pydantic", "ratchet_service", "ratchet_worker"],
        ),  # --help is quick
    ],
)
def test_client_and_command_line_import_no_heavy_module(imported: str, forbidden: list[str]) -> None:
    code = f"import sys, {imported}\nbad = {set(forbidden)} & set(sys.modules)\nsys.exit(str(bad) if bad else 0)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ)).returncode == 0


def test_commands_accept_a_job_name_where_unambiguous(cli: Cli) -> None:
    one = cli("submit", "spec.yaml", "--name", "single", "--json").data["id"]
    assert cli("get", "single", "--json").data["id"] == one
    assert cli("cancel", "single").text.startswith(one)
    taken = cli("submit", "spec.yaml", "--name", "single")
    other = taken.text.strip()
    assert f"{one} (CANCELLED) has the name single, too" in taken.errors
    assert cli("cancel", "single").text.startswith(other), "the only one that has not ended"
    ambiguous = cli("delete", "single", expect=2)
    assert one in ambiguous.errors and other in ambiguous.errors and "CANCELLED" in ambiguous.errors
    newest = cli("get", "single", "--json")
    assert newest.data["id"] == other and "2 jobs have the name single; this is the newest" in newest.errors


def test_list_active_and_top_show_running_and_queued_jobs_only(cli: Cli) -> None:
    queued, stopped = (cli("submit", "spec.yaml", "--name", "act", "--json").data["id"] for _ in range(2))
    cli("suspend", stopped)
    assert [job["id"] for job in cli("list", "--name", "act", "--active", "--json").data] == [queued]
    seen = cli("top", "--once", "--name", "act", "--json").data["jobs"]
    assert [(job["id"], job["phase"], job["loss"], job["eta_seconds"]) for job in seen] == [
        (queued, "QUEUED", None, None)
    ]
    assert queued in cli("top", "--once", "--name", "act").text
    cli("list", "--active", "--phase", "RUNNING", expect=2)
    assert "no job" in cli("top", "--once", "--name", "nobody").errors


def test_tables_fit_narrow_terminals_and_name_the_omitted_columns(cli: Cli) -> None:
    job_id = cli("submit", "spec.yaml", "--name", "a-job-with-a-rather-long-name", "--json").data["id"]
    for columns in (40, 80):
        for arguments in (
            ("list", "--name", "a-job-with-a-rather-long-name"),
            ("get", job_id),
            ("hooks",),
            ("top", "--once"),
        ):
            terminal = cli.run_on_terminal(*arguments, columns=columns)
            assert terminal.longest_line_length <= columns and terminal.code == 0, (arguments, terminal.text)
    for columns in (60, 100, 160):
        once = cli.run_on_terminal("top", "--once", columns=columns)
        assert f"{job_id} a-job-with-a-rather-long-name: {UNSEEN}" in " ".join(once.text.split()), once.text
        with cli.terminal("top", "--every", "0.2", columns=columns) as live:
            live.read_until("has processed it")
            live.write("\x03")
            assert live.end() == 130
    assert f"  {UNSEEN}\n" in cli("top", "--once").text
    shown = cli.run_on_terminal("list", columns=40)
    assert job_id in shown.text and "QUEUED" in shown.text and "too narrow for: HOOK" in shown.text
    assert "\x1b[33m" in shown.raw, "colours on a terminal"
    assert "\x1b[33m" not in cli.run_on_terminal("list", NO_COLOR="1").raw
    assert "\x1b" not in cli.run_on_terminal("list", TERM="dumb").raw


def test_list_and_top_print_one_line_per_job_at_every_width(cli: Cli) -> None:
    names = [f"a-long-name-of-a-job-{i}-{'x' * 38}" for i in range(2)]
    ids = [cli("submit", "spec.yaml", "--name", name, "--json").data["id"] for name in names]
    for columns in (60, 80, 100, 160):
        for arguments in (("list", "--limit", "2"), ("top", "--once", "--limit", "2")):
            text = cli.run_on_terminal(*arguments, columns=columns).text
            table = text.partition("too narrow")[0].split(f"{ids[1]} {names[1]}")[0]  # why they wait stands below
            rows = [line for line in table.splitlines() if line.strip()][2:]
            assert [row.split()[0] for row in rows] == ids[::-1], (columns, arguments, text)
    assert names[0] in cli.run_on_terminal("list", "--limit", "2", columns=220).text


def test_help_is_grouped_by_purpose_and_shown_without_arguments(cli: Cli) -> None:
    bare = subprocess.run(cli.command(), env=cli.environment, capture_output=True, text=True)
    text = cli("--help").text
    assert (bare.stdout + bare.stderr).split() == text.split()
    panels = ["Run and watch jobs", "Inspect a job", "Stop, resume, change", "Checkpoints", "Service and set-up"]
    places = [text.index(f" {panel} ") for panel in panels]
    assert places == sorted(places) and " Commands " not in text


def test_quota_commands_limit_submission_and_queue_shows_waiting_jobs(cli: Cli) -> None:
    assert "nobody is limited" in cli("quota", "list").errors
    waits = cli("submit", "spec.yaml", "--name", "waits").text.strip()
    try:
        there = cli("quota", "set", "local", "--gpus", "4", "--json").data["in_use"]["queued"]
        cli("quota", "set", "local", "--queued", str(there))
        refused = cli("submit", "spec.yaml", "--name", "waits-too", expect=4)
        assert f"its quota (queued) is {there}" in refused.errors
        told = f"{there} of {there}"
        assert cli("quota", "get", "local").text.splitlines()[2].split(maxsplit=1) == ["queued", told]
        header, row = cli("quota", "list").text.splitlines()
        assert header.split() == ["OWNER", "QUEUED", "JOBS", "RANKS", "GPUS"]
        assert row.startswith("local") and told in row and row.count("no limit") == 3
    finally:
        cli("quota", "delete", "local")
    assert cli("quota", "list", "--json").data == []
    (shown,) = (line for line in cli("queue", "--limit", "100").text.splitlines() if waits in line)
    assert shown.split()[1:6] == [waits, "waits", "local", "0", "2"]
    (alone,) = (line for line in cli("queue", waits).text.splitlines() if waits in line)
    # columns are as wide as their page needs, and it waits on between the two
    of_job, of_page = (re.sub(r"\b\d+s\b", "AGE", line).split() for line in (alone, shown))
    assert of_job == of_page and "AGE" in of_page


def test_audit_lists_changes_newest_first(cli: Cli) -> None:
    job = cli("submit", "spec.yaml", "--name", "audited").text.strip()
    cli("label", job, "team=vision", "--priority", "3")
    cli("cancel", job)
    header, *rows = cli("audit", "--subject", job).text.splitlines()
    assert header.split() == ["TIME", "WHO", "ROLE", "TOKEN", "ACTION", "SUBJECT", "OWNER", "WHAT"]
    cancel, patch, submit = (row.split() for row in rows)
    assert [row[1:4] for row in (cancel, patch, submit)] == [
        ["local", "admin", a] for a in ("cancel", "patch", "submit")
    ]
    assert " ".join(patch[6:]).startswith('labels {"team": {"old": null, "new": "vision"}}, priority 0 -> 3')
    assert "phase QUEUED -> CANCELLED" in rows[0]
    found = cli("audit", "--subject", job, "--limit", "1", "--since", "1h", "--json").data
    assert [(entry["action"], entry["owner"]) for entry in found] == [("cancel", "local")]
    assert "no such change" in cli("audit", "--subject", job, "--action", "fork").errors
    assert "--since takes an age" in cli("audit", "--since", "yesterday", expect=2).errors


def test_usage_prints_a_table_csv_or_json(cli: Cli) -> None:
    assert "no attempt has run" in cli("usage").errors
    head = "label:team,jobs,attempts,gpu_hours,cpu_hours,rank_hours"
    assert cli("usage", "--by", "label:team", "--csv").text.splitlines() == [head]
    data = cli("usage", "--since", "2026-01-01T00:00:00Z", "--until", "2026-02-01T00:00:00Z", "--json").data
    assert (data["since"], data["until"], data["items"]) == ("2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z", [])
    assert "not both" in cli("usage", "--csv", "--json", expect=2).errors
