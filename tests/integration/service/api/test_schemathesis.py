"""Whatever fits the OpenAPI description, and whatever does not, gets a documented answer: no 5xx, no undocumented status, media
type, header or body. RATCHET_TEST_EXAMPLES sets how many calls of each operation are made, one half of each kind (default 4, on
PostgreSQL a quarter of them).
"""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import hypothesis
import pytest
import sqlalchemy as sa
from hypothesis import strategies as st

from ratchet_contract.phases import AttemptPhase, JobPhase
from ratchet_service.db.models import Attempt, Checkpoint, Job
from tests.support.api import TOKEN, Api, checkpoint_message, message, training_message

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the library's own imports
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

pytestmark = pytest.mark.takes_turns

EXAMPLES = int(os.environ.get("RATCHET_TEST_EXAMPLES", "4"))
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


@schemathesis.serializer("application/x-tar")
def tar(_context: Any, value: Any) -> bytes:
    """Whatever was made up, as bytes."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


class Population:
    """Jobs in every phase, with attempts, checkpoints and reports; each is made again when it is used up."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._made: dict[JobPhase, tuple[str, Any]] = {}
        self.refill()

    @property
    def jobs(self) -> list[str]:
        return [job_id for job_id, _ in self._made.values()]

    def refill(self) -> None:
        for phase in (
            JobPhase.QUEUED, JobPhase.RUNNING, JobPhase.STOPPING, JobPhase.SUSPENDED, JobPhase.SUCCEEDED, JobPhase.FAILED,
        ):  # fmt: skip
            job_id, state = self._made.get(phase, ("", None))
            if state is None or self._state(job_id) != state:
                job_id = self._make(phase)
                self._made[phase] = job_id, self._state(job_id)

    def _state(self, job_id: str) -> Any:
        """What calls use up; empty without the job."""
        with self._api.database.read() as session:
            job = sa.select(Job.phase, Job.desired, Job.attempt).where(Job.id == job_id)
            attempts = sa.select(Attempt.number, Attempt.phase).where(Attempt.job_id == job_id)
            kept = sa.select(Checkpoint.step, Checkpoint.state).where(Checkpoint.job_id == job_id)
            return [sorted(map(tuple, session.execute(query))) for query in (job, attempts, kept)]

    def _make(self, phase: JobPhase) -> str:
        api = self._api
        if phase is JobPhase.QUEUED:
            return api.submit(name="queued", labels={"team": "x"})
        job_id = api.submit(name=phase.value.lower(), world={"ranks_per_node": 2, "device": "cpu"})
        api.attempt(job_id)
        said = [
            training_message(), checkpoint_message(10), message("metrics", step=5, values={"loss": 0.5}),
            message("progress", step=12), message("note", type="hello", message="world"),
        ]  # fmt: skip
        assert api.report(job_id, (0, 1, said)).status_code == 200
        if not phase.active:
            with api.database.write() as session:
                session.get_one(Attempt, (job_id, 1)).phase = AttemptPhase.ENDED
        api.set_phase(job_id, phase)
        return job_id

    def adapt(self, case: Any, draw: random.Random) -> None:
        """Names of things that are there in the place of made-up ones, nine times out of ten."""
        place = case.path_parameters or {}
        real = {
            "job_id": draw.choice(self.jobs), "number": "1", "checkpoint_id": "step-000000000010.a0001", "name": "powerSGD",
        }  # fmt: skip
        if draw.random() < 0.9:  # else its own: none, or none that is known here
            case.headers = {
                k: v for k, v in dict(case.headers or {}).items() if k.lower() not in ("authorization", "accept")
            }
        for key in place:
            if key in real and draw.random() < 0.9:
                place[key] = real[key]
        if isinstance(case.query, dict):
            case.query.pop("follow", None)  # it does not end while a job runs
            if isinstance(case.query.get("wait"), float | int):
                case.query["wait"] = min(case.query["wait"], 0.01)
        if "/attempts/{number}/" in case.operation.path and draw.random() < 0.9:
            case.headers = dict(case.headers or {}) | {"Authorization": f"Bearer {TOKEN}"}
        if case.operation.path.endswith("/reports") and isinstance(case.body, dict) and draw.random() < 0.9:
            case.body |= {"job_id": place.get("job_id"), "attempt": 1, "protocol": 1, "node": 0}


@pytest.fixture
def population(api: Api) -> Population:
    return Population(api)


def operations(api: Api) -> list[Any]:
    schema = schemathesis.openapi.from_dict(api.client.get("/openapi.json").json())
    schema.config.update(base_url=str(api.client.base_url).rstrip("/"))
    return [found.ok() for found in schema.get_all_operations()]


@pytest.mark.filterwarnings("ignore")  # of the library's own
@pytest.mark.timeout(1800)
def test_schemathesis_calls_get_only_documented_answers(api: Api, population: Population) -> None:
    found = operations(api)
    assert len(found) > 30
    failures: list[str] = []
    for operation in found:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            problem = tried(operation, mode, population, EXAMPLES // 2 if api.database.is_sqlite else EXAMPLES // 8)
            if problem is not None:
                failures.append(f"{operation.label}: {problem}")
    assert not failures, "\n\n".join(failures)


def tried(operation: Any, mode: GenerationMode, population: Population, most: int) -> str | None:
    """What went wrong, smallest example first; None when nothing did."""
    try:
        strategy = operation.as_strategy(generation_mode=mode)
    except Exception as error:
        return f"no cases: {error}"

    @hypothesis.settings(
        max_examples=max(1, most), deadline=None, database=None, derandomize=EXAMPLES <= 8,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(case=strategy, seed=st.integers(0, 2**32))
    def attempt(case: Any, seed: int) -> None:
        population.adapt(case, random.Random(seed))
        case.call_and_validate(checks=CHECKS, timeout=30)

    try:
        attempt()
    except hypothesis.errors.Unsatisfiable:
        return None  # nothing that could be wrong: no parameters, no body
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{mode.value}: {error}"
    finally:
        if operation.method.upper() in ("DELETE", "POST"):
            population.refill()
    return None
