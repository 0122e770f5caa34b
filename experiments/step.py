"""The one training step: train runs it, everything that traces traces it.

Letters: B sequences of a micro-batch on this data rank, T tokens of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from experiments.config import Config
from experiments.model import Decoder, initialise
from upipe import AttentionMask, context_parallel_loss, shard_batch
from upipe.collectives import all_reduce_sum
from upipe.integrations.fsdp import sum_gradients
from upipe.kernels import select_kernel
from upipe.loss import valid_token_count
from upipe.memory.label import label


class NonFiniteError(ArithmeticError):
    """A loss or a gradient is not finite; nothing was updated."""


@dataclass(frozen=True)
class StepResult:
    """What a step found, token-weighted over the whole global batch, and the learning rate it used."""

    nll: float
    grad_norm: float
    valid_tokens: int
    tokens: int
    lr: float


def build_mesh(config: Config) -> DeviceMesh:
    """Return the mesh data x context over all ranks of the default process group.

    Raises:
        ValueError: a context degree that does not divide the ranks, or method local with more than one.
    """
    ranks = dist.get_world_size()
    context = config.train.context
    if context is None:
        context = 1 if config.method.name == "local" else ranks
    if ranks % context:
        valid = [degree for degree in range(1, ranks + 1) if ranks % degree == 0]
        raise ValueError(f"train.context={context} must divide the {ranks} ranks; choose one of {valid}")
    if config.method.name == "local" and context > 1:
        raise ValueError(f"method=local attends on one rank; train.context={context} must be 1, or use method=upipe")
    return init_device_mesh(config.hardware.device, (ranks // context, context), mesh_dim_names=("data", "context"))


def build_step(config: Config, mesh: DeviceMesh) -> TrainingStep:
    """Build the model, sharded over all ranks by FSDP2, its optimizer and the step.

    The model is built on the meta device and filled after sharding, so no rank ever holds all of it.

    Raises:
        ValueError: the method does not fit the model's heads, or the kernel does not cover what it would get.
    """
    dtype = getattr(torch, config.train.dtype)
    check_kernel(config, dtype)
    master = torch.float64 if dtype is torch.float64 else torch.float32
    with torch.device("meta"):
        decoder = Decoder(config.model, config.method, mesh["context"].get_group()).to(master)
    options = {
        "mesh": init_device_mesh(config.hardware.device, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=None if dtype is master else dtype, reduce_dtype=master),
    }
    for layer in decoder.model.layers:
        fully_shard(layer, **options)
    fully_shard(decoder, **options)
    sum_gradients(decoder)
    decoder.to_empty(device=config.hardware.device)
    initialise(decoder, config.train.seed)
    return TrainingStep(config, mesh, decoder)


def check_kernel(config: Config, dtype: torch.dtype) -> None:
    """Raise what the first forward would raise."""
    borders = torch.tensor([0, config.data.sequence_length], dtype=torch.int32) if config.data.documents else None
    like = torch.empty(0, config.model.head_size, dtype=dtype, device=config.hardware.device)
    select_kernel(config.method.kernel, AttentionMask(cu_seqlens=borders), like)


class TrainingStep:
    """Forward, backward, clip and update on one global batch, given as micro-batches; `steps` counts those done."""

    def __init__(self, config: Config, mesh: DeviceMesh, decoder: Decoder) -> None:
        self.config, self.mesh, self.decoder = config, mesh, decoder
        self.steps = 0
        self.context = mesh["context"].get_group()
        self.ranks = dist.group.WORLD
        self.device = torch.device(config.hardware.device)
        self.optimizer = torch.optim.AdamW(decoder.parameters(), **self._options())

    def _options(self) -> dict[str, Any]:
        """Return the optimizer's options for the next step."""
        train = self.config.train
        lr = train.lr * self._lr_factor()
        return {"lr": lr, "betas": (train.beta1, train.beta2), "weight_decay": train.weight_decay}

    def _lr_factor(self) -> float:
        """Linear warm-up, then a cosine down to final_lr_fraction."""
        train = self.config.train
        if self.steps < train.warmup_steps:
            return (self.steps + 1) / train.warmup_steps
        progress = (self.steps - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return train.final_lr_fraction + (1 - train.final_lr_fraction) * cosine

    def __call__(self, micro_batches: Sequence[dict[str, Tensor]]) -> StepResult:
        """Train on one global batch.

        Args:
            micro_batches: this data rank's part, whole sequences ``[B, T]``, labels unshifted.

        Raises:
            NonFiniteError: the loss, with its rank, or the gradient norm is not finite; weights are as before the step.
        """
        self.optimizer.zero_grad()
        batches = [self._shard(batch) for batch in micro_batches]
        valid = torch.stack([valid_token_count(batch["labels"]) for batch in batches]).sum()
        losses = []
        for batch in batches:
            loss = context_parallel_loss(self.decoder(batch), valid, self.ranks)
            loss.backward()
            losses.append(loss.detach())
        nll = self._sum_over_ranks(torch.stack(losses).sum())
        norm = torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), self.config.train.clip)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not math.isfinite(grad_norm):
            raise NonFiniteError(f"the gradient norm over all ranks is {grad_norm}")
        options = self._options()
        for group in self.optimizer.param_groups:
            group |= options  # a checkpoint brought those of its run
        with label("optimizer"):
            self.optimizer.step()
        self.steps += 1
        counts = all_reduce_sum(torch.stack([valid, torch.tensor(_tokens(batches), device=self.device)]), self.ranks)
        return StepResult(nll, grad_norm, int(counts[0]), int(counts[1]), options["lr"])

    @torch.no_grad()
    def evaluate(self, batches: Iterable[dict[str, Tensor]]) -> float:
        """Return the token-weighted NLL over `batches`, reduced as in training."""
        loss, valid = torch.zeros((), device=self.device, dtype=torch.float64), 0
        for batch in map(self._shard, batches):
            loss += self.decoder(batch)
            valid += valid_token_count(batch["labels"])
        self.decoder.reshard()  # FSDP leaves that to a backward
        return self._sum_over_ranks(context_parallel_loss(loss, valid, self.ranks))

    @torch.no_grad()
    def check_weights(self) -> None:
        """All ranks call it.

        Raises:
            NonFiniteError: a weight is not finite, with the rank that holds it.
        """
        weights = self.optimizer.param_groups[0]["params"]
        finite = torch.stack([weight.to_local().isfinite().all() for weight in weights]).all()
        self._sum_over_ranks(torch.where(finite, 0.0, torch.nan), "a weight")

    def _shard(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        moved = {name: tensor.to(self.device) for name, tensor in batch.items()}
        return shard_batch(moved, group=self.context)

    def _sum_over_ranks(self, share: Tensor, name: str = "the loss") -> float:
        """Add the shares of all ranks, in rank order so that every rank gets the same bits."""
        shares = [torch.empty_like(share) for _ in range(self.ranks.size())]
        dist.all_gather(shares, share, group=self.ranks)
        values = torch.stack(shares).tolist()
        for rank, value in enumerate(values):
            if not math.isfinite(value):
                raise NonFiniteError(f"{name} of rank {rank} is {value}")
        return math.fsum(values)


def _tokens(batches: list[dict[str, Tensor]]) -> int:
    return sum(batch["labels"].numel() for batch in batches)
