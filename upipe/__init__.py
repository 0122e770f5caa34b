"""upipe."""
