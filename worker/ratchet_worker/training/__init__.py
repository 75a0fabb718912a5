"""Training under a job: runtime, loops, resume, replay proof."""
