"""A job's checkpoints: lineage, cleanup, removal, object store."""
