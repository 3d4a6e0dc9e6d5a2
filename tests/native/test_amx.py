"""AMX kernels of llama.cpp that fail are off: a prompt of a quantized model ends with an answer, not with a signal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.conftest import TinyFactory
from tests.support.stock import StockContext

TOKENS = list(range(40, 72))  # AMX computes batches of several tokens
ANSWER = """
import sys
from pathlib import Path
from moeedge.llama import library
from tests.support.stock import StockContext
library.start()
with StockContext(Path(sys.argv[1]), n_threads=2) as stock:
    stock.decode(list(range(40, 72)))
"""


def test_a_prompt_with_quantized_dense_weights(tiny: TinyFactory) -> None:
    """In a process of its own, since a signal would end this one."""
    path = tiny("qwen3moe", embd=256, dense_type="Q8_0")
    subprocess.run([sys.executable, "-c", ANSWER, str(path)], check=True, cwd=Path(__file__).parents[2], timeout=60)
    found = []
    for repack in (True, False):
        with StockContext(path, repack=repack) as stock:
            found.append(stock.decode(TOKENS))
    assert np.abs(found[0] - found[1]).max() < 0.05 * found[1].std()
