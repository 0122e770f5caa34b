"""A decoder block as one recompute unit: its backward peaks at about six block inputs instead of eleven.

Forward keeps the block's input only. Backward recomputes the attention output, then goes through the block from its
end, each gradient taking the place of what it no longer needs::

    out = attend(norm(x))                                         all stages; the norm is recomputed per token tile
    per tile:   h = x + out Wo;  dh = dy + d(mlp(norm(h)))         written over dy
    per stage:  dout = dh Wo; q, k, v again; kernel backward       dq takes out's place
    per tile:   dx = dh + d(norm(x))([dq dk dv] Wqkv)              written over dh

Neither norm(x), h, the MLP's activations, nor q, k, v or the output's gradient of all heads ever exist as a whole.

Letters: B batch, S tokens of this rank, T tokens of the whole sequence, d hidden size, H query heads, D head size.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from upipe.headwise import autocast_enabled, resolve
from upipe.memory.label import label
from upipe.mlp import Replay, TilePass, TokenwiseModule
from upipe.nn import UlyssesAttention, UPipeAttention
from upipe.projections import Projections
from upipe.rank_pass import Gradients, Layer, RankPass, gather_rows, natural_order
from upipe.stages import Attended, backward_stages, forward_stages

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


class HeadwiseBlock(nn.Module):
    """A pre-norm residual block, ``h = x + attention(norm(x)); y = h + mlp(norm(h))``, as one autograd function.

    The parts keep their names (those of a Hugging Face decoder layer), so checkpoints load as they are.

    Args:
        input_layernorm: token-wise.
        self_attn: a :class:`upipe.UPipeAttention`; its `heads_per_stage` and `keep_attention` apply.
        post_attention_layernorm: token-wise.
        mlp: token-wise, returns one tensor ``[..., d]``.
        tile_tokens: of the MLP; None takes what fits into a tenth of x's bytes.

    Raises:
        ValueError: attention of another kind, or a part that is not token-wise.

    Cost: for Llama3-8B on 8 ranks with U = C, in units of x: 3.2 in forward, 6.6 in backward
    (tests/upipe/test_block_memory.py). Exchanges 8(H + K) head-tensors a step, 6(H + K) with `keep_attention`.

    Reference: arXiv 2602.21196 recomputes the block, then differentiates it; this differs as described above.
    """

    def __init__(
        self,
        input_layernorm: nn.Module,
        self_attn: UPipeAttention,
        post_attention_layernorm: nn.Module,
        mlp: nn.Module,
        *,
        tile_tokens: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(self_attn, UPipeAttention) or isinstance(self_attn, UlyssesAttention):
            raise ValueError(f"self_attn is a {type(self_attn).__name__}; HeadwiseBlock needs a UPipeAttention")
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp
        self.tile_tokens = tile_tokens
        self._tokenwise()  # raises for parts that are not token-wise

    @classmethod
    def from_block(cls, block: nn.Module, *, tile_tokens: int | None = None) -> HeadwiseBlock:
        """Take the parts of an existing block; the parameters are shared, not copied.

        Raises:
            ValueError: a part is missing, or the block has others.
        """
        found = {name: child for name, child in block.named_children() if name in PARTS}
        missing = [name for name in PARTS if name not in found]
        other = [name for name, _ in block.named_children() if name not in PARTS]
        if missing or other:
            raise ValueError(
                f"{type(block).__name__} is not norm, attention, norm, MLP: "
                + "; ".join(f"{kind} {', '.join(names)}" for kind, names in (("no", missing), ("also", other)) if names)
                + "; build HeadwiseBlock from its parts"
            )
        return cls(*(found[name] for name in PARTS), tile_tokens=tile_tokens)  # type: ignore[arg-type]

    def forward(self, x: Tensor, positions: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Run the block.

        Args:
            x: ``[B, S, d]``, this rank's contiguous tokens.
            positions: ``[S]`` or ``[B, S]`` integers; None counts on from the ranks before.
            cu_seqlens: int32 document borders in tokens of the whole sequence; needs B = 1.

        Returns:
            ``[B, S, d]``.

        Raises:
            ValueError: see :meth:`UPipeAttention.forward`; or autocast, or an MLP that returns more than one tensor.
        """
        if autocast_enabled(x):
            raise ValueError(
                "HeadwiseBlock runs in the dtype of its weights; leave autocast off and use bf16 weights "
                "(FSDP2's MixedPrecisionPolicy)"
            )
        attention, (norm, mlp) = self.self_attn, self._tokenwise()
        proj, mask = attention.projections(), attention.mask_for(cu_seqlens)
        layer = resolve(
            x,
            proj,
            group=attention.group,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            heads_per_stage=attention.heads_per_stage,
            positions=positions,
            rotary=attention.rotary,
            mask=mask,
            scale=attention.scale,
            kernel=attention.kernel,
            keep_attention=attention.keep_attention,
        )
        norm_weights = norm.weights()
        plan = BlockPlan(layer, norm, mlp, mlp.tile_tokens(x, self.tile_tokens), len(norm_weights))
        if hasattr(x, "_use_count"):
            _reference_counts()  # outside any backward
        y: Tensor = _Block.apply(plan, x, mask.sinks, *proj.tensors(), *norm_weights, *mlp.weights())
        return y

    def _tokenwise(self) -> tuple[TokenwiseModule, TokenwiseModule]:
        return (
            TokenwiseModule(self.input_layernorm),
            TokenwiseModule(nn.Sequential(self.post_attention_layernorm, self.mlp)),
        )


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """What a block's forward and backward share beside tensors."""

    layer: Layer
    norm: TokenwiseModule
    mlp: TokenwiseModule
    tile_tokens: int
    num_norm_weights: int

    def tiles(self, tokens: int) -> list[slice]:
        """Token tiles of the MLP."""
        return [slice(start, min(start + self.tile_tokens, tokens)) for start in range(0, tokens, self.tile_tokens)]


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: BlockPlan, x: Tensor, sinks: Tensor | None, *weights: Tensor | None) -> Tensor:
        ctx.plan = plan = replace(plan, layer=replace(plan.layer, local=plan.layer.local.with_sinks(sinks)))
        proj, norm, mlp = _split(plan, weights)
        norm_tiles, mlp_tiles = plan.norm.forward_pass(norm), plan.mlp.forward_pass(mlp)
        rank = RankPass(plan.layer, x, proj, norm=lambda rows: norm_tiles.forward_tile(rows)[0])
        attended = forward_stages(rank)
        ctx.replay = Replay(x.device)
        y = _through_mlp(plan, rank, attended, mlp_tiles)
        kept = [t for shards, lse in attended for t in (shards.buffer, lse)] if plan.layer.keep_attention else []
        ctx.save_for_backward(x, sinks, *weights, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        plan: BlockPlan = ctx.plan
        dh = dy if _is_ours(dy) else dy.clone(memory_format=torch.contiguous_format)
        del dy
        x, sinks, *rest = ctx.saved_tensors
        num_weights = len(ctx.needs_input_grad) - 3
        weights, saved = rest[:num_weights], rest[num_weights:]
        plan = replace(plan, layer=replace(plan.layer, local=plan.layer.local.with_sinks(sinks)))
        proj, norm, mlp = _split(plan, weights)
        names = Projections.tensor_names()
        needs = dict(zip(("x", "sinks", *names), ctx.needs_input_grad[1:], strict=False))
        rest_needs = ctx.needs_input_grad[3 + len(names) :]
        norm_forward = plan.norm.forward_pass(norm)
        mlp_tiles = plan.mlp.backward_pass(
            mlp, needs=rest_needs[len(norm) :], needs_rows=True, num_tiles=len(plan.tiles(x.shape[1]))
        )
        rank = RankPass(plan.layer, x, proj, norm=lambda rows: norm_forward.forward_tile(rows)[0])
        norm_tiles = plan.norm.backward_pass(
            norm, needs=rest_needs[: len(norm)], needs_rows=True, num_tiles=len(list(rank.input_tiles()))
        )
        grads = Gradients(rank, needs, sinks)
        if plan.layer.keep_attention:
            pairs = zip(saved[::2], saved[1::2], strict=True)
            kept = [(rank.by_rank(out, rank.query_counts(i)), lse) for i, (out, lse) in enumerate(pairs)]
        else:
            kept = forward_stages(rank)
        with ctx.replay.again():
            _back_through_mlp(plan, rank, kept, mlp_tiles, grads, dh)
        mlp_gradients = mlp_tiles.gradients()
        dq_shards, dkv_shards = backward_stages(
            rank, kept, lambda index, shards: grads.output_gradient(index, dh), grads.sinks
        )

        def write(tokens: slice, drows: Tensor) -> None:
            dx_rows = norm_tiles.backward_tile(x[:, tokens], [drows])
            assert dx_rows is not None
            dh[:, tokens] += dx_rows

        grads.through_input(dq_shards, dkv_shards, write)
        by_name = (grads.weights.get(name) for name in names)
        dx = dh if needs["x"] else None
        return None, dx, grads.sinks, *by_name, *norm_tiles.gradients(), *mlp_gradients


def _split(
    plan: BlockPlan, weights: tuple[Tensor | None, ...] | list[Tensor | None]
) -> tuple[Projections, list[Tensor], list[Tensor]]:
    """Return the attention's weights, the norm's, and those of norm and MLP."""
    first = len(Projections.tensor_names())
    second = first + plan.num_norm_weights
    others = [weight for weight in weights[first:] if weight is not None]
    return Projections.of(weights[:first], plan.layer.eps), others[: second - first], others[second - first :]


def _through_mlp(plan: BlockPlan, rank: RankPass, attended: list[Attended], mlp: TilePass) -> Tensor:
    """Return ``y = h + mlp(norm(h))``, ``h = x + out Wo``, tile by tile."""
    pieces = natural_order([shards for shards, _ in attended])
    with label("block.y"):
        y = rank.x.new_empty(rank.x.shape)
    with label("mlp.tile"):
        for tokens in plan.tiles(rank.tokens):
            h = rank.x[:, tokens] + rank.output_rows(pieces, tokens)
            outputs = mlp.forward_tile(h)
            if len(outputs) != 1 or outputs[0].shape != h.shape:
                raise ValueError(
                    f"the MLP returns {[list(out.shape) for out in outputs]} for {list(h.shape)}; HeadwiseBlock needs "
                    "one tensor of the same shape"
                )
            torch.add(h, outputs[0], out=y[:, tokens])
    return y


def _back_through_mlp(
    plan: BlockPlan, rank: RankPass, attended: list[Attended], mlp: TilePass, grads: Gradients, dh: Tensor
) -> None:
    """Take dy, in `dh`, back to the gradient of h, in place; find the gradients of o and its bias on the way."""
    pieces = natural_order([shards for shards, _ in attended])
    sums = grads.output_sums()
    with label("mlp.tile"):
        for tokens in plan.tiles(rank.tokens):
            out_rows = gather_rows(pieces, tokens)
            h = rank.x[:, tokens] + rank.project_output(out_rows)
            dh_rows = dh[:, tokens]
            drows = mlp.backward_tile(h, [dh_rows])
            assert drows is not None
            dh_rows += drows
            del h, drows
            sums.add(dh_rows.flatten(0, 1), out_rows)
    sums.store()


def _is_ours(tensor: Tensor) -> bool:
    """Whether nobody else can see a gradient: it may be overwritten."""
    counts = _references(tensor)
    dense = tensor.is_contiguous() and tensor._base is None
    # Releases of torch that cannot count references in C++ copy instead.
    return (
        hasattr(tensor, "_use_count")
        and dense
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and counts == _reference_counts()
    )


def _references(tensor: Tensor) -> tuple[int, int, int]:
    """References to the Python object, to the tensor in C++, and to its storage."""
    in_cpp: int = tensor._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(tensor), in_cpp, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def _reference_counts() -> tuple[int, int, int]:
    """The counts of a gradient that autograd alone holds, as :func:`_is_ours` sees them in a backward."""
    found: list[tuple[int, int, int]] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            _probe(dy, found)
            return dy

    with torch.enable_grad():
        x = torch.zeros(1, requires_grad=True)
        (Probe.apply(x) * 2).backward()
    return found[0]


def _probe(tensor: Tensor, found: list[tuple[int, int, int]]) -> None:
    """As deep in calls as :func:`_is_ours`."""
    counts = _references(tensor)
    found.append(counts)
