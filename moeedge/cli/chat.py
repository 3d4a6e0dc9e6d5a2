"""`moeedge chat`: talk to a model, or get a single answer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import typer

from moeedge.cli.chat_options import SamplingOptions, TalkOptions, TemplateOptions, ViewOptions
from moeedge.cli.common import accept_any_text
from moeedge.cli.engine_options import BudgetOptions, LlamaOptions, PlacementOptions
from moeedge.cli.model_files import ModelFiles, resolve_models
from moeedge.cli.options import Output, flatten
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.paths import user_path
from moeedge.ui.chat.settings import Settings

_DRAFT_WORDS = ("auto", "mtp", "ngram", "none")  # sources of drafts for any model


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
    from moeedge.hardware.machine_load import LoadReading

    begin = LoadReading.now()
    engine.limit_openmp_spin(ram=ram)
    from moeedge.cli import chat_run  # from here on llama.cpp may be loaded
    from moeedge.llama.text import check_source
    from moeedge.ui import console

    console.set_modes(quiet=view.quiet, plain=view.plain)
    if talk.resume == "list":
        return chat_run.list_unfinished()
    accept_any_text()
    given, system = talk.texts()
    if talk.raw and template != TemplateOptions():
        raise InputError("There is no chat template with --raw.", "Leave out --raw, or the template's options.")
    drawn, grammar_notes = sampling.config(escape=talk.escape)
    choice = template.choice()
    check_source(choice.source)
    settings = Settings(drawn, n_predict=talk.n_predict, look=view.look(), template=choice)
    placed = placement.config(governed=not keep_cache, calibrate_later=True)
    # random numbers are drawn draft by draft: lengths that follow times would give other tokens for the same seed
    auto_gamma = drawn.seed is None or not drawn.is_random

    def configure(files: ModelFiles | None = None) -> EngineConfig:
        made = engine.config(
            placed, context_shift=context_shift, files=files, default_draft="auto", auto_gamma=auto_gamma
        )
        return replace(made, cpu_fallback=True, ram=ram)

    def named(name: str) -> EngineConfig:
        draft = engine.model_draft
        return configure(resolve_models(user_path(name), draft if draft in _DRAFT_WORDS else "auto"))

    code = chat_run.run_chat(
        budget.config(configure()),
        named,
        settings,
        talk,
        view,
        budget,
        given=given,
        system=system,
        as_json=output is Output.JSON,
        notes=grammar_notes,
        begin=begin,
    )
    if code:
        raise typer.Exit(code)
