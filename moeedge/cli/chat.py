"""`moeedge chat`: talk to a model, or get a single answer."""

from __future__ import annotations

from functools import partial

import typer

from moeedge.cli.chat_options import ChatOptions
from moeedge.cli.options import flatten


@partial(flatten, seed=-1)
def chat(options: ChatOptions) -> None:
    """Chat with a model, or answer a single prompt with -p TEXT or text piped in.

    The answer goes to standard output, everything else to standard error.
    """
    from moeedge.hardware.host import LoadReading

    begin = LoadReading.now()
    options.engine.limit_openmp_spin(ram=options.ram)
    from moeedge.cli.chat_run import run_chat  # from here on llama.cpp may be loaded

    if code := run_chat(options, begin):
        raise typer.Exit(code)
