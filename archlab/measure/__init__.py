"""What a model costs, whether it decodes as it trains, and how long that takes."""
