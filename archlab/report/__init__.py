"""Many records side by side."""
