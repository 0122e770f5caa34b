"""The schema of a run. YAML holds the values (paper_configs/), this file the names, units and bounds."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

METHODS = ("local", "ulysses", "upipe")
DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-shaped decoder. head_dim null: hidden_size / heads."""

    name: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    rope_theta: float
    head_dim: int | None = None
    norm_eps: float = 1e-6
    qk_norm: bool = False
    tied_head: bool = False
    rope_scaling: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "layers", "heads", "kv_heads", "ffn", "vocab"):
            at_least(f"model.{name}", getattr(self, name), 1)
        at_least("model.norm_eps", self.norm_eps, 0)
        if self.heads % self.kv_heads:
            raise ValueError(f"model.heads={self.heads} must be a multiple of model.kv_heads={self.kv_heads}")
        if self.head_dim is None and self.hidden_size % self.heads:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} is no multiple of model.heads={self.heads}; set model.head_dim"
            )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.heads if self.head_dim is None else self.head_dim


@dataclass(frozen=True)
class MethodConfig:
    """How attention runs. heads_per_stage null: the context-parallel degree."""

    name: str
    heads_per_stage: int | None = None
    keep_attention: bool = False
    kernel: str = "auto"

    def __post_init__(self) -> None:
        one_of("method.name", self.name, METHODS)


@dataclass(frozen=True)
class DataConfig:
    """Text and how it is cut. batch_size counts sequences of one optimizer step, over all ranks."""

    source: str = "stdlib"
    token_dtype: str | None = None
    sequence_length: int = 2048
    batch_size: int = 1
    documents: bool = False
    shuffle: bool = True
    held_out_fraction: float = 0.05

    def __post_init__(self) -> None:
        at_least("data.sequence_length", self.sequence_length, 2)
        at_least("data.batch_size", self.batch_size, 1)
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(f"data.held_out_fraction={self.held_out_fraction} must be between 0 and 1")


@dataclass(frozen=True)
class HardwareConfig:
    """Where it runs: device cpu (gloo) or cuda (NCCL)."""

    name: str = "cpu"
    device: str = "cpu"

    def __post_init__(self) -> None:
        one_of("hardware.device", self.device, ("cpu", "cuda"))

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation. context null: all ranks share a sequence; else ranks/context sequences go side by side."""

    steps: int = 50
    accumulation: int = 1
    context: int | None = None
    lr: float = 1e-3
    warmup_steps: int = 10
    final_lr_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    dtype: str = "float32"
    seed: int = 0
    eval_every: int = 25
    eval_batches: int = 4
    save_every: int = 25
    keep_checkpoints: int = 2
    trace_every: int = 25

    def __post_init__(self) -> None:
        for name in ("steps", "accumulation", "eval_batches", "save_every", "keep_checkpoints"):
            at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("warmup_steps", "eval_every", "trace_every", "weight_decay", "final_lr_fraction"):
            at_least(f"train.{name}", getattr(self, name), 0)
        for name, limit in {"beta1": 1, "beta2": 1, "seed": 2**32}.items():
            at_least(f"train.{name}", getattr(self, name), 0)
            if getattr(self, name) >= limit:
                raise ValueError(f"train.{name}={getattr(self, name)} must be below {limit}")
        if self.context is not None:
            at_least("train.context", self.context, 1)
        one_of("train.dtype", self.dtype, DTYPES)
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"train.{name}={getattr(self, name)} must be above 0")
        if math.isinf(self.lr):
            raise ValueError(f"train.lr={self.lr} must be finite")


@dataclass(frozen=True)
class Config:
    """A whole run; out is the folder of records and checkpoints."""

    model: ModelConfig
    method: MethodConfig
    data: DataConfig = field(default_factory=DataConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    out: str = "outputs/train"
    name: str = "train"

    def __post_init__(self) -> None:
        if not self.out:
            raise ValueError("out must name the folder of records and checkpoints, as out=DIR")
        if self.data.batch_size % self.train.accumulation:
            raise ValueError(
                f"data.batch_size={self.data.batch_size} sequences must be a multiple of "
                f"train.accumulation={self.train.accumulation}"
            )

    @property
    def out_path(self) -> Path:
        return Path(self.out)


def at_least(name: str, value: float, least: int) -> None:
    if not least <= value < math.inf:
        raise ValueError(f"{name}={value} must be at least {least}")


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value} is not known; choose {', '.join(choices)}")


def from_hydra(composed: DictConfig, schema: type = Config, prefix: str = "") -> Any:
    """Turn a composed config into the dataclass `schema`, with its types and bounds checked.

    Args:
        composed: what Hydra made.
        schema: the dataclass.
        prefix: of the keys in messages, "train." for the part train.

    Raises:
        ValueError: an unknown key, a missing value, a wrong type, or a value out of bounds.
    """
    if not isinstance(composed, DictConfig):
        raise ValueError(f"{prefix.removesuffix('.')}={composed} must be a group of keys; set one of them")
    types = get_type_hints(schema)
    unknown = [f"{prefix}{key}" for key in composed if key not in types]
    if unknown:
        raise ValueError(unknown_key(", ".join(unknown), schema, prefix))
    needed = [item.name for item in fields(schema) if item.default is item.default_factory is MISSING]
    missing = [key for key in types if OmegaConf.is_missing(composed, key) or (key in needed and key not in composed)]
    if missing:
        raise ValueError(f"{prefix}{missing[0]} has no value; give one with {prefix}{missing[0]}=...")
    parts = {
        key: from_hydra(composed[key], kind, f"{prefix}{key}.") for key, kind in types.items() if is_dataclass(kind)
    }
    plain = {key: composed[key] for key in types if key in composed and key not in parts}
    structured = OmegaConf.structured(schema)
    OmegaConf.set_readonly(structured, False)  # a frozen dataclass comes out read-only
    try:
        checked = OmegaConf.to_container(OmegaConf.merge(structured, plain))
    except OmegaConfBaseException as error:
        raise ValueError(f"{prefix}{error.full_key}: {str(error).splitlines()[0]}") from error
    return schema(**parts, **{key: checked[key] for key in plain})


def unknown_key(key: str, schema: type, prefix: str = "") -> str:
    """Return the message that `key` is none of the schema's, which start with `prefix`."""
    return f"{key}: no such key; valid: {', '.join(prefix + name for name in get_type_hints(schema))}"


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return a config dataclass as {"model.heads": 8, ...}."""
    values: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            values |= flat(value, f"{prefix}{item.name}.")
        else:
            values[f"{prefix}{item.name}"] = value
    return values
