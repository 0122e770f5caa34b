"""Decoder blocks with the memory of the published runs, to compare with: same results, their lifetimes."""

from experiments.baselines.alst import AlstBlock
from experiments.baselines.peaks import BLOCKS, BlockPeaks, block_peaks
from experiments.baselines.shell import rotary_table
from experiments.baselines.upipe_paper import UPipePaperBlock

__all__ = ["BLOCKS", "AlstBlock", "BlockPeaks", "UPipePaperBlock", "block_peaks", "rotary_table"]
