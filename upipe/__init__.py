"""upipe: exact attention for multi-million-token training, with heads sent through in chunks.

Start at :func:`headwise_attention` or :class:`UPipeAttention`. The reading order of the source is in README.md.
"""

from upipe import memory
from upipe.batch import shard_batch
from upipe.block import HeadwiseBlock
from upipe.headwise import headwise_attention
from upipe.loss import context_parallel_loss
from upipe.mask import AttentionMask
from upipe.mlp import tiled_mlp
from upipe.nn import UlyssesAttention, UPipeAttention
from upipe.projections import Projections
from upipe.rotary import Rotary
from upipe.schedule import HeadSchedule, Stage
from upipe.ulysses import ulysses_attention

__all__ = [
    "AttentionMask",
    "HeadSchedule",
    "HeadwiseBlock",
    "Projections",
    "Rotary",
    "Stage",
    "UPipeAttention",
    "UlyssesAttention",
    "context_parallel_loss",
    "headwise_attention",
    "memory",
    "shard_batch",
    "tiled_mlp",
    "ulysses_attention",
]
