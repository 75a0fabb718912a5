"""The rank process, from its launch file to its exit code."""
