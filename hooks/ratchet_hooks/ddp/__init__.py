"""DistributedDataParallel support: bucket layout, process groups, parameter averaging, numeric warnings."""
