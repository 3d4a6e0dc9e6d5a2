"""moeedge: Mixture-of-Experts models on small GPUs, with speculative decoding as accelerator and sensor."""

from __future__ import annotations

__version__ = "0.4.0"
