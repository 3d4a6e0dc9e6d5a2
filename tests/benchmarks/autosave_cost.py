"""The time that saving one step of a chat takes: `python -m tests.benchmarks.autosave_cost [FOLDER]`.

Prints one JSON object with microseconds of 20,000 steps of three tokens; FOLDER is on the disk to be measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from moeedge.engine.autosave import Autosave, Origin
from moeedge.engine.conversation import Conversation

N_STEPS = 20_000


def step_times_us(folder: Path, n_steps: int = N_STEPS) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Microseconds of each step."""
    saved = Autosave(lambda: folder, Origin("model.gguf", 1, raw=False))
    conversation = Conversation()
    conversation.ask("a question")
    saved.update(conversation, {})
    times_s = []
    for _ in range(n_steps):
        start_s = time.perf_counter()
        saved.add_step(" some piece of text", [1234, 5678, 910])
        times_s.append(time.perf_counter() - start_s)
    saved.close()
    return 1e6 * np.array(times_s)


def main(arguments: list[str]) -> None:
    """Measures and prints."""
    with tempfile.TemporaryDirectory(dir=arguments[0] if arguments else None) as folder:
        times_us = step_times_us(Path(folder))
    figures = {
        "median_us": np.median(times_us),
        "p99_us": np.quantile(times_us, 0.99),
        "max_us": times_us.max(),
    }
    print(json.dumps({name: round(float(value), 1) for name, value in figures.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
