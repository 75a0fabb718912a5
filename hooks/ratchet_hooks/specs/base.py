"""The common base of all hook specs. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from ratchet_hooks.checked_dataclass import Model, check, option

Wrapper = Literal["fp16_compress_wrapper", "bf16_compress_wrapper"]
WRAPPERS: tuple[str, ...] = get_args(Wrapper)


@dataclass(frozen=True, kw_only=True)
class HookSpecBase(Model):
    """The common base of all hook specs. Construction makes short wrapper names full; it raises ``ValueError`` for an invalid
    parameter."""

    unused: ClassVar[frozenset[str]] = frozenset()
    """Names of parameters that the hook has but does not use: a change of their values at a resume has no effect."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "wrapper", canonical_wrapper(getattr(self, "wrapper", None)))
        check(self)

    def parameters(self) -> dict[str, Any]:
        """Return all parameters except name and wrapper, as JSON values."""
        return {key: value for key, value in self.values().items() if key not in ("name", "wrapper")}


def canonical_wrapper(value: Any) -> Any:
    """Return the full name of a wrapper, such as ``fp16_compress_wrapper`` for ``fp16``. Any other value is returned
    unchanged."""
    if isinstance(value, str) and value in ("fp16", "bf16", "fp16_compress", "bf16_compress"):
        return f"{value.removesuffix('_compress')}_compress_wrapper"
    return value


def wrapper_option() -> Any:
    """Return the dataclass field ``wrapper`` for a hook that accepts one."""
    return option(
        None,
        "fp16_compress_wrapper or bf16_compress_wrapper (short: fp16, bf16): cast every bucket to 16 bits before the "
        "hook and back after it.",
    )
