"""The communication hooks by name. The public import path of ``ratchet_hooks.specs.registry``."""

from ratchet_hooks.specs.registry import HOOKS, Caution, HookEntry, Replicas, is_stateful, replicas_of

__all__ = ["HOOKS", "Caution", "HookEntry", "Replicas", "is_stateful", "replicas_of"]
