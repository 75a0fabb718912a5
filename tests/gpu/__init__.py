"""``make gpu``: everything that needs CUDA in one command, each row also on the CPU. See benchmarks/README.md, section GPU.

``__main__`` and ``runner`` use the standard library alone, so that a missing package makes rows red and does not stop the run.
"""
