"""The hooks that a user can request: one class per DDP communication hook, with torch's names and defaults. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final, Literal, TypeAlias, get_args

from ratchet_hooks.checked_dataclass import option
from ratchet_hooks.specs.base import WRAPPERS, HookSpecBase, Wrapper, canonical_wrapper, wrapper_option
from ratchet_hooks.specs.local_sgd import PostLocalSGDSpec
from ratchet_hooks.specs.powersgd import BatchedPowerSGDSpec, PowerSGDSpec

__all__ = [
    "WRAPPERS", "AllreduceSpec", "BatchedPowerSGDSpec", "Bf16CompressSpec", "CustomSpec", "Fp16CompressSpec", "HookSpec",
    "HookSpecBase", "NoopSpec", "PostLocalSGDSpec", "PowerSGDSpec", "QuantizationPerchannelSpec", "QuantizationPertensorSpec",
    "Wrapper", "canonical_hook_name", "canonical_wrapper", "hook_spec", "normalise_hook",
]  # fmt: skip

_IMPORT_PATH = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"


@dataclass(frozen=True, kw_only=True)
class AllreduceSpec(HookSpecBase):
    """Average the gradients of every bucket with one all-reduce; what DDP does without a hook."""

    name: Literal["allreduce"] = "allreduce"
    wrapper: Wrapper | None = wrapper_option()


@dataclass(frozen=True, kw_only=True)
class Fp16CompressSpec(HookSpecBase):
    """Cast gradients to float16, divide by the world size, all-reduce, cast back."""

    name: Literal["fp16_compress"] = "fp16_compress"
    wrapper: None = option(None, description="fp16_compress is itself a compression; it accepts no wrapper.")


@dataclass(frozen=True, kw_only=True)
class Bf16CompressSpec(HookSpecBase):
    """Cast gradients to bfloat16, divide by the world size, all-reduce, cast back. Keeps float32's range, loses digits."""

    name: Literal["bf16_compress"] = "bf16_compress"
    wrapper: None = option(None, description="bf16_compress is itself a compression; it accepts no wrapper.")


@dataclass(frozen=True, kw_only=True)
class QuantizationPertensorSpec(HookSpecBase):
    """Send every bucket in 8 bits with one scale and zero point. Every rank gathers all ranks' buckets and averages them."""

    name: Literal["quantization_pertensor"] = "quantization_pertensor"
    wrapper: None = option(None, description="Quantization takes float32 buckets; it accepts no wrapper.")


@dataclass(frozen=True, kw_only=True)
class QuantizationPerchannelSpec(HookSpecBase):
    """Send every bucket in 8 bits, with a scale and zero point for each ``bucket_size`` elements."""

    name: Literal["quantization_perchannel"] = "quantization_perchannel"
    wrapper: None = option(None, description="Quantization takes float32 buckets; it accepts no wrapper.")
    bucket_size: int = option(
        512, ge=1, le=2**31 - 1, description="Elements of gradient that share a scale and a zero point."
    )


@dataclass(frozen=True, kw_only=True)
class NoopSpec(HookSpecBase):
    """No communication at all: every rank trains alone. For debugging and measuring only; gives wrong results."""

    name: Literal["noop"] = "noop"
    wrapper: Wrapper | None = wrapper_option()


@dataclass(frozen=True, kw_only=True)
class CustomSpec(HookSpecBase):
    """A hook of the user's own: a function ``hook(state, bucket) -> Future[Tensor]`` as DDP's ``register_comm_hook`` takes it."""

    name: Literal["custom"] = "custom"
    wrapper: Wrapper | None = wrapper_option()
    hook: str = field(
        metadata={
            "pattern": _IMPORT_PATH, "max_length": 512,
            "description": "Import path of the function, like my_package.hooks:my_hook.",
        }
    )  # fmt: skip
    state: str | None = option(
        None,
        pattern=_IMPORT_PATH,
        max_length=512,
        description="Import path of the state's class. Its objects offer __getstate__ and __setstate__, or state_dict "
        "and load_state_dict. The state consists of tensors, numbers, strings, lists and dicts. null: the "
        "hook gets the process group.",
    )
    state_args: dict[str, Any] = field(
        default_factory=dict, metadata={"description": "Keyword arguments of the state's class."}
    )
    replicas: Literal["equal", "rank"] = option(
        "equal",
        description="equal: all ranks get the same averaged gradients, so their parameters stay equal (checked at "
        "every save). rank: parameters may differ between ranks, and those of every rank are saved.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state_args and self.state is None:
            raise ValueError(
                "state_args are the arguments of state, but state is not set: name its class, or drop them"
            )


HookSpec: TypeAlias = (
    AllreduceSpec
    | Fp16CompressSpec
    | Bf16CompressSpec
    | PowerSGDSpec
    | BatchedPowerSGDSpec
    | PostLocalSGDSpec
    | QuantizationPertensorSpec
    | QuantizationPerchannelSpec
    | NoopSpec
    | CustomSpec
)
_SPECS: Final[dict[str, Any]] = {kind.name: kind for kind in get_args(HookSpec)}

_ALIASES = {
    "powersgd": "powerSGD",
    "power_sgd": "powerSGD",
    "batched_powersgd": "batched_powerSGD",
    "post_localsgd": "post_localSGD",
    "post_local_sgd": "post_localSGD",
    "quantization_per_tensor": "quantization_pertensor",
    "quantization_per_channel": "quantization_perchannel",
}


def canonical_hook_name(name: str) -> str:
    """Return torch's name of a hook, such as ``powerSGD`` for ``powersgd``. An unknown name only loses a suffix ``_hook``."""
    short = name.removesuffix("_hook")
    return _ALIASES.get(short.lower(), short)


def normalise_hook(value: Any) -> Any:
    """Return a hook's name, or a dict with ``name``, as a dict with canonical names. Any other value is returned unchanged."""
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        value = {**value, "name": canonical_hook_name(value["name"])}
        if "wrapper" in value:
            value["wrapper"] = canonical_wrapper(value["wrapper"])
    return value


def hook_spec(value: str | Mapping[str, Any]) -> HookSpec:
    """Return the spec for a hook's name, or for its keys and values. Raises ``ValueError`` for an unknown hook, an
    unknown or missing key, or an invalid value."""
    given = normalise_hook(dict(value) if isinstance(value, Mapping) else value)
    kind = _SPECS.get(given.get("name"))
    if kind is None:
        raise ValueError(f"no hook is named {given.get('name')!r}; known: {', '.join(_SPECS)}")
    known = {one.name: one for one in fields(kind)}
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"{unknown[0]}: no parameter of {kind.name}; known: {', '.join(known)}")
    needed = {name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING}
    if missing := sorted(needed - set(given)):
        raise ValueError(f"{missing[0]}: {kind.name} needs it")
    spec: HookSpec = kind(**given)
    return spec
