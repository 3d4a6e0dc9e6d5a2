"""What an instance of our backend may ask for."""

from __future__ import annotations

from enum import IntEnum


class Claims(IntEnum):
    """What our backend asks llama.cpp's scheduler for; the values are those of include/moeedge.h."""

    NONE = 0  # nothing: the context runs as stock llama.cpp does
    BLOCK = 1  # the MoE blocks whose weights lie in host memory, for use beside a GPU
    WHOLE = 2  # every operation of the CPU: one split per graph, so that sensing costs no seams
