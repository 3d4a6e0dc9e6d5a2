"""What --verbose does."""

from __future__ import annotations

import logging
import sys


def show_log() -> None:
    """Send the logs of moeedge and of llama.cpp, which does not propagate, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))  # moeedge.llama: ...
    for name in ("moeedge", "moeedge.llama"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)  # llama.cpp debugs with hundreds of lines per graph
