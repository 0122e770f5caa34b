"""Memory without a GPU: which bytes are alive at which op, who owns them, and the same for one rank of many."""

from upipe.memory.fake import fake_ranks
from upipe.memory.label import label
from upipe.memory.report import table
from upipe.memory.timeline import Block, Event, Timeline
from upipe.memory.trace import trace

__all__ = ["Block", "Event", "Timeline", "fake_ranks", "label", "table", "trace"]
