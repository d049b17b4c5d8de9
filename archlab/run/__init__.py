"""One run: its stages, its record, its log."""
