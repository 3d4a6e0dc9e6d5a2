"""Runs Mixture-of-Experts models on small GPUs; speculative decoding speeds them up and predicts their experts."""

from __future__ import annotations

__version__ = "0.36.0"
