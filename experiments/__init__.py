"""Programs over the library: training, the paper's tables, chunk sizes, planning. upipe never imports them."""
