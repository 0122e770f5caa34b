"""Hypothesis without a deadline: machines are shared, so no test is timed."""

from hypothesis import settings

settings.register_profile("upipe", deadline=None)
settings.load_profile("upipe")
