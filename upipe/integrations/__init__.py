"""Adapters to other libraries; each is imported by itself."""
