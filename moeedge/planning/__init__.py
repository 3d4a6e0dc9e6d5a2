"""The memory that a model needs, and models that fit, before any of its weights are loaded."""
