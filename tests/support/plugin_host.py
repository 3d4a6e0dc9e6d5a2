"""A stock llama.cpp program, in Python: loads our library by GGML_BACKEND_PATH alone and never imports moeedge.

    GGML_BACKEND_PATH=libmoeedge.so python -m tests.support.plugin_host OUT.npz THREADS MODEL...

It stores the transcripts, and in `graphs` the number of graphs or parts of graphs that our backend computed per model.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import llama_cpp.llama_cpp as lib
import numpy as np

from tests.support.stock import StockContext, silence, transcript


class Stats(ctypes.Structure):
    """struct moeedge_sensor_stats of include/moeedge.h."""

    _fields_ = (
        ("graphs", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("sense_s", ctypes.c_double),
        ("compute_s", ctypes.c_double),
    )


def main(arguments: list[str]) -> None:
    """Write the transcripts; fail if ggml did not register our device."""
    silence()
    out, n_threads, *paths = arguments
    ggml = lib._lib  # libllama and, through it, the ggml that it uses
    ggml.ggml_backend_load_all()
    ggml.ggml_backend_dev_by_name.restype = ctypes.c_void_p
    assert ggml.ggml_backend_dev_by_name(b"MOEEDGE"), "ggml did not load the library"
    library = ctypes.CDLL(os.environ["GGML_BACKEND_PATH"])
    library.moeedge_newest_instance.restype = ctypes.c_int64
    rows: dict[str, np.ndarray] = {}
    graphs = []
    for path in paths:
        with StockContext(Path(path), n_threads=int(n_threads), n_ubatch=32) as context:
            instance = ctypes.c_int64(library.moeedge_newest_instance())
            rows[Path(path).stem] = transcript(context)
            stats = Stats()
            assert library.moeedge_instance_get_stats(instance, ctypes.byref(stats)) == 0
            graphs.append(stats.graphs)
    assert library.moeedge_live_instances() == 0, "every context freed its instance"
    assert not any(name.partition(".")[0] == "moeedge" for name in sys.modules)
    np.savez(out, graphs=graphs, **rows)


if __name__ == "__main__":
    main(sys.argv[1:])
