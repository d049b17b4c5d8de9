"""The way between archlab and other libraries: settings and weights, both ways, without loss."""
