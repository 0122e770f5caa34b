"""A token-wise module, tile by tile: its intermediates exist for a few hundred tokens, its gradients are exact.

The whole module is one autograd function. Forward keeps x only; backward recomputes a tile, differentiates it with
respect to detached weights and adds their gradients in fp32. So a weight gets one gradient a backward, and what waits
for it (DDP, FSDP2, ZeRO) is called once, not once a tile.

:class:`TokenwiseModule` and :class:`TilePass` are the two halves without the autograd function, for a caller with a
backward of its own. This file is long because FSDP2's handling of a module with sharded parts belongs to neither.

Letters: B batch, S tokens of this rank, d hidden size, k size of an output, t tokens of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from upipe.kernels import accumulate_dtype
from upipe.memory.label import label
from upipe.projections import TileSum

# Temporaries of one tile: at most TILE_BYTES, and without an explicit tile_tokens at most a share of x's own bytes, so
# that they stay small beside it at every length; below MIN_TILE_TOKENS a GEMM is slow. A token's are estimated as what
# backward of a SwiGLU holds at once, rows of the widest dim of any weight, and of a norm before it, rows of d.
TILE_BYTES = 2**30
TILE_SHARE = 10
MIN_TILE_TOKENS = 256
WIDE_ROWS, NORM_ROWS = 5, 6

COUPLES_TOKENS = (_NormBase, _ConvNd, nn.RNNBase, nn.MultiheadAttention)
WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel)

Outputs = Tensor | tuple[Tensor, ...]


def tiled_mlp(mlp: nn.Module, x: Tensor, *, tile_tokens: int | None = None) -> Outputs:
    """Run a token-wise module tile by tile; equals ``mlp(x)``.

    Weights may be frozen, tied or unused; dropout and autocast are replayed in backward; forward hooks inside the
    module run once a tile, and again in backward's recompute. A weight that no token used (an expert) gets a gradient
    of zeros, not None, so that ranks agree on which gradients exist. Under autocast weights are cast once a tile;
    bf16 weights (FSDP2's MixedPrecisionPolicy) are not.

    FSDP2 works on the block around it, on `mlp` and on its parts. Parts are gathered before the first tile, all of them
    together, released after the last, and the same in backward; they are reduced once. No tile waits for another rank,
    so ranks may have different numbers of tiles.

    Args:
        mlp: an MLP, mixture of experts, or norm and MLP in an ``nn.Sequential``. It gets tiles ``[1, t, d]`` (for an x
            of three dims) and returns a tensor or a tuple of tensors, each ``[1, t, ..., k]`` or ``[t, ..., k]``.
        x: ``[..., d]``, at least two dims, any strides.
        tile_tokens: t; None takes what fits into a tenth of x's bytes, but at least 256. It depends on shapes and
            dtypes only.

    Returns:
        What ``mlp(x)`` returns, outputs contiguous.

    Raises:
        ValueError: `tile_tokens` below 1 or with temporaries above 1 GiB; a part that mixes tokens (batch norm,
            convolution, attention), that writes to its input, its weights or its buffers, or that has hooks of DDP or
            FSDP1; weights that are not whole; an output that is not per token.

    Cost: forward keeps x. Temporaries take a tenth of x, less above 10 GiB, more where 256 tokens do not fit into it;
    beside them backward holds the gradients of the weights in fp32 and one tile's of one weight, of which nothing grows
    with the number of tiles (tests/upipe/test_mlp.py, TestMemory).

    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    >>> x = torch.randn(2, 5, 4)
    >>> torch.allclose(tiled_mlp(mlp, x, tile_tokens=3), mlp(x), atol=1e-6)
    True
    """
    tokenwise = TokenwiseModule(mlp)
    if x.dim() < 2 or isinstance(x, DTensor):
        kind = "a DTensor" if isinstance(x, DTensor) else f"{list(x.shape)}"
        raise ValueError(f"x must be a plain tensor [..., d] of at least two dims, got {kind}")
    size = tokenwise.tile_tokens(x, tile_tokens)
    train = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *mlp.parameters()))

    def run(anchors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        weights = tokenwise.weights()
        if not train:
            return _forward(tokenwise.forward_pass(weights), x, size)[0]
        outputs: tuple[Tensor, ...] = _Tiled.apply(tokenwise, size, len(anchors), x, *anchors, *weights)
        return outputs

    outputs = run_gathered(mlp, run, device=x.device, train=train)
    return outputs if tokenwise.returns_tuple else outputs[0]


class TokenwiseModule:
    """A token-wise module whose tiles a caller runs: between forward and backward it keeps names, not tensors.

    Args:
        module: see :func:`tiled_mlp`.

    Raises:
        ValueError: a part that mixes tokens or has hooks of DDP or FSDP1, a sharded weight that nothing gathers, or a
            buffer that requires a gradient.

    >>> tokenwise = TokenwiseModule(nn.Linear(4, 3, bias=False))
    >>> weights, rows, dout = tokenwise.weights(), torch.randn(6, 4), torch.randn(6, 3)
    >>> (out,) = tokenwise.forward_pass(weights).forward_tile(rows)
    >>> backward = tokenwise.backward_pass(weights, needs=[True], needs_rows=True, num_tiles=2)
    >>> drows = [backward.backward_tile(rows[tile], [dout[tile]]) for tile in (slice(0, 4), slice(4, 6))]
    >>> (dweight,) = backward.gradients()
    >>> torch.allclose(dweight, dout.T @ rows, atol=1e-5)
    True
    """

    def __init__(self, module: nn.Module) -> None:
        _check(module)
        self.module = module
        self.returns_tuple = False
        names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self._names = tuple(map(tuple, names.values()))

    def weights(self) -> tuple[Tensor, ...]:
        """Return the parameters as they are now, tied ones once.

        Raises:
            ValueError: one is sharded or has no memory.
        """
        return tuple(_whole(names[0], self.module.get_parameter(names[0])) for names in self._names)

    def forward_pass(self, weights: Sequence[Tensor]) -> TilePass:
        """Start a forward over the tiles with `weights`, which :meth:`weights` returned."""
        return TilePass(self, self._names, weights, needs=[False] * len(weights), needs_rows=False, num_tiles=1)

    def backward_pass(
        self, weights: Sequence[Tensor], *, needs: Sequence[bool], needs_rows: bool, num_tiles: int
    ) -> TilePass:
        """Start a backward over the tiles.

        Args:
            weights: as in forward.
            needs: which of them get a gradient.
            needs_rows: whether the rows do.
            num_tiles: how many there are. The share of a lone one is the gradient; else shares are added up in fp32.
        """
        return TilePass(self, self._names, weights, needs=needs, needs_rows=needs_rows, num_tiles=num_tiles)

    def tile_tokens(self, x: Tensor, explicit: int | None = None) -> int:
        """Return t for an input ``[..., d]``; it depends on shapes and dtypes only, so it is the same on all ranks.

        Raises:
            ValueError: `explicit` is no number of tokens, or too large.
        """
        widest = max([x.shape[-1], *(max(p.shape[-2:]) for p in self.module.parameters() if p.dim())])
        token_bytes = max(1, WIDE_ROWS * widest + NORM_ROWS * x.shape[-1]) * x.itemsize
        largest = max(MIN_TILE_TOKENS, TILE_BYTES // token_bytes)
        if explicit is None:
            return min(largest, max(MIN_TILE_TOKENS, x.numel() * x.itemsize // (TILE_SHARE * token_bytes)))
        if isinstance(explicit, bool) or not isinstance(explicit, int) or not 1 <= explicit <= largest:
            raise ValueError(
                f"tile_tokens={explicit!r} must be an integer from 1 to {largest}, whose temporaries of about "
                f"{token_bytes} bytes a token stay within {TILE_BYTES} bytes; or leave it out"
            )
        return explicit


class TilePass:
    """One pass over the tiles of a :class:`TokenwiseModule`, with given weights.

    `rows` are a tile in any shape that the module takes. The caller owns the random state: a pass that recomputes has
    to start from the state in which the first began, see :class:`Replay`.
    """

    def __init__(
        self,
        tokenwise: TokenwiseModule,
        names: tuple[tuple[str, ...], ...],
        weights: Sequence[Tensor],
        *,
        needs: Sequence[bool],
        needs_rows: bool,
        num_tiles: int,
    ) -> None:
        self._tokenwise, self._needs_rows = tokenwise, needs_rows
        self._leaves = [weight.detach().requires_grad_(needed) for weight, needed in zip(weights, needs, strict=True)]
        self._named = {name: leaf for leaf, tied in zip(self._leaves, names, strict=True) for name in tied}
        self._sums: dict[int, TileSum] = {}
        for index, leaf in enumerate(self._leaves):
            if leaf.requires_grad:
                # Taken as soon as it is there: one weight's share of a tile exists at a time.
                leaf.register_post_accumulate_grad_hook(_taker(self._sums, index, lone=num_tiles == 1))
        vectors = {id(leaf): index for index, leaf in enumerate(self._leaves) if leaf.requires_grad and leaf.dim() == 1}
        self._wide_biases: AbstractContextManager[Any] = _WideBiases(vectors, self._sums) if vectors else nullcontext()

    def forward_tile(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of a tile, without a graph.

        Raises:
            ValueError: an output that is no tensor, or a module that writes to `rows`, its weights or its buffers.
        """
        watched = {"its input": rows, **self._named}
        before = _states(watched | self._buffers())
        with torch.no_grad():
            outputs = self._call(rows)
        after = _states(watched | self._buffers())
        written = sorted(name for name in after if before.get(name) != after[name])
        if written:
            raise ValueError(
                f"{type(self._tokenwise.module).__name__} writes to {', '.join(written)} in forward, which would "
                "happen once a tile and again in backward; put it into eval mode, or call it without tiles"
            )
        return outputs

    def backward_tile(self, rows: Tensor, douts: Sequence[Tensor | None]) -> Tensor | None:
        """Recompute a tile, add its share to the gradients of the weights, and return that of `rows`.

        Args:
            rows: as in forward.
            douts: gradients of the outputs of this tile; None for an output that has none.

        Returns:
            The gradient of `rows`, or None when it is not needed.
        """
        with torch.enable_grad():
            rows = rows.detach().requires_grad_(self._needs_rows)
            with self._wide_biases:
                outputs = self._call(rows)
        pairs = [
            (out, dout) for out, dout in zip(outputs, douts, strict=True) if dout is not None and out.requires_grad
        ]
        inputs = [leaf for leaf in (rows, *self._leaves) if leaf.requires_grad]
        if pairs and inputs:
            # backward() and not grad(), which would hold the gradients of all weights until its end.
            torch.autograd.backward([out for out, _ in pairs], [dout for _, dout in pairs], inputs=inputs)
        if not self._needs_rows:
            return None
        return torch.zeros_like(rows) if rows.grad is None else rows.grad

    def gradients(self) -> list[Tensor | None]:
        """Return the gradient of each weight, in its dtype, rounded once; zeros for one that no tile used."""
        found: list[Tensor | None] = []
        with label("gradient"):
            for index, leaf in enumerate(self._leaves):
                total = self._sums.pop(index, None)
                unused = torch.zeros_like(leaf) if leaf.requires_grad and total is None else None
                found.append(unused if total is None else total.result(leaf.dtype))
        return found

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self._tokenwise.module.named_buffers())

    def _call(self, rows: Tensor) -> tuple[Tensor, ...]:
        # Tied weights are named one by one: how they are tied now, sharded or not, does not matter.
        out = functional_call(self._tokenwise.module, self._named, (rows,), tie_weights=False)
        self._tokenwise.returns_tuple = isinstance(out, tuple)
        outputs = out if isinstance(out, tuple) else (out,)
        for value in outputs:
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{type(self._tokenwise.module).__name__} returns a {type(value).__name__}; it must return a "
                    "tensor or a tuple of tensors, each [..., k] per token"
                )
        return outputs


