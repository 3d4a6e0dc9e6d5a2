"""`moeedge doctor`: all checks, each on its own, so that one that fails hides no other."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from moeedge.health import environment, installation, machine, storage
from moeedge.health.report import Report, checked


def examine(honoured: Collection[str] = ()) -> Report:
    """Runs every check, in a second or two; loads no model, downloads nothing and writes nothing.

    honoured: the variables of llama.cpp's options (LLAMA_ARG_*) that act here.
    """
    found = checked("library", installation.library)
    if not any(finding.status == "broken" for finding in found):
        found += checked("GPU", installation.gpu)
    works = not any(finding.status == "broken" and finding.topic == "library" for finding in found)
    found += checked("toy pair", installation.bundled_files)
    found += checked("processor", machine.processor)
    if works:
        found += checked("kernels", machine.kernels)
    found += checked("threads", machine.threads)
    if works:
        found += checked("memory", machine.memory)
    found += checked("models", storage.models)
    found += checked("kept files", storage.kept_files)
    found += checked("variables", partial(environment.environment, honoured=honoured))
    return Report(tuple(found))
