"""Training: a step, the loop around it, checkpoints, evaluation."""
