"""Benchmarks of the engine: modes side by side in one process, raw samples first, figures computed from them."""
