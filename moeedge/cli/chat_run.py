"""`moeedge chat` once its options are read: chats, or gives a single answer. This module loads llama.cpp."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace

import typer
from rich.console import Console

from moeedge import paths
from moeedge.cli.chat_options import ChatOptions, TemplateOptions
from moeedge.cli.common import accept_any_text
from moeedge.cli.engine_options import layer_notes
from moeedge.cli.model_files import ModelFiles, resolve_models
from moeedge.cli.options import Output
from moeedge.engine.autosave import unfinished_chats
from moeedge.engine.conversation import Conversation, prompt_tokens
from moeedge.engine.session import Session, prepare_answers
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.hardware.host import LoadReading, busy_note, physical_cores
from moeedge.hardware.spec import EMULATED
from moeedge.hub.catalog import load_catalog
from moeedge.llama.text import check_source
from moeedge.paths import user_path
from moeedge.policies.expert_budget import budget_record
from moeedge.records import as_dict
from moeedge.run import Run
from moeedge.ui.chat import commands
from moeedge.ui.chat.greeting import print_greeting, print_header, print_warnings
from moeedge.ui.chat.prompt import make_reader, one_shot_prompt, open_history
from moeedge.ui.chat.repl import Repl
from moeedge.ui.chat.session import ModelSwitch
from moeedge.ui.chat.settings import Settings
from moeedge.ui.chat.single import answer_once
from moeedge.ui.console import is_terminal, notifier, say, set_modes, show_figures, stderr_console, stdout_console

_DRAFT_WORDS = ("auto", "mtp", "ngram", "none")  # sources of drafts for any model
_N_CHECKPOINTS = 8  # messages that a chat can go back to without computing all again


def run_chat(options: ChatOptions, begin: LoadReading) -> int:
    """Chats, or gives a single answer. begin: the load before this process worked. Returns the exit code."""
    engine, as_json = options.engine, options.output is Output.JSON
    set_modes(quiet=options.quiet, plain=options.plain)
    if options.resume == "list":
        _list_unfinished()
        return 0
    accept_any_text()
    given, system = options.texts()
    if options.raw and options.template != TemplateOptions():
        raise InputError("There is no chat template with --raw.", "Leave out --raw, or the template's options.")
    drawn, notes = options.sampling.config(escape=options.escape)
    choice = options.template.choice()
    check_source(choice.source)
    settings = Settings(drawn, n_predict=options.n_predict, look=options.look(), template=choice)
    placed = options.placement.config(governed=not options.keep_cache, calibrate_later=True)
    # random numbers are drawn draft by draft: lengths that follow times would give other tokens for the same seed
    auto_gamma = drawn.seed is None or not drawn.is_random

    def configure(files: ModelFiles | None = None) -> EngineConfig:
        config = engine.config(
            placed, context_shift=options.context_shift, files=files, default_draft="auto", auto_gamma=auto_gamma
        )
        return replace(config, cpu_fallback=True, ram=options.ram, n_checkpoints=_N_CHECKPOINTS)

    def named(name: str) -> EngineConfig:
        draft = engine.model_draft
        return configure(resolve_models(user_path(name), draft if draft in _DRAFT_WORDS else "auto"))

    config = options.budget.config(configure())
    busy = busy_note(LoadReading.now().others_since(begin), config.n_threads or physical_cores())
    err, out = stderr_console(), stdout_console()
    goes_on = options.interactive and given is not None
    if options.interactive and not is_terminal(sys.stdin):
        raise InputError("-i needs a terminal, and standard input is not one.", "Leave out -i.")
    if options.resume is not None and given is None and not is_terminal(sys.stdin):
        raise InputError("--resume needs a terminal, and standard input is not one.", "Leave out what is piped in.")
    question = None if goes_on else one_shot_prompt(given, sys.stdin, notice=lambda line: say(err, line))
    if question is None and as_json:
        raise InputError("-o json prints a single answer.", "Give -p TEXT or pipe a text in.")
    if question is not None and options.resume is not None:
        raise InputError("--resume goes on with a chat, and -p asks for a single answer.", "Leave out one of them.")
    run = Run(notifier(err))
    config = options.budget.measured(config if question is None else replace(config, n_checkpoints=0), run)
    conversation = Conversation(system=system)
    with ModelSwitch(config, named, run) as switch:
        session = switch.session
        warnings = [*layer_notes(config), *([busy] if busy and not options.quiet else [])]
        for line in [*notes, *prepare_answers(session, settings.sampling, settings.template, raw=options.raw)]:
            say(err, line)
        _print_start(session, warnings, err, quiet=options.quiet, talks=question is None)
        if question is not None:
            conversation.ask(question)
            prompt_ids = prompt_tokens(session.model, conversation, raw=options.raw, template=session.template)
            code = answer_once(
                session, prompt_ids, settings, as_json=as_json, panel=not options.verbose, out=out, err=err
            )
        else:
            unfinished = unfinished_chats(paths.unfinished_chats_dir, run)
            if unfinished and options.resume is None:
                say(err, commands.offer(unfinished), style="yellow")
            history = open_history(lambda: paths.cache_dir() / "chat_history", run)
            repl = Repl(
                session,
                conversation,
                settings,
                read=make_reader(commands.completions(), history, run),
                out=out,
                err=err,
                switch=switch,
                folder=None if options.no_autosave else paths.unfinished_chats_dir,
                unfinished=unfinished,
                raw=options.raw,
                panel=not options.verbose,
                single_turn=options.single_turn,
            )
            repl.attached = given or ""  # as an attached file it is no command, whatever it begins with
            code = repl.run("" if goes_on else None if options.resume is None else f"/resume {options.resume}")
        if options.stats is not None:
            _print_stats(switch.session)
    return code


def _print_start(session: Session, warnings: list[str], err: Console, *, quiet: bool, talks: bool) -> None:
    """What was loaded, and with what warnings, before the first answer. talks: more than one answer is wanted."""
    toy = paths.is_bundled(session.config.model)
    if quiet:
        print_warnings(err, session.info, warnings, quiet=True)
    elif talks:
        starter, speed = load_catalog().starter() if toy else None, _measured_speed(session)
        print_greeting(err, session.info, toy=toy, starter=starter, cache_speed=speed, warnings=warnings)
    else:
        print_header(err, session.info, toy=toy, warnings=warnings)


def _list_unfinished() -> None:
    rows = commands.unfinished_rows(
        unfinished_chats(paths.unfinished_chats_dir, Run(lambda line: typer.echo(line, err=True)))
    )
    show_figures(stdout_console(), rows)
    if not rows:
        typer.echo("No chat ended unexpectedly.", err=True)


def _measured_speed(session: Session) -> float | None:
    """Speed of a step with the expert cache over one without, if it was measured on a real device."""
    measured = session.calibration
    if measured is None or session.info.device.startswith(EMULATED) or measured.n_tokens not in measured.step_s:
        return None
    return measured.speed


def _print_stats(session: Session) -> None:
    """One JSON line on standard error: every counter of expert placement, and those of the sensor."""
    placement = session.placement_stats()
    sensor = session.target.sensor
    record: dict[str, object] = {"device": "none"} if placement is None else as_dict(placement)
    record["sensor"] = None if sensor is None else asdict(sensor.stats())
    record |= budget_record(session.info.expert_budget, gamma=session.gamma)
    earlier = session.info.earlier_runs
    record["earlier_runs"] = None if earlier is None else asdict(earlier)
    typer.echo(json.dumps(record), err=True)
