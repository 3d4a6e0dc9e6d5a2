"""The moeedge command with a slow disk: python -m tests.support.slow_disk ARGUMENTS."""

from __future__ import annotations

import os
from functools import partial

from moeedge.__main__ import main
from moeedge.native.cache import CacheConfig
from moeedge.scheduler import opening

if __name__ == "__main__":
    rate = float(os.environ["DISK_BYTES_PER_S"])
    opening.CacheConfig = partial(CacheConfig, disk_bytes_per_s=rate)  # type: ignore[misc,assignment]
    main()
