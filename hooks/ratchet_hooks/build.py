"""DDP with a managed communication hook. The public import path of ``ratchet_hooks.manage.managed_ddp``."""

from ratchet_hooks.manage.managed_ddp import (
    STATE_VERSION,
    HookStateError,
    HookWarning,
    LayoutMismatch,
    ManagedDDP,
    ManagedHook,
    UnsupportedModel,
    attach,
    close_group,
    managed_ddp,
    redistribute,
)

__all__ = [
    "STATE_VERSION",
    "HookStateError",
    "HookWarning",
    "LayoutMismatch",
    "ManagedDDP",
    "ManagedHook",
    "UnsupportedModel",
    "attach",
    "close_group",
    "managed_ddp",
    "redistribute",
]