class _WideBiases(TorchFunctionMode):
    """Sums the gradient of a bias of ``F.linear`` in fp32 (fp64 for fp64).

    Autograd rounds each tile's share. Beside the rounded operands of a GEMM that is little, but the gradient of a bias
    is a plain sum, of which the untiled module rounds only the result.
    """

    def __init__(self, biases: dict[int, int], sums: dict[int, TileSum]) -> None:
        super().__init__()
        self._biases, self._sums = biases, sums

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        index = self._biases.get(id(bias))
        if bias is None or index is None or not (input.requires_grad or weight.requires_grad):
            return F.linear(input, weight, bias)
        out = F.linear(input, weight, bias.detach())
        out.register_hook(_bias_taker(self._sums, index))
        return out


class Replay:
    """Random state and autocast as they are now, to run the same tiles again later."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._random = self._random_states()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted({"cpu", device.type})
            if torch.amp.is_autocast_available(kind)
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Be in that state; on leaving, the random state is as it was on entering."""
        now = self._random_states()
        self._set(self._random)
        try:
            with ExitStack() as stack:
                for kind, dtype, enabled in self._autocast:
                    # A cached cast would outlive the tile, and with it the detached weight.
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
                yield
        finally:
            self._set(now)

    def _random_states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type not in ("cpu", "meta"):
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.get_device_module(self._device).set_rng_state(state, self._device)


