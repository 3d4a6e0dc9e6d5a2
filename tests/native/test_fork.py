"""A process that is forked from one with an expert cache: it ends in time, and the parent goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import TinyFactory
from tests.native.conftest import printed

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

# the parent waits for its child, which ends the way Python programs do: with finalizers
PARENT = """\
import gc, os, signal, sys, warnings
from pathlib import Path

warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
from moeedge import native
from moeedge.errors import BackendError
from moeedge.native.cache import ExpertCache

def in_child(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # ends a child that waits
        work()
        gc.collect()
        sys.exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0, status
"""

CACHE = """
from tests.support.experts import acquire, ask, assert_bytes, write_experts

native.attach()
model = write_experts(Path(sys.argv[1]) / "model.bin")
cache = ExpertCache(model.config(1.0, link_bytes_per_s=2e5))
ask(cache, [(layer, expert) for layer in range(4) for expert in range(8)])

def use_and_close():
    for call in (cache.stats, lambda: cache.drain(60), lambda: acquire(cache, 0, [0])):
        try:
            call()
        except BackendError as error:
            assert "forked" in str(error), error
        else:
            raise SystemExit("a cache of another process answers")
    cache.close()
    with ExpertCache(model.config(0.5)) as own:
        ask(own, [(0, 0), (1, 1)])
        assert own.drain(10) and assert_bytes(own, model) == 2

in_child(lambda: None)
in_child(use_and_close)
assert cache.drain(30)
assert assert_bytes(cache, model) == 32
cache.close()
"""

LISTS = """
import ctypes
from moeedge.native.library import load

native.attach()
library, threads = load(), ctypes.CDLL(sys.argv[1])
calls = (library.moeedge_cache_destroy, library.moeedge_instance_threads)  # of -1, which is in neither list
for call in calls:
    assert threads.start(call) == 0
for _ in range(100):
    in_child(lambda: [call(-1) for call in calls] and os._exit(0))
os._exit(0)
"""

CONTEXT = """
from tests.support.hybrid import RandomPlans, hybrid_context

with hybrid_context(Path(sys.argv[1]), 0.5, n_stage=4) as (context, cache):
    RandomPlans(cache, 0).fill()
    expected = context.decode([3, 1, 4, 1, 5])
    in_child(lambda: None)  # which frees the context and closes the cache on its way out
    context.trim(0)
    assert (context.decode([3, 1, 4, 1, 5]) == expected).all()
"""


def test_child_neither_waits_nor_uses_the_cache(tmp_path: Path) -> None:
    printed("-c", PARENT + CACHE, tmp_path)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_child_of_a_process_that_is_looking_into_its_lists(tmp_path: Path) -> None:
    """The mutex of a list that another thread holds at that moment would never be free in the child."""
    threads = tmp_path / "threads.so"
    source = Path(__file__).with_name("ask_always.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-pthread", "-o", str(threads), str(source)], check=True)
    printed("-c", PARENT + LISTS, threads)


@pytest.mark.slow
def test_child_frees_a_context_with_a_cache(tiny: TinyFactory) -> None:
    printed("-c", PARENT + CONTEXT, tiny("qwen3moe"))
