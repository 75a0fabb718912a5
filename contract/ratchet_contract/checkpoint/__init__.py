"""The records of a checkpoint: manifest, resume report, ring of step fingerprints."""
