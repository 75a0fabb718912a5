"""What a client and a job's handle do, against a running service: ``python client.py`` beside a ``ratchet serve``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import ratchet

TASK = {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask", "args": {"epochs": 400}}
SPEC = {"name": "reference-client", "task": TASK, "world": {"ranks_per_node": 1, "device": "cpu"}}
RUNNING, SUSPENDED = ratchet.JobPhase.RUNNING, ratchet.JobPhase.SUSPENDED

client = ratchet.Client()
assert client.ready()

job = client.submit(SPEC)
print(job)  # <Job job-... 'reference-client' QUEUED, step 0, attempt 0>
assert client.job_id("reference-client") == job.id
job.wait(until=[RUNNING], deadline=120)
for now in job.poll(every=0.2, deadline=120):
    if "loss" in now.metrics:
        break
job.checkpoint_now()
for event in job.events(follow=True):
    if event.type == "checkpoint":
        break

job.suspend()
job.wait(until=[SUSPENDED], deadline=120)
try:
    job.preempt()
except ratchet.Conflict as error:
    print(error.code, error.detail)

newest = job.last_checkpoint
steps, values = job.metrics("loss")["loss"]
print(f"{job.phase} at step {job.progress.step} with loss {values[-1]:.3f}: {job.message}")
print([(run.tracker, run.step, run.place) for run in client.trackers(job)])
print(job.hook().name, {rank: curve.steps for rank, curve in job.hook_series("bytes_after").items()})
print([(attempt.number, attempt.cause) for attempt in job.attempts()])
print([(checkpoint.id, checkpoint.size) for checkpoint in job.checkpoints()])
print([line.text for line in job.logs(rank=0, tail=5)])
print([file.path for file in job.files()])
with tempfile.TemporaryDirectory() as folder:
    print(job.fetch_files(Path(folder) / "outputs").files)
    print(job.export(Path(folder) / "model.safetensors"))
print(job.verify().verification, job.pin().pinned)

fork = job.fork(ratchet.ForkRequest(name="reference-fork"))
fork.cancel().wait(deadline=120)
print(client.delete(fork.id).checkpoints)

job.resume()
job.refresh()
job.cancel()
job.wait(deadline=120)

print(client.view(job.id).phase, client.attempt(job.id).cause)
print(client.metrics(job.id, name=["loss"], max_points=100).series)
print([line.text for line in client.logs(job.id, attempt="all", grep="rank 0")])
print([checkpoint.id for checkpoint in client.checkpoints(job.id)])
print(client.checkpoint(job.id, newest).size)
print(client.queue_view(limit=5).waiting, client.hook_info("powerSGD").title)

try:
    print(client.read_file(job.id, "runs/log.txt", end=1000))
except ratchet.NotFound as error:
    print(error.code)  # file-not-found: this job wrote none

client.set_quota("ann", ratchet.QuotaRequest(ranks=8))
print([quota.owner for quota in client.quotas()])
client.delete_quota("ann")
made = client.create_token("notebook", role="viewer", expires_days=1)
print([token.name for token in client.tokens()])
print(client.usage_csv(by="label:team"))
client.revoke_token(made.id)

webhook = client.create_webhook("http://127.0.0.1:9000/ratchet", types=["job.failed", "job.succeeded"])
client.change_webhook(webhook.id, ratchet.WebhookChange(label="team=vision"))
secret = client.rotate_webhook_secret(webhook.id).secret
if not client.test_webhook(webhook.id).delivered:
    print(client.webhook(webhook.id).failures, client.webhook_deliveries(webhook.id))
print([one.url for one in client.webhooks()])
client.delete_webhook(webhook.id)

client.resume(job.id)
client.wait(job.id, until=[RUNNING], deadline=120)
client.checkpoint_now(job.id)
client.preempt(job.id)
client.suspend(job.id)
client.wait(job.id, until=[SUSPENDED], deadline=120)
client.cancel(job.id)
print(job.delete().checkpoints)
client.close()
