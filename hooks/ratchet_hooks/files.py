"""Hook state in safetensors files. The public import path of ``ratchet_hooks.state.files``."""

from ratchet_hooks.state.files import DTYPE_NAMES, DTYPES, load_state, pack_state, save_state, unpack_state

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "load_state",
    "pack_state",
    "save_state",
    "unpack_state",
]