def run_gathered(
    module: nn.Module,
    run: Callable[[Sequence[Tensor]], tuple[Tensor, ...]],
    *,
    device: torch.device,
    train: bool,
) -> tuple[Tensor, ...]:
    """Return ``run(anchors)``, called with the weights of all FSDP2 modules in `module` gathered.

    FSDP2 gathers in a module's hooks before forward and before backward, and reduces when the gradient of its input is
    there. Here its hooks run once around all tiles: before `run`, after it on the outputs, and on an empty tensor in
    place of the input, an anchor, one a group of weights. `run` makes the anchors inputs of its autograd function, so
    that gradients are reduced when that function's backward is done. The hooks of the parts still run in each tile, in
    the state they have under activation checkpointing, in which they cast (MixedPrecisionPolicy) and do nothing else.

    Args:
        module: any; without FSDP2 modules inside, `run` is just called.
        run: called with the anchors, returns outputs that are no views.
        device: of the input.
        train: whether a backward follows.
    """
    entered = _fsdp_states(module)
    anchors = []
    for state, part in entered:
        args, _ = state._pre_forward(part, (torch.empty(0, device=device, requires_grad=train),), {})
        anchors.append(args[0])
    training_states = [state._training_state for state, _ in entered]
    for state, _ in entered:
        state._training_state = TrainingState.PRE_BACKWARD
    try:
        outputs = run(anchors)
    finally:
        for (state, _), training_state in zip(entered, training_states, strict=True):
            state._training_state = training_state
            state._modules_to_run_forward.clear()
    # Inner modules first, as in nested calls; what they return are the outputs cast once more.
    for state, part in reversed(entered):
        state._post_forward(part, (), outputs)
    return outputs


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokenwise: TokenwiseModule, size: int, num_anchors: int, x: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        weights = tensors[num_anchors:]
        ctx.tokenwise, ctx.size, ctx.replay = tokenwise, size, Replay(x.device)
        ctx.anchors = [(anchor.dtype, anchor.device) for anchor in tensors[:num_anchors]]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        outputs, ctx.num_lead = _forward(tokenwise.forward_pass(weights), x, size)
        ctx.mark_non_differentiable(*(out for out in outputs if not (out.is_floating_point() or out.is_complex())))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        _, _, _, needs_x, *needs = ctx.needs_input_grad
        anchors = [torch.empty(0, dtype=dtype, device=device) for dtype, device in ctx.anchors]
        tiles = list(_tiles(x, ctx.size))
        backward = ctx.tokenwise.backward_pass(
            weights, needs=needs[len(anchors) :], needs_rows=needs_x, num_tiles=len(tiles)
        )
        dx = None
        if needs_x:
            with label("mlp.dx"):
                dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        with ctx.replay.again(), label("mlp.tile"):
            for tokens in tiles:
                drows = backward.backward_tile(
                    _take(x, x.dim() - 1, tokens),
                    [
                        None if dout is None else _take(dout, num_lead, tokens)
                        for dout, num_lead in zip(douts, ctx.num_lead, strict=True)
                    ],
                )
                if dx is not None and drows is not None:
                    _take(dx, x.dim() - 1, tokens).copy_(drows)
                del drows
        return None, None, None, dx, *anchors, *backward.gradients()


