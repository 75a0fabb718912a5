"""``make demo``: a training job killed, preempted and orphaned, compared bit for bit with one that nobody touched."""
