"""Programs over the library: training, the paper's tables, chunk sizes, planning. They import upipe, never the reverse."""
