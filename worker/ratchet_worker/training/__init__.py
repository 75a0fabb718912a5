"""Training in a rank: runtime, loops, evaluation, resume, replay proof."""
