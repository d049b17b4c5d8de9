"""Feed-forward plugins: one file a mechanism."""
