"""One attention layer as a test case: random weights, the dense truth, and the same layer on ranks.

The check functions run inside ranks and raise AssertionError; mutants of the code must make them raise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from upipe import AttentionMask, Projections, Rotary, headwise_attention, reference
from upipe.collectives import group_rank, group_size
from upipe.nn import UlyssesAttention
from upipe.testing import assert_exact


@dataclass(frozen=True)
class Case:
    batch: int = 1
    local_tokens: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    heads_per_stage: int | None = None
    head_dim: int = 6
    hidden: int = 10
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None  # borders as thousandths of the sequence
    softcap: float | None = None
    sinks: bool = False
    theta: float | None = 100.0
    rotary_dim: int | None = None
    row_positions: bool = False
    bias: bool = False
    qk_norm: bool = False
    scale: float | None = None
    keep_attention: bool = False
    frozen: tuple[str, ...] = ()
    kernel: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    """Whole tensors, the same on every rank."""

    x: Tensor
    dy: Tensor
    weights: dict[str, Tensor]
    sinks: Tensor | None
    positions: Tensor
    cu_seqlens: Tensor | None


def make_inputs(case: Case, ranks: int, dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape: int, gain: float = 1.0) -> Tensor:
        return (gain * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    tokens = ranks * case.local_tokens
    rows, kv_rows = case.num_heads * case.head_dim, case.num_kv_heads * case.head_dim
    gain = case.hidden**-0.5
    weights = {
        "q": random(rows, case.hidden, gain=gain),
        "k": random(kv_rows, case.hidden, gain=gain),
        "v": random(kv_rows, case.hidden, gain=gain),
        "o": random(case.hidden, rows, gain=rows**-0.5),
    }
    if case.bias:
        weights |= {"q_bias": random(rows), "k_bias": random(kv_rows), "v_bias": random(kv_rows)}
        weights |= {"o_bias": random(case.hidden)}
    if case.qk_norm:
        weights |= {"q_norm": 1 + random(case.head_dim, gain=0.3), "k_norm": 1 + random(case.head_dim, gain=0.3)}
    positions = torch.arange(tokens)
    if case.row_positions:
        # Stretched, not shifted: rotary does not see a shift.
        positions = positions[None] * (1 + torch.arange(case.batch)[:, None]) + 7
    cu_seqlens = None
    if case.documents is not None:
        inner = [border * tokens // 1000 for border in case.documents]
        cu_seqlens = torch.tensor([0, *sorted(inner), tokens], dtype=torch.int32)
    return Inputs(
        x=random(case.batch, tokens, case.hidden),
        dy=random(case.batch, tokens, case.hidden),
        weights=weights,
        sinks=random(case.num_heads) if case.sinks else None,
        positions=positions,
        cu_seqlens=cu_seqlens,
    )


def shard(tensor: Tensor, group: dist.ProcessGroup | None, dim: int = 1) -> Tensor:
    return tensor.chunk(group_size(group), dim=dim)[group_rank(group)].contiguous()


def leaves(inputs: Inputs, case: Case) -> dict[str, Tensor]:
    named = dict(inputs.weights) if inputs.sinks is None else inputs.weights | {"sinks": inputs.sinks}
    return {name: tensor.clone().requires_grad_(name not in case.frozen) for name, tensor in named.items()}


def dense(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """Output and every gradient of the whole sequence on one device."""
    named, x = leaves(inputs, case), inputs.x.clone().requires_grad_("x" not in case.frozen)
    y = reference.attention_layer(
        x,
        {name: tensor for name, tensor in named.items() if name != "sinks"},
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        theta=case.theta,
        rotary_dim=case.rotary_dim,
        positions=inputs.positions,
        scale=case.scale,
        causal=case.causal,
        window=case.window,
        cu_seqlens=inputs.cu_seqlens,
        softcap=case.softcap,
        sinks=named.get("sinks"),
    )
    wanted = {name: tensor for name, tensor in {"x": x, **named}.items() if tensor.requires_grad}
    grads = torch.autograd.grad(y, list(wanted.values()), inputs.dy)
    return {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}


def on_ranks(
    case: Case, inputs: Inputs, method: str, group: dist.ProcessGroup | None, *, sum_weights: bool = True
) -> dict[str, Tensor]:
    """Run this rank's part: output and dx of its tokens, gradients of weights summed over the ranks."""
    named, x = leaves(inputs, case), shard(inputs.x, group).requires_grad_("x" not in case.frozen)
    rotary = None
    positions = None
    if case.theta is not None:
        rotary = Rotary(case.theta, case.head_dim, case.rotary_dim)
        positions = shard(inputs.positions, group, dim=inputs.positions.dim() - 1)
    mask = AttentionMask(case.causal, case.window, inputs.cu_seqlens, case.softcap, named.get("sinks"))
    proj = Projections(**{name: tensor for name, tensor in named.items() if name != "sinks"})
    if method == "upipe":
        y = headwise_attention(
            x,
            proj,
            group=group,
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            heads_per_stage=case.heads_per_stage,
            positions=positions,
            rotary=rotary,
            mask=mask,
            scale=case.scale,
            kernel=case.kernel,
            keep_attention=case.keep_attention,
        )
    else:
        y = _ulysses_layer(case, x, proj, positions, rotary, mask, group)
    wanted = {name: tensor for name, tensor in {"x": x, **named}.items() if tensor.requires_grad}
    grads = dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), shard(inputs.dy, group)), strict=True))
    if sum_weights and group_size(group) > 1:
        for name, grad in grads.items():
            if name != "x":
                dist.all_reduce(grad, group=group)
    return {"y": y.detach(), **grads}


def _ulysses_layer(
    case: Case,
    x: Tensor,
    proj: Projections,
    positions: Tensor | None,
    rotary: Rotary | None,
    mask: AttentionMask,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """The module's forward on the case's tensors."""
    layer = UlyssesAttention(
        case.hidden,
        case.num_heads,
        case.num_kv_heads,
        head_dim=case.head_dim,
        group=group,
        rotary=rotary,
        mask=AttentionMask(mask.causal, mask.window, None, mask.softcap),
        scale=case.scale,
        qkv_bias=case.bias,
        o_bias=case.bias,
        qk_norm=case.qk_norm,
        sinks=case.sinks,
        kernel=case.kernel,
        dtype=x.dtype,
    )
    parameters = {
        f"{name[0]}_{'norm' if 'norm' in name else 'proj'}.{'bias' if 'bias' in name else 'weight'}": tensor
        for name, tensor in zip(proj.tensor_names(), proj.tensors(), strict=True)
        if tensor is not None
    }
    if mask.sinks is not None:
        parameters["sinks"] = mask.sinks
    return torch.func.functional_call(
        layer, parameters, (x,), {"positions": positions, "cu_seqlens": mask.cu_seqlens}, strict=True
    )


def check(case: Case, method: str = "upipe", *, group: dist.ProcessGroup | None = None) -> None:
    """Hold output and every gradient to the dense truth within 1e-10; runs in a rank, or alone."""
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    inputs = make_inputs(case, group_size(group))
    truth = dense(case, inputs)
    ours = on_ranks(case, inputs, method, group)
    assert set(ours) == set(truth)
    for name, value in ours.items():
        expected = shard(truth[name], group) if name in ("y", "x") else truth[name]
        assert_exact(value, expected, f"{name} of {case}")
