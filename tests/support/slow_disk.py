"""The moeedge command with a slow disk: DISK_BYTES_PER_S=RATE python -m tests.support.slow_disk ARGUMENTS."""

from __future__ import annotations

import os
from typing import Any

from moeedge.__main__ import main
from moeedge.native.cache import CacheConfig
from moeedge.scheduler import opening


def slow_config(**fields: Any) -> CacheConfig:
    return CacheConfig(**fields | {"disk_bytes_per_s": float(os.environ["DISK_BYTES_PER_S"])})


if __name__ == "__main__":
    opening.CacheConfig = slow_config  # type: ignore[misc,assignment]
    main()
