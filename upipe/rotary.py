"""Rotary position embedding for explicit integer positions, angles in fp64.

Letters: B batch, S tokens of this rank, D head size, R rotated dims of it, in pairs (i, i + R/2) as in Hugging Face.

The angle of a pair is position times inverse frequency. In fp32 that product is off by up to half a radian at position
2^23, and a library that keeps its inverse frequencies in fp32 (Hugging Face) is off by as much; here both are fp64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

# Of each rope_type: the keys it must have and those it may have.
_SCALING_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
# Keys of any type. The last two repeat arguments of Rotary and must agree with them.
_SHARED_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotation of a model: which frequencies, over which dims of a head.

    Args:
        theta: the base; pair i of R/2 turns by ``theta ** (-2i / R)`` radians a token.
        head_dim: D.
        rotary_dim: R, even, the first dims of a head that are rotated; None is all of them.
        scaling: a Hugging Face ``rope_scaling`` or ``rope_parameters`` mapping of rope_type "default", "linear",
            "llama3" or "yarn"; None is "default". Read, never written. An option set to None counts as absent. For
            yarn, `attention_factor` comes before the one that `mscale` and `mscale_all_dim` imply.

    Raises:
        ValueError: a size or theta out of range; a rope_type or key that is unknown, a key that is missing, not a
            positive number, or contradicts another; `rope_theta` or `partial_rotary_factor` unlike the arguments.

    >>> Rotary(10_000.0, 8, rotary_dim=4).inverse_frequencies
    (1.0, 0.01)
    >>> Rotary(10_000.0, 8, scaling={"rope_type": "linear"})
    Traceback (most recent call last):
    ValueError: rope_scaling of rope_type "linear" needs factor; got rope_type
    """

    theta: float
    head_dim: int
    rotary_dim: int | None = None
    scaling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not 1 < self.theta < math.inf:
            raise ValueError(f"theta={self.theta} must be above 1 and finite; most models use 10000 or more")
        rotary_dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if rotary_dim % 2 or not 2 <= rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim={rotary_dim} must be even and from 2 to head_dim={self.head_dim}; dims turn in pairs"
            )
        if self.scaling is not None:
            _check_scaling(self.scaling)
            self._check_agreement(self.scaling)

    def _check_agreement(self, scaling: Mapping[str, Any]) -> None:
        theta, part = scaling.get("rope_theta"), scaling.get("partial_rotary_factor")
        if theta is not None and theta != self.theta:
            raise ValueError(f"rope_theta={theta} in rope_scaling must equal theta={self.theta}; drop one of them")
        if part is not None and int(self.head_dim * part) != 2 * self.num_pairs:
            raise ValueError(
                f"partial_rotary_factor={part} in rope_scaling rotates {int(self.head_dim * part)} of "
                f"{self.head_dim} dims, rotary_dim rotates {2 * self.num_pairs}; "
                f"pass rotary_dim={int(self.head_dim * part)}"
            )

    @property
    def num_pairs(self) -> int:
        """R/2, the last dim of the tables."""
        return (self.head_dim if self.rotary_dim is None else self.rotary_dim) // 2

    @property
    def inverse_frequencies(self) -> tuple[float, ...]:
        """Radians a token, one number a pair, scaling included."""
        plain = [self.theta ** -(i / self.num_pairs) for i in range(self.num_pairs)]
        scaling = self.scaling or {}
        match _rope_type(scaling):
            case "linear":
                plain = [value / scaling["factor"] for value in plain]
            case "llama3":
                plain = [_llama3(value, scaling) for value in plain]
            case "yarn":
                plain = _yarn(plain, self.theta, scaling)
        return tuple(plain)

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by: 1 except for yarn."""
        scaling = self.scaling or {}
        if _rope_type(scaling) != "yarn":
            return 1.0
        given = scaling.get("attention_factor")
        if given is not None:
            return float(given)
        stretch = 0.1 * math.log(scaling["factor"])
        if scaling.get("mscale") is not None:
            return (stretch * scaling["mscale"] + 1) / (stretch * scaling["mscale_all_dim"] + 1)
        return stretch + 1

    def tables(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles at `positions`, times the attention factor.

        Computed in fp64 and rounded once to `dtype`: at position p the fp64 angle is off by at most 4e-16 p radians
        (3e-9 at 2^23), below the rounding of an fp32 table up to 2^26.

        Args:
            positions: integer ``[S]``, or ``[B, S]`` for positions that differ by row; any device.
            dtype: float32 or float64.

        Returns:
            cos and sin, each ``[*positions.shape, R/2]`` on the device of `positions`.

        Raises:
            ValueError: `positions` of another dtype or number of dims, or another `dtype`.

        Cost: two fp64 tables beside the results while it runs.

        >>> cos, sin = Rotary(10_000.0, 8).tables(torch.arange(2**23, 2**23 + 3))
        >>> cos.shape, cos.dtype
        (torch.Size([3, 4]), torch.float32)
        """
        if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise ValueError(f"positions must be integers, exact at any length; got {positions.dtype}, use torch.int64")
        if positions.dim() not in (1, 2):
            raise ValueError(f"positions must be [S] or [B, S]; got {list(positions.shape)}")
        _check_table_dtype(dtype)
        frequencies = torch.tensor(self.inverse_frequencies, dtype=torch.float64, device=positions.device)
        angles = positions.to(torch.float64)[..., None] * frequencies  # [.., S, R/2]
        factor = self.attention_factor
        return angles.cos().mul_(factor).to(dtype), angles.sin_().mul_(factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dims of every head; the others pass through. Equals Hugging Face's ``rotate_half`` form.

    Computed in the wider dtype of `x` and the tables and rounded once to that of `x`, and so is its gradient.

    Args:
        x: ``[B, S, heads, D]``.
        cos: ``[S, R/2]`` or ``[B, S, R/2]``, float32 or float64, from :meth:`Rotary.tables`.
        sin: as `cos`.

    Returns:
        ``[B, S, heads, D]``, contiguous, in the dtype of `x`.

    Raises:
        ValueError: shapes that do not fit, tables of a narrow dtype, or tables that ask for a gradient.

    Cost: the result and half of R/D of `x` in the tables' dtype. Autograd keeps the tables, not `x`.

    >>> cos, sin = Rotary(10_000.0, 4).tables(torch.tensor([0, 1]))
    >>> rotate(torch.ones(1, 2, 1, 4), cos, sin)[0, 0, 0]
    tensor([1., 1., 1., 1.])
    """
    _check_rotation(x, cos, sin)
    return _Rotation.apply(x, cos, sin, 1)


def rotate_transposed(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the transpose of :func:`rotate` (its vjp): the gradient of `x` for the gradient `g` of the result.

    It is the inverse of :func:`rotate` when the attention factor is 1; arguments, dtypes and cost are the same.

    >>> cos, sin = Rotary(10_000.0, 4).tables(torch.arange(3), torch.float64)
    >>> x = torch.arange(24, dtype=torch.float64).view(1, 3, 2, 4)
    >>> torch.allclose(rotate_transposed(rotate(x, cos, sin), cos, sin), x)
    True
    """
    _check_rotation(g, cos, sin)
    return _Rotation.apply(g, cos, sin, -1)


class _Rotation(torch.autograd.Function):
    """Plain autograd would round the gradient's two terms to the dtype of x before it adds them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.direction = direction
        pairs = cos.shape[-1]
        out = x.new_empty(x.shape)
        first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # [.., S, 1, R/2]
        # A product of two dtypes is computed in the wider one; the write into `out` is the only rounding.
        out[..., :pairs] = (first * cos).addcmul_(second, sin, value=-direction)
        out[..., pairs : 2 * pairs] = (second * cos).addcmul_(first, sin, value=direction)
        out[..., 2 * pairs :] = x[..., 2 * pairs :]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(grads[0], cos, sin, -ctx.direction), None, None, None


def _check_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(f"x must be a floating tensor [B, S, heads, D]; got {x.dtype} {list(x.shape)}")
    fits = cos.shape[:-1] in (x.shape[1:2], x.shape[:2]) and 2 * cos.shape[-1] <= x.shape[-1]
    if cos.shape != sin.shape or not fits:
        batch, tokens, _, head_dim = x.shape
        raise ValueError(
            f"cos and sin must be [{tokens}, R/2] or [{batch}, {tokens}, R/2] with R at most {head_dim} for x "
            f"{list(x.shape)}; got {list(cos.shape)} and {list(sin.shape)}: pass the positions of these tokens"
        )
    if cos.dtype != sin.dtype:
        raise ValueError(f"cos and sin must have one dtype; got {cos.dtype} and {sin.dtype}")
    _check_table_dtype(cos.dtype)
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("cos and sin get no gradient; detach them")


def _check_table_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"cos and sin are float32 or float64, not {dtype}; the result of rotate has the dtype of x")


def _rope_type(scaling: Mapping[str, Any]) -> str:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _check_scaling(scaling: Mapping[str, Any]) -> None:
    kind = _rope_type(scaling)
    if not {"rope_type", "type"} & scaling.keys() or scaling.get("type", kind) != kind or kind not in _SCALING_KEYS:
        raise ValueError(
            f"rope_scaling must name one rope_type of {', '.join(_SCALING_KEYS)}; got "
            f"rope_type={scaling.get('rope_type')!r}, type={scaling.get('type')!r}"
        )
    given = [key for key, value in scaling.items() if value is not None]
    required, optional = _SCALING_KEYS[kind]
    missing = [key for key in required if key not in given]
    unknown = [str(key) for key in given if key not in (*_SHARED_KEYS, *required, *optional)]
    if missing:
        raise ValueError(
            f'rope_scaling of rope_type "{kind}" needs {", ".join(missing)}; got {", ".join(map(str, given))}'
        )
    if unknown:
        valid = ", ".join((*_SHARED_KEYS, *required, *optional))
        raise ValueError(f'rope_scaling of rope_type "{kind}" has no {", ".join(unknown)}; valid: {valid}')
    for key in given:
        value = scaling[key]
        if key == "truncate":
            fits, rule = isinstance(value, bool), "true or false"
        elif key == "factor":
            fits, rule = _is_number(value) and value >= 1, "a number, 1 or more"
        else:
            fits, rule = key in ("rope_type", "type") or (_is_number(value) and value > 0), "a number above 0"
        if not fits:
            raise ValueError(f"{key}={value!r} in rope_scaling must be {rule}")
    _check_orders(scaling)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _check_orders(scaling: Mapping[str, Any]) -> None:
    if _rope_type(scaling) == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError(
            f"low_freq_factor={scaling['low_freq_factor']} must be below high_freq_factor={scaling['high_freq_factor']}"
        )
    if _rope_type(scaling) == "yarn":
        fast, slow = _betas(scaling)
        if fast <= slow:
            raise ValueError(f"beta_fast={fast} must be above beta_slow={slow} (32 and 1 where not given)")
        lone = {"mscale", "mscale_all_dim"} & {key for key, value in scaling.items() if value is not None}
        if len(lone) == 1:
            raise ValueError(
                f"{lone.pop()} in rope_scaling has no effect alone; give mscale and mscale_all_dim, or attention_factor"
            )


def _betas(scaling: Mapping[str, Any]) -> tuple[float, float]:
    fast, slow = scaling.get("beta_fast"), scaling.get("beta_slow")
    return 32.0 if fast is None else fast, 1.0 if slow is None else slow


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    """Llama 3.1: short waves stay, long ones are stretched by the factor, those between are blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
    return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency


def _yarn(plain: list[float], theta: float, scaling: Mapping[str, Any]) -> list[float]:
    """YaRN (arXiv 2309.00071), section 3.2, with the rounding and clamping of the pair index of Hugging Face."""
    rotary_dim = 2 * len(plain)
    length = scaling["original_max_position_embeddings"]
    # The pair that turns `beta` times over the original length.
    low, high = (
        rotary_dim * math.log(length / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in _betas(scaling)
    )
    if scaling.get("truncate") in (None, True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low or 0.001
    stretched = [min(max((pair - low) / width, 0.0), 1.0) for pair in range(len(plain))]
    return [
        value / scaling["factor"] * share + value * (1 - share) for value, share in zip(plain, stretched, strict=True)
    ]
