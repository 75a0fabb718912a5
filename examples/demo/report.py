"""What the demo shows at the end: hook, attempts, the comparison of all tensors, accuracy, a picture."""

from __future__ import annotations

from pathlib import Path

from examples.demo import picture
from examples.demo.story import EVERY, START_COMPRESSION, Story, say
from ratchet_client import RatchetClient
from ratchet_client.cli.shared import output
from ratchet_contract.api import AttemptView, JobView
from ratchet_contract.paths import JobPaths
from ratchet_store.compare import compare, render

ACCURACY = 0.97


def hook(client: RatchetClient, job: JobView) -> None:
    """The hook as the API tells it after the end."""
    view = client.hook(job.id)
    output.fields(
        [("  hook", view.name), ("  phase", view.phase), ("  iteration", view.iteration),
         ("  compression rate", f"{view.compression_rate:.2f}" if view.compression_rate else None),
         *((f"  residual norm of rank {rank}", norm) for rank, norm in sorted(view.residual_norm.items()))]
    )  # fmt: skip


def attempts(story: Story, interrupted: JobView, undisturbed: JobView) -> None:
    """Both jobs' attempts, and whether the sums are right."""
    first, second = (story.service.client.attempts(job.id) for job in (interrupted, undisturbed))
    output.table(
        ["JOB", "ATTEMPT", "OUTCOME", "CAUSE", "FROM STEP", "TO STEP", "DONE", "LOST", "RESUMED"],
        [_row(job.name, a) for job, rows in ((interrupted, first), (undisturbed, second)) for a in rows],
        right=["ATTEMPT", "FROM STEP", "TO STEP", "DONE", "LOST"],
    )  # fmt: skip
    total = interrupted.progress.total_steps or 0
    done, lost = sum(a.steps_done for a in first), sum(a.steps_lost or 0 for a in first)
    story.expect(len(first) == 3 and len(second) == 1, "three attempts with interruptions, one without")
    story.expect(
        total > 0 and done == total + lost, f"steps done ({done}) = steps of the job ({total}) + steps lost ({lost})"
    )
    losses = [a.steps_lost for a in first]
    story.expect(
        len(losses) == 3 and losses[0] is not None and losses[0] <= EVERY and losses[1:] == [0, 0],
        f"steps lost: {losses}: at most {EVERY} (the checkpoint interval) by the kill, none by the preemption",
    )
    bases = [a.base.step for a in first[1:] if a.base is not None]
    story.expect(
        len(bases) == 2 and min(bases) > START_COMPRESSION, "every resume started beyond the start of compression"
    )


def _row(name: str, a: AttemptView) -> list[str]:
    verdict = a.resume_report.verdict if a.resume_report else "-"
    base = a.base.step if a.base else None
    return [name, str(a.number), output.dash(a.outcome), output.dash(a.cause), output.dash(base), str(a.last_step),
            str(a.steps_done), output.dash(a.steps_lost), verdict]  # fmt: skip


def comparison(story: Story, interrupted: JobView, undisturbed: JobView) -> None:
    """Every tensor and every rank's state of the two final checkpoints."""
    directories = [_final(story, job) for job in (interrupted, undisturbed)]
    found = compare(*directories, exclude=())
    say("\n".join("  " + line for line in render(found).splitlines()))
    story.expect(bool(found.tensors), f"{len(found.tensors)} tensors compared, {len(found.different)} differ")
    story.expect(found.identical, "the two final checkpoints are identical, bit for bit")


def _final(story: Story, job: JobView) -> Path:
    finished = [c for c in story.service.client.checkpoints(job.id) if c.finished]
    story.expect(len(finished) == 1, f"{job.name} has a final checkpoint: {finished[0].id if finished else 'none'}")
    return JobPaths(story.service.home / "jobs" / job.id).checkpoints / finished[0].id


def accuracy(story: Story, interrupted: JobView, undisturbed: JobView) -> None:
    """Both runs' accuracy on the test digits."""
    reached = [_series(story.service.client, job, "test_accuracy")[-1][1] for job in (interrupted, undisturbed)]
    story.expect(
        reached[0] == reached[1] and reached[0] >= ACCURACY,
        f"test accuracy {reached[0]:.2%} interrupted, {reached[1]:.2%} undisturbed (at least {ACCURACY:.0%} wanted)",
    )


def draw(story: Story, interrupted: JobView, undisturbed: JobView, path: Path) -> None:
    """The loss curves."""
    curves = [_series(story.service.client, job, "loss") for job in (undisturbed, interrupted)]
    drawn = [
        picture.Curve("undisturbed", "#f2b134", 5.0, curves[0]),
        picture.Curve("interrupted (on top)", "#1d3557", 1.2, curves[1]),
    ]
    picture.draw(path, "Training loss, step by step: interrupted and undisturbed run", drawn, story.marks)


def _series(client: RatchetClient, job: JobView, name: str) -> list[tuple[int, float]]:
    found = next((s.points for s in client.metrics(job.id, name=[name]).series if s.name == name), [])
    return [(p.step, p.value) for p in found] or [(0, float("nan"))]
