"""Synthetic tasks: one file each, a generator of rows with a known answer."""
