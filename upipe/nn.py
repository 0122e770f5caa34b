"""Attention modules over the functions, with the parameter names of Hugging Face's Llama and Qwen3 ``self_attn``.

Letters: B batch, S tokens of this rank, T tokens of the whole sequence, d hidden size, H query heads, K KV heads,
D head size.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from upipe.collectives import group_rank, group_size
from upipe.headwise import headwise_attention
from upipe.kernels import accumulate_dtype
from upipe.mask import AttentionMask
from upipe.projections import Projections
from upipe.rotary import Rotary, rotate
from upipe.schedule import HeadSchedule
from upipe.ulysses import ulysses_attention


class UPipeAttention(nn.Module):
    """A self-attention layer whose heads go through in stages; see :func:`upipe.headwise_attention`.

    A checkpoint of a Hugging Face ``self_attn`` loads as it is (``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``,
    ``q_norm``, ``k_norm``, ``sinks``), and is the same for any number of ranks and heads per stage.

    Args:
        hidden_size: d.
        num_heads: H, a multiple of `num_kv_heads`.
        num_kv_heads: K.
        head_dim: D; None is d/H.
        group: the ranks that share a sequence; None is this process alone, without torch.distributed.
        heads_per_stage: U; None takes the number of ranks.
        rotary: None for none.
        mask: None is causal. Its window, softcap and so on are fixed here; documents are given to `forward`.
        scale: of the logits; None is ``1 / sqrt(D)``.
        qkv_bias: biases of q, k and v.
        o_bias: bias of the output projection.
        qk_norm: RMS norm of each head of q and k before rotary.
        eps: of the norms.
        sinks: one learned logit a head.
        dropout: must be 0.
        kernel: see :func:`upipe.headwise_attention`.
        keep_attention: see :func:`upipe.headwise_attention`.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: an invalid geometry or U, dropout, or sinks given through `mask`.

    >>> layer = UPipeAttention(32, 4, 2, group=None, heads_per_stage=2)
    >>> layer(torch.randn(1, 6, 32)).shape
    torch.Size([1, 6, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int | None = None,
        group: dist.ProcessGroup | None,
        heads_per_stage: int | None = None,
        rotary: Rotary | None = None,
        mask: AttentionMask | None = None,
        scale: float | None = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: bool = False,
        eps: float = 1e-6,
        sinks: bool = False,
        dropout: float = 0.0,
        kernel: str = "auto",
        keep_attention: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dropout:
            raise ValueError(f"dropout={dropout} is not supported: it would change the recompute; use dropout=0")
        if mask is not None and (mask.sinks is not None or mask.cu_seqlens is not None):
            raise ValueError(
                "mask may hold neither sinks (pass sinks=True, the layer owns them) "
                "nor cu_seqlens (pass them to forward)"
            )
        HeadSchedule.build(num_heads, num_kv_heads, group_size(group), heads_per_stage)
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"hidden_size={hidden_size} is no multiple of num_heads={num_heads}; pass head_dim")
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        if self.head_dim < 1:
            raise ValueError(f"head_dim={self.head_dim} must be at least 1")
        if rotary is not None and rotary.head_dim != self.head_dim:
            raise ValueError(f"rotary is for head_dim={rotary.head_dim} but the layer has head_dim={self.head_dim}")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.group, self.heads_per_stage = group, heads_per_stage
        self.rotary, self.mask, self.scale = rotary, AttentionMask() if mask is None else mask, scale
        self.kernel, self.keep_attention, self.eps = kernel, keep_attention, eps
        rows, kv_rows = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, rows, bias=qkv_bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(hidden_size, kv_rows, bias=qkv_bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(hidden_size, kv_rows, bias=qkv_bias, device=device, dtype=dtype)
        self.o_proj = nn.Linear(rows, hidden_size, bias=o_bias, device=device, dtype=dtype)
        self.q_norm = nn.RMSNorm(self.head_dim, eps, device=device, dtype=dtype) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps, device=device, dtype=dtype) if qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype)) if sinks else None

    def forward(self, x: Tensor, *, positions: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: ``[B, S, d]``, this rank's contiguous tokens.
            positions: ``[S]`` or ``[B, S]`` integers; None counts on from the ranks before.
            cu_seqlens: int32 document borders in tokens of the whole sequence; needs B = 1.

        Returns:
            ``[B, S, d]``.

        Raises:
            ValueError: see :func:`upipe.headwise_attention`; or a projection that is not a plain ``nn.Linear`` (an
                adapter, whose own weights would be passed over) or is sharded by itself.
        """
        return headwise_attention(
            x,
            self.projections(),
            group=self.group,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            heads_per_stage=self.heads_per_stage,
            positions=positions,
            rotary=self.rotary,
            mask=self.mask_for(cu_seqlens),
            scale=self.scale,
            kernel=self.kernel,
            keep_attention=self.keep_attention,
        )

    def projections(self) -> Projections:
        """Return the weights as the functions take them. Raises as :meth:`forward`."""
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear = getattr(self, name)
            if isinstance(linear.weight, DTensor):
                raise ValueError(
                    f"{name} is still sharded; wrap the attention layer or its block (fully_shard), not its Linears"
                )
            if getattr(linear.forward, "__func__", None) is not nn.Linear.forward:
                kind = f"{type(linear).__module__}.{type(linear).__name__}"
                raise ValueError(
                    f"{name} is a {kind}, whose forward is not that of nn.Linear and would be passed over; merge the "
                    "adapter, or use UlyssesAttention, which calls its projections"
                )
            if linear._forward_hooks or linear._forward_pre_hooks:
                raise ValueError(
                    f"{name} has forward hooks, which would not run; remove them, or use UlyssesAttention, which calls "
                    "its projections"
                )
        return Projections(
            q=self.q_proj.weight,
            k=self.k_proj.weight,
            v=self.v_proj.weight,
            o=self.o_proj.weight,
            q_bias=self.q_proj.bias,
            k_bias=self.k_proj.bias,
            v_bias=self.v_proj.bias,
            o_bias=self.o_proj.bias,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=self.eps,
        )

    def mask_for(self, cu_seqlens: Tensor | None) -> AttentionMask:
        """Return the layer's mask with documents and the layer's sinks."""
        mask = self.mask if cu_seqlens is None else replace(self.mask, cu_seqlens=cu_seqlens)
        return mask.with_sinks(self.sinks)

    def __deepcopy__(self, memo: dict[int, object]) -> UPipeAttention:
        # A process group cannot be copied; a copy of the layer talks to the same ranks.
        memo[id(self.group)] = self.group
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__ = copy.deepcopy(self.__dict__, memo)
        return clone

    def extra_repr(self) -> str:
        """Return the geometry for ``print(module)``."""
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, heads_per_stage={self.heads_per_stage}"


class UlyssesAttention(UPipeAttention):
    """The baseline: the same layer with all heads exchanged at once, differentiated by plain autograd.

    The constructor and the parameters are those of :class:`UPipeAttention`; it calls its projections as modules, so
    adapters and hooks on them work.

    Args:
        args: as :class:`UPipeAttention`.
        kwargs: as :class:`UPipeAttention`; `heads_per_stage` must be None or `num_heads`, and `keep_attention` False.

    Raises:
        ValueError: as :class:`UPipeAttention`, or an option that would have no effect.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        if self.heads_per_stage not in (None, self.num_heads):
            raise ValueError(
                f"heads_per_stage={self.heads_per_stage} has no effect in UlyssesAttention, which exchanges all "
                f"{self.num_heads} heads at once; use UPipeAttention"
            )
        if self.keep_attention:
            raise ValueError(
                "keep_attention=True has no effect in UlyssesAttention, which always keeps its output; leave it out"
            )

    def forward(self, x: Tensor, *, positions: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Attend; see :meth:`UPipeAttention.forward`."""
        if x.dim() != 3 or not x.numel():
            raise ValueError(f"x must be [B, S, d] with at least one token, got {list(x.shape)}")
        if x.shape[2] != self.q_proj.in_features:
            raise ValueError(f"x is {list(x.shape)} but the layer has hidden_size={self.q_proj.in_features}")
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            # As in UPipeAttention: computed in fp32, rounded once, whatever the dtype of the norm's weight.
            q, k = (
                nn.functional.rms_norm(t.to(norm.weight.dtype), (self.head_dim,), norm.weight, norm.eps).to(t.dtype)
                for t, norm in ((q, self.q_norm), (k, self.k_norm))
            )
        if self.rotary is not None:
            if positions is None:
                first = group_rank(self.group) * x.shape[1]
                positions = torch.arange(first, first + x.shape[1], device=x.device)
            cos, sin = self.rotary.tables(positions, accumulate_dtype(x.dtype))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        elif positions is not None:
            raise ValueError("positions are used by rotary only; pass rotary=Rotary(...) or leave positions out")
        out = ulysses_attention(
            q, k, v, group=self.group, mask=self.mask_for(cu_seqlens), scale=self.scale, kernel=self.kernel
        )
        return self.o_proj(out.flatten(2))
