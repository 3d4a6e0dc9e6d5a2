"""What a model needs and what fits, before any of its weights are loaded."""