def _forward(tiles: TilePass, x: Tensor, size: int) -> tuple[tuple[Tensor, ...], list[int]]:
    """Return the whole outputs, and for each how many leading dims count tokens: those of x, or one."""
    wholes: list[Tensor] = []
    num_lead: list[int] = []
    with label("mlp.tile"):
        for tokens in _tiles(x, size):
            rows = _take(x, x.dim() - 1, tokens)
            outputs = tiles.forward_tile(rows)
            leads = [_leading_dims(out, rows) for out in outputs]
            if not wholes:
                num_lead = leads
                with label("mlp.y"):
                    wholes = [
                        out.new_empty((*(x.shape[:-1] if lead > 1 else (x.shape[:-1].numel(),)), *out.shape[lead:]))
                        for out, lead in zip(outputs, leads, strict=True)
                    ]
            for whole, lead, out in zip(wholes, num_lead, outputs, strict=True):
                _take(whole, lead, tokens).copy_(out)
            del outputs
    return tuple(wholes), num_lead


def _leading_dims(out: Tensor, rows: Tensor) -> int:
    lead = rows.shape[:-1]
    if out.dim() >= rows.dim() and out.shape[: len(lead)] == lead:
        return len(lead)
    if out.dim() >= 2 and out.shape[0] == lead.numel():
        return 1
    raise ValueError(
        f"an output of shape {list(out.shape)} for a tile {list(rows.shape)} is not per token; each must be "
        f"{[*lead, '..., k']} or {[lead.numel(), '..., k']}, so compute an auxiliary loss from per-token outputs"
    )


