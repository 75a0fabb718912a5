"""What the spec models of all hooks have in common. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Wrapper = Literal["fp16_compress_wrapper", "bf16_compress_wrapper"]
WRAPPERS: tuple[str, ...] = get_args(Wrapper)


class HookSpecBase(BaseModel):
    """Common base; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    unused: ClassVar[frozenset[str]] = frozenset()
    """Parameters that the hook has and does not use: at a resume they may be others than the recorded ones."""


def canonical_wrapper(value: Any) -> Any:
    """``fp16`` -> ``fp16_compress_wrapper``, ``bf16_compress`` likewise; anything else is returned unchanged."""
    if isinstance(value, str) and value in ("fp16", "bf16", "fp16_compress", "bf16_compress"):
        return f"{value.removesuffix('_compress')}_compress_wrapper"
    return value


WrapperField = Annotated[
    Wrapper | None,
    BeforeValidator(canonical_wrapper),
    Field(
        description="fp16_compress_wrapper or bf16_compress_wrapper (short: fp16, bf16): cast every bucket to 16 bits before the "
        "hook and back after it."
    ),
]
