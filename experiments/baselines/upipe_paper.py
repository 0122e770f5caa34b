"""The block of the published Untied Ulysses runs: C heads a stage, and all that their code kept beside them.

Letters: B batch, S tokens of this rank, T = C*S, C ranks, H query heads, K KV heads, g = H/K, D head size, d hidden
size. A is B*S*d*2 bytes, u one stage's heads in bf16: A/4 for Llama3-8B on 8 ranks.

Reference: Untied Ulysses, arXiv 2602.21196.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from experiments.baselines.shell import check_geometry, linear, run_block, to_heads, to_tokens
from experiments.config import ModelConfig
from experiments.model import SwiGLU
from upipe import AttentionMask, HeadSchedule
from upipe.collectives import group_size
from upipe.kernels import Kernel, accumulate_dtype, select_kernel
from upipe.memory.label import label
from upipe.projections import put_heads, take_heads


class UPipePaperBlock(nn.Module):
    """Equals :class:`experiments.model.Block` and loads its state_dict; tensors live as long as in the published runs.

    At the peak of a Llama3-8B block on 8 ranks, the kernel's backward in a stage, stand 11.15 A
    (tests/experiments/test_baselines.py): the input, its norm, dy, the residual's gradient and the norm output's
    gradient 5; out, and dout in both head orders, of all heads 3; q, k, v, out and dout of the stage 1.25; dq, dk and
    dv as the kernel writes them 0.75; dk, dv of the group so far 0.5; the kernel's fp32 dq 0.5; the rotary table and
    its copy 0.125; log-sum-exp 0.016. In forward 5.1 A, in a stage's ring wrapper: the input, its norm and out of all
    heads 3; q, k and v 0.75; out as the kernel wrote it 0.25, in fp32 0.5 and cast back 0.25; the buffer for q 0.25;
    table and log-sum-exp 0.08.

    Args:
        model: the geometry.
        group: the C ranks; None is this process alone.
        kernel: name of the local kernel.
        offload_input: False keeps the block input on the device, as in the first block.

    Raises:
        ValueError: KV heads no multiple of the ranks, or qk_norm.
    """

    def __init__(
        self, model: ModelConfig, group: dist.ProcessGroup | None, kernel: str, *, offload_input: bool = True
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(model.hidden_size, model.norm_eps)
        self.self_attn = UPipePaperAttention(model, group, kernel)
        self.post_attention_layernorm = nn.RMSNorm(model.hidden_size, model.norm_eps)
        self.mlp = SwiGLU(model)
        self.model, self.offload_input = model, offload_input

    def forward(self, x: Tensor, positions: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """See :func:`experiments.baselines.shell.run_block`."""
        return run_block(self, self.model, x, positions, cu_seqlens, offload_input=self.offload_input)


class UPipePaperAttention(nn.Module):
    """C heads a stage: head r*g + s on rank r in stage s, for K = C."""

    def __init__(self, model: ModelConfig, group: dist.ProcessGroup | None, kernel: str) -> None:
        super().__init__()
        check_geometry("upipe_paper", model, group)
        self.schedule = HeadSchedule.build(model.heads, model.kv_heads, group_size(group))
        self.head_dim, self.group, self.kernel = model.head_size, group, kernel
        rows, kv_rows = model.heads * model.head_size, model.kv_heads * model.head_size
        self.q_proj = nn.Linear(model.hidden_size, rows, bias=False)
        self.k_proj = nn.Linear(model.hidden_size, kv_rows, bias=False)
        self.v_proj = nn.Linear(model.hidden_size, kv_rows, bias=False)
        self.o_proj = nn.Linear(rows, model.hidden_size, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        kernel = select_kernel(self.kernel, AttentionMask(), x.new_empty(0, self.head_dim))
        plan = _Plan(self.schedule, self.group, kernel, self.head_dim)
        weights = [proj.weight for proj in (self.q_proj, self.k_proj, self.v_proj)]
        out = _Stages.apply(plan, x, table, *weights)
        return linear(out.flatten(2), self.o_proj.weight, out="attn.y", dx="attn.dout")


@dataclass(frozen=True, eq=False)
class _Plan:
    """The steps that forward and backward of a stage have in common."""

    schedule: HeadSchedule
    group: dist.ProcessGroup | None
    kernel: Kernel
    head_dim: int

    def heads(self, stage: int) -> list[int]:
        return list(chain.from_iterable(self.schedule.stages[stage].q_heads))

    def new_kv_heads(self, stage: int) -> list[int]:
        return list(chain.from_iterable(self.schedule.stages[stage].new_kv_heads))

    def kv_heads(self, stage: int) -> list[int]:
        return list(chain.from_iterable(self.schedule.stages[stage].kv_heads))

    def group_ends(self, stage: int) -> bool:
        """Whether no later stage attends with this one's KV heads."""
        return any(self.schedule.done_kv_heads(stage))

    def slots(self, stage: int) -> slice:
        """Where the stage's heads are in a tensor of all heads in stage order."""
        ranks = self.schedule.ranks
        return slice(stage * ranks, (stage + 1) * ranks)

    def stage_order(self) -> list[int]:
        return [head for stage in range(len(self.schedule.stages)) for head in self.heads(stage)]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    def project(self, x: Tensor, weight: Tensor, heads: Sequence[int], table: Tensor | None) -> Tensor:
        """Project, rotate and exchange a stage's heads: ``[B, S, d]`` to ``[B, T, 1, D]``."""
        rows = F.linear(x, take_heads(weight, heads, self.head_dim)).unflatten(-1, (-1, self.head_dim))
        if table is not None:
            rotate_(rows, table)
        return to_heads(rows, self.group)

    def keys_and_values(self, x: Tensor, wk: Tensor, wv: Tensor, heads: Sequence[int], table: Tensor) -> list[Tensor]:
        with label("stage.kv"):
            return [self.project(x, wk, heads, table), self.project(x, wv, heads, None)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Attend through the ring wrapper: a buffer for q from a neighbour that there is none of, out through fp32."""
        with label("ring.receive"):
            received = torch.empty_like(q)
        with label("stage.out_lse"):
            block, lse = self.kernel.forward(q, k, v, AttentionMask(), self.scale)
        with label("ring.fp32"):
            wide = block.to(accumulate_dtype(q.dtype))
        with label("stage.out"):
            out = wide.to(q.dtype)
        del received  # alive up to here
        return out, lse


def rotate_(x: Tensor, table: Tensor, direction: int = 1) -> None:
    """Rotate ``[B, S, heads, D]`` in place and in its own dtype, pairs (i, i + D/2); direction -1 turns back."""
    turn = torch.view_as_real(table).to(x.dtype).unsqueeze(-3)  # [.., S, 1, D/2, 2]
    cos, sin = turn[..., 0], turn[..., 1]
    first, second = x.unflatten(-1, (2, -1)).unbind(-2)
    turned = (first * cos).addcmul_(second, sin, value=-direction)
    second.mul_(cos).addcmul_(first, sin, value=direction)
    first.copy_(turned)


class _Stages(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, x: Tensor, table: Tensor, *weights: Tensor) -> Tensor:
        wq, wk, wv = weights
        order = plan.stage_order()
        with label("attn.out"):
            out = x.new_empty(*x.shape[:2], len(order), plan.head_dim)
        kv: list[Tensor] = []
        lses = []
        for stage in range(len(plan.schedule.stages)):
            if plan.new_kv_heads(stage):
                kv.clear()
                kv = plan.keys_and_values(x, wk, wv, plan.new_kv_heads(stage), table)
            with label("stage.q"):
                q = plan.project(x, wq, plan.heads(stage), table)
            stage_out, lse = plan.attend(q, *kv)
            with label("stage.out"):
                out[:, :, plan.slots(stage)] = to_tokens(stage_out, plan.group)
            lses.append(lse)
            del q, stage_out, lse
        ctx.save_for_backward(x, table, *weights, out, *lses)
        ctx.plan = plan
        slot_of_head = sorted(range(len(order)), key=order.__getitem__)
        with label("attn.out"):
            return out.index_select(2, torch.tensor(slot_of_head, device=out.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # dy, in the model's head order, is held by the caller of this function until it returns.
        plan: _Plan = ctx.plan
        x, table, wq, wk, wv, out, *lses = ctx.saved_tensors
        with label("attn.dout_by_stage"):
            dout = dy.index_select(2, torch.tensor(plan.stage_order(), device=dy.device))
        grads = _Gradients(plan, x, table, (wq, wk, wv))
        kv: list[Tensor] = []
        sums: list[Tensor] = []
        for stage in range(len(plan.schedule.stages)):
            if plan.new_kv_heads(stage):
                kv.clear()
                kv = plan.keys_and_values(x, wk, wv, plan.new_kv_heads(stage), table)
            dq, *found = _attend_backward(plan, stage, x, wq, table, kv, out, lses[stage], dout)
            sums = _sum(sums, found)
            del found
            grads.add(0, dq, plan.heads(stage))
            del dq
            if plan.group_ends(stage):
                for which in (1, 2):
                    grads.add(which, sums[which - 1], plan.kv_heads(stage))
                sums = []
        return None, grads.dx, None, *grads.dweights


def _sum(sums: list[Tensor], found: list[Tensor]) -> list[Tensor]:
    """Add dk and dv over the g stages of their KV heads, in bf16 as they are."""
    for total, part in zip(sums, found, strict=False):
        total.add_(part)
    return sums or found


def _attend_backward(
    plan: _Plan,
    stage: int,
    x: Tensor,
    wq: Tensor,
    table: Tensor,
    kv: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange q, out and dout of a stage again and run the kernel; return dq, dk, dv ``[B, T, 1, D]``."""
    slots = plan.slots(stage)
    with label("stage.q"):
        q = plan.project(x, wq, plan.heads(stage), table)
    with label("stage.out"):
        stage_out = to_heads(out[:, :, slots], plan.group)
    with label("stage.dout"):
        stage_dout = to_heads(dout[:, :, slots], plan.group)
    with label("stage.dqkv"):
        return plan.kernel.backward(stage_dout, q, *kv, stage_out, lse, AttentionMask(), plan.scale)


class _Gradients:
    """dx, added to in its own dtype once a stage, and dWq, dWk, dWv, zero-filled at full size."""

    def __init__(self, plan: _Plan, x: Tensor, table: Tensor, weights: Sequence[Tensor]) -> None:
        self._plan, self._x, self._table, self._weights = plan, x, table, weights
        with label("attn.dx"):
            self.dx = torch.zeros_like(x)
        with label("attn.dweight"):
            self.dweights = [torch.zeros_like(weight) for weight in weights]

    def add(self, which: int, grad: Tensor, heads: Sequence[int]) -> None:
        """Take the gradient ``[B, T, 1, D]`` of q, k or v (0, 1, 2) of `heads` back to x and the weight."""
        head_dim = self._plan.head_dim
        with label("stage.dqkv"):
            rows = to_tokens(grad, self._plan.group)  # [B, S, C, D]
            if which < 2:
                rotate_(rows, self._table, -1)
        rows = rows.flatten(2)
        with label("stage.dx"):
            self.dx.add_(rows @ take_heads(self._weights[which], heads, head_dim))
        with label("stage.dweight"):
            put_heads(self.dweights[which], rows.flatten(0, 1).t() @ self._x.flatten(0, 1), heads, head_dim)
