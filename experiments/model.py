"""A Llama-shaped decoder from upipe parts. Parameter names are those of Hugging Face's LlamaForCausalLM.

Letters: B batch, S tokens of this rank, d hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from experiments.config import MethodConfig, ModelConfig
from upipe import Rotary, UlyssesAttention, UPipeAttention


class SwiGLU(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden_size, model.ffn, bias=False)
        self.up_proj = nn.Linear(model.hidden_size, model.ffn, bias=False)
        self.down_proj = nn.Linear(model.ffn, model.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm residual block: norm, attention, norm, MLP."""

    def __init__(self, model: ModelConfig, method: MethodConfig, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(model.hidden_size, model.norm_eps)
        self.self_attn = build_attention(model, method, group)
        self.post_attention_layernorm = nn.RMSNorm(model.hidden_size, model.norm_eps)
        self.mlp = SwiGLU(model)

    def forward(self, x: Tensor, positions: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        h = x + self.self_attn(self.input_layernorm(x), positions=positions, cu_seqlens=cu_seqlens)
        return h + self.mlp(self.post_attention_layernorm(h))


class Backbone(nn.Module):
    def __init__(self, model: ModelConfig, method: MethodConfig, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(model.vocab, model.hidden_size)
        self.layers = nn.ModuleList(Block(model, method, group) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.hidden_size, model.norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, positions, cu_seqlens)
        return self.norm(x)


class Decoder(nn.Module):
    """A language model over this rank's tokens."""

    def __init__(self, model: ModelConfig, method: MethodConfig, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.model = Backbone(model, method, group)
        self.lm_head = nn.Linear(model.hidden_size, model.vocab, bias=False)
        if model.tied_head:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the sum of this rank's token losses, fp32 (fp64 for fp64).

        Args:
            batch: what :func:`upipe.shard_batch` returns: input_ids, labels (already shifted), position_ids
                ``[B, S]``, and cu_seqlens where documents are packed.
        """
        hidden = self.model(batch["input_ids"], batch["position_ids"], batch.get("cu_seqlens"))
        logits = self.lm_head(hidden).flatten(0, 1)  # [B*S, V]
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(wide), batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def build_attention(model: ModelConfig, method: MethodConfig, group: dist.ProcessGroup | None) -> nn.Module:
    shared = {
        "head_dim": model.head_size,
        "group": group,
        "rotary": Rotary(model.rope_theta, model.head_size, scaling=model.rope_scaling),
        "qk_norm": model.qk_norm,
        "eps": model.norm_eps,
        "kernel": method.kernel,
        "keep_attention": method.keep_attention,
        "heads_per_stage": method.heads_per_stage,
    }
    layer = UPipeAttention if method.name == "upipe" else UlyssesAttention
    return layer(model.hidden_size, model.heads, model.kv_heads, **shared)


@torch.no_grad()
def initialise(decoder: Decoder, seed: int) -> None:
    """Fill the parameters: norms 1, all else normal with std 0.02, from `seed` and the parameter's name alone.

    The values do not depend on how many ranks the parameters are sharded over.
    """
    for i, (name, parameter) in enumerate(decoder.named_parameters()):
        if "norm" in name:
            parameter.fill_(1.0)
            continue
        generator = torch.Generator().manual_seed((seed << 20) + i)
        full = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).mul_(0.02)
        full = full.to(dtype=parameter.dtype, device=parameter.device)
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(full)
