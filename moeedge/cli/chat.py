"""`moeedge chat`: talk to a model, or get a single answer."""

from __future__ import annotations

from functools import partial
from typing import Literal

import typer

from moeedge.cli.chat_options import SamplingOptions, TalkOptions, TemplateOptions, ViewOptions
from moeedge.cli.engine_options import BudgetOptions, LlamaOptions, PlacementOptions
from moeedge.cli.options import Output, flatten


@partial(flatten, seed=-1)
def chat(
    talk: TalkOptions,
    *,
    engine: LlamaOptions,
    template: TemplateOptions,
    sampling: SamplingOptions,
    placement: PlacementOptions,
    budget: BudgetOptions,
    keep_cache: bool = False,
    ram: int | Literal["auto", "off"] = "auto",
    context_shift: bool = False,
    output: Output = Output.TEXT,
    view: ViewOptions,
) -> None:
    """Chat with a model, or answer a single prompt with -p TEXT or text piped in.

    The answer goes to standard output, everything else to standard error.
    """
    from moeedge.hardware.host import LoadReading

    begin = LoadReading.now()
    engine.limit_openmp_spin(ram=ram)
    from moeedge.cli.chat_run import run_chat  # from here on llama.cpp may be loaded

    code = run_chat(
        talk,
        engine,
        template,
        sampling,
        placement,
        budget,
        view,
        keep_cache=keep_cache,
        ram=ram,
        context_shift=context_shift,
        as_json=output is Output.JSON,
        begin=begin,
    )
    if code:
        raise typer.Exit(code)
