"""Attention plugins: one file a mechanism."""