def _tiles(x: Tensor, size: int) -> Iterator[slice]:
    """Cut the tokens of all sequences; without any there is one empty tile, for the shapes and gradients of zeros."""
    tokens = x.shape[:-1].numel()
    for start in range(0, max(tokens, 1), size):
        yield slice(start, min(start + size, tokens))


def _take(tensor: Tensor, num_lead: int, tokens: slice) -> Tensor:
    """Return a tile ``[1, ..., t, ...]`` of a tensor with `num_lead` dims of tokens: a view, or a copy if need be."""
    lead, rest = tensor.shape[:num_lead], tensor.shape[num_lead:]
    try:
        rows = tensor.view(lead.numel(), *rest)[tokens]
    except (RuntimeError, ValueError):  # strides that no flat view has; fake tensors say so by the latter
        rows = tensor[torch.unravel_index(torch.arange(tokens.start, tokens.stop, device=tensor.device), lead)]
    return rows.view((1,) * (num_lead - 1) + rows.shape)


def _taker(sums: dict[int, TileSum], index: int, *, lone: bool) -> Callable[[Tensor], None]:
    def take(leaf: Tensor) -> None:
        share = leaf.grad
        assert share is not None
        with label("gradient"):
            if index not in sums and not lone:
                share = share.to(accumulate_dtype(share.dtype))
            sums.setdefault(index, TileSum()).add(share)
        leaf.grad = None

    return take


def _bias_taker(sums: dict[int, TileSum], index: int) -> Callable[[Tensor], None]:
    def take(dout: Tensor) -> None:
        with label("gradient"):
            rows = dout.flatten(0, -2)
            sums.setdefault(index, TileSum()).add(rows.sum(0, dtype=accumulate_dtype(dout.dtype)))

    return take


def _states(tensors: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    return {name: (id(t), 0 if t.is_inference() else t._version) for name, t in tensors.items()}


def _check(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise ValueError(f"mlp must be an nn.Module, whose parameters get gradients; got {type(module).__name__}")
    for name, part in module.named_modules():
        where = f"{name or 'mlp'} is a {type(part).__name__}"
        if isinstance(part, COUPLES_TOKENS):
            raise ValueError(
                f"{where}, which mixes tokens, so tiles would change its result; leave it out of the tiles"
            )
        if isinstance(part, WRAPPERS):
            raise ValueError(f"{where}, whose hooks would run once a tile; wrap the model around the tiles instead")
    for name, buffer in module.named_buffers():
        if buffer.requires_grad:
            raise ValueError(f"buffer {name} requires a gradient, which only parameters get; make it an nn.Parameter")
    states, inside = _fsdp_states(module), set(module.modules())
    for state, part in states:
        if not inside.issuperset(state._modules):
            raise ValueError(
                f"a {type(part).__name__} shares an FSDP2 group with modules outside mlp; "
                "give it a group of its own, or put all of the group into one nn.Sequential"
            )
    gathered = {id(parameter) for state, _ in states for part in state._modules for parameter in part.parameters()}
    for name, parameter in module.named_parameters():
        if id(parameter) not in gathered:
            _whole(name, parameter)


def _whole(name: str, parameter: Tensor) -> Tensor:
    reason = None
    if isinstance(parameter, DTensor):
        reason = f"a DTensor {parameter.placements}"
    elif getattr(parameter, "ds_numel", parameter.numel()) != parameter.numel():
        reason = "partitioned by ZeRO-3"
    elif parameter.untyped_storage().nbytes() < parameter.numel() * parameter.itemsize:
        reason = "without memory"
    if reason is not None:
        raise ValueError(
            f"weight {name} is {reason}: a tile needs it whole and gathers nothing; call tiled_mlp in the forward of "
            "the module that fully_shard wraps, or make the calling module a leaf of ZeRO-3"
        )
    return parameter


def _fsdp_states(module: nn.Module) -> list[tuple[Any, nn.Module]]:
    """Return the FSDP2 state of each group of weights in `module`, outer ones first, with a module that has it."""
    found: dict[int, tuple[Any, nn.Module]] = {}
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            found.setdefault(id(state), (state, part))
    return list(found.values())
