"""What agents, ranks and the service exchange (messages, step counters, log indexes), and the rules by which they read it: the
end of an attempt, the lineage of checkpoints, time limits."""
