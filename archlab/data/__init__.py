"""Sources of tokens: one file a source."""
