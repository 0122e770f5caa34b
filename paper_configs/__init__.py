"""Hydra configs of the experiments."""
