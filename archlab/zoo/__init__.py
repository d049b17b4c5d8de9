"""Published models, and any configuration of one's own among them, counted without building a weight."""
