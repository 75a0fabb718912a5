"""DDP communication hooks as data: specs, construction, exact capture and restore.

Torch-free: ``specs``, ``registry``, ``summary``. Everything that touches tensors lives in modules that import torch themselves.
"""
