"""`moeedge chat`: talk to a model, or get a single answer."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from moeedge import paths
from moeedge.cli import options
from moeedge.cli.budget_options import BudgetOptions
from moeedge.cli.common import accept_any_text, show_log, text_of, unescaped
from moeedge.cli.declare import Output, flatten, option, output_option
from moeedge.cli.engine_options import EngineOptions, PlacementOptions, layer_notes, parse_ram
from moeedge.cli.llama_options import LlamaOptions
from moeedge.cli.model_files import ModelFiles
from moeedge.cli.model_switch import ModelSwitch
from moeedge.cli.sampling_options import SamplingOptions, TemplateOptions
from moeedge.engine.types import EngineConfig
from moeedge.errors import EmptyPromptError, InputError
from moeedge.hardware.spec import EMULATED

if TYPE_CHECKING:
    from moeedge.engine.conversation import Conversation
    from moeedge.engine.session import Session
    from moeedge.ui.chat.settings import Look, Settings

_PATIENCE_S = 2.0  # until a notice that standard input is being waited for

SystemPrompt = Annotated[str | None, option(options.WORK, "-sys, --system-prompt TEXT", "System prompt.")]
SystemPromptFile = Annotated[
    Path | None,
    option(options.WORK, "-sysf, --system-prompt-file FILE", "Read the system prompt from a text file."),
]
Escape = Annotated[
    bool,
    option(
        options.WORK,
        "-e, --escape/--no-escape",
        r"Turn \n, \t, \", \', \\ and \xHH in prompt, system prompt, -r and --dry-sequence-breaker into the "
        "characters that they stand for. Off by default (llama.cpp: on).",
    ),
]
Interactive = Annotated[
    bool, option(options.WORK, "-i, --interactive", "Chat on at the terminal after the answer to -p or -f.")
]
SingleTurn = Annotated[bool, option(options.WORK, "-st, --single-turn", "Exit after one answer.")]
ContextShift = Annotated[
    bool,
    option(
        options.HARDWARE,
        "--context-shift/--no-context-shift",
        "Drop the older half when the context is full, instead of stopping.",
        env="LLAMA_ARG_CONTEXT_SHIFT",
    ),
]
Resume = Annotated[
    str | None,
    option(
        options.WORK,
        "--resume [N|list]",
        "Go on with a chat that ended unexpectedly, the newest or number N, with its own system prompt, sampling "
        "options and -n; list: show them.",
    ),
]
NoAutosave = Annotated[
    bool,
    option(
        options.WORK,
        "--no-autosave",
        "Do not save this chat to disk. By default it is saved in the cache folder, for --resume.",
    ),
]
KeepCache = Annotated[
    bool,
    option(
        options.PLACEMENT,
        "--keep-cache",
        "Compute with the expert cache also while steps take longer with it, instead of trying it again later.",
    ),
]
Stats = Annotated[
    Output | None,
    output_option(
        Output.JSON, flags=("--stats",), help="At the end, print all counters of expert placement on standard error."
    ),
]

Quiet = Annotated[
    bool,
    option(options.OUTPUT, "-q, --quiet", "Show answers, warnings and errors only: no greeting, no panel, no figures."),
]
Plain = Annotated[
    bool,
    option(
        options.OUTPUT, "--plain", "Show the text of answers as the model writes it: no Markdown, no panel, no colour."
    ),
]
ShowThinking = Annotated[
    bool | None,
    option(
        options.OUTPUT,
        "--show-thinking/--hide-thinking",
        "What a model thinks before it answers: in full, or as a line with its length. Default: as a line on a "
        "terminal, in full elsewhere.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """What is shown besides the text of answers, and in which form."""

    quiet: Quiet = False
    plain: Plain = False
    show_thinking: ShowThinking = None

    def look(self, *, verbose: bool) -> Look:
        """The chat's settings of the view."""
        from moeedge.ui.chat.settings import Look

        return Look(
            stats="off" if self.quiet else "full" if verbose else "line",
            show_thinking="auto" if self.show_thinking is None else "on" if self.show_thinking else "off",
            markdown=not self.plain,
        )

    def apply(self) -> None:
        """What holds for the entire program: no notes with --quiet, no colour with --plain."""
        from moeedge.ui import console

        console.set_quiet(self.quiet)
        console.set_plain(self.plain)


@flatten
def chat(
    prompt: options.Prompt = None,
    file: options.PromptFile = None,
    system_prompt: SystemPrompt = None,
    system_prompt_file: SystemPromptFile = None,
    escape: Escape = False,
    n_predict: options.NPredict = -1,
    raw: options.Raw = False,
    single_turn: SingleTurn = False,
    interactive: Interactive = False,
    resume: Resume = None,
    no_autosave: NoAutosave = False,
    *,
    engine: EngineOptions,
    llama: LlamaOptions,
    template: TemplateOptions,
    sampling: SamplingOptions,
    placement: PlacementOptions,
    budget: BudgetOptions,
    keep_cache: KeepCache = False,
    ram: options.Ram = "auto",
    context_shift: ContextShift = False,
    output: options.TextOrJson = Output.TEXT,
    stats: Stats = None,
    view: ViewOptions,
    verbose: options.Verbose = False,
) -> None:
    """Chat with a model, or answer a single prompt with -p TEXT or text piped in.

    The answer goes to standard output, everything else to standard error.
    """
    from moeedge.hardware.machine_load import LoadReading

    begin = LoadReading.now()
    engine.limit_openmp_spin(ram=ram)
    view.apply()
    # from here on llama.cpp may be loaded
    from moeedge.engine.conversation import Conversation, prompt_tokens
    from moeedge.engine.session import prepare_answers
    from moeedge.hardware.processor import physical_cores
    from moeedge.hub.catalog import load_catalog
    from moeedge.llama.text import check_source
    from moeedge.ui.chat.greeting import print_greeting, print_header, print_warnings
    from moeedge.ui.chat.session_changes import settings_of
    from moeedge.ui.chat.settings import Settings
    from moeedge.ui.chat.single import answer_once
    from moeedge.ui.console import is_terminal, notifier, say, stderr_console, stdout_console

    if resume == "list":
        return _list_unfinished()
    accept_any_text()
    system = text_of(system_prompt, system_prompt_file, "-sys", "-sysf") or ""
    given = text_of(prompt, file, "-p", "-f")
    if escape:
        system, given = unescaped(system), given and unescaped(given)
    if raw and system:
        raise InputError("A system prompt (-sys) needs a chat template.", "Leave out --raw.")
    err = stderr_console()
    if raw and template != TemplateOptions():
        raise InputError("There is no chat template with --raw.", "Leave out --raw, or the template's options.")
    grammar, grammar_notes = sampling.grammar_text()
    drawn = replace((sampling.unescaped() if escape else sampling).config(), grammar=grammar)
    choice = template.choice()
    check_source(choice.source)
    settings = Settings(drawn, n_predict=n_predict, look=view.look(verbose=verbose), template=choice)
    placed = replace(placement.config(), governed=not keep_cache, calibrate_later=True)
    # random numbers are drawn draft by draft: lengths that follow times would give other tokens for the same seed
    auto_gamma = sampling.seed < 0 or not drawn.is_random

    def configure(options: EngineOptions, files: ModelFiles | None = None) -> EngineConfig:
        made = options.config(
            placed, context_shift=context_shift, files=files, default_draft="auto", auto_gamma=auto_gamma
        )
        return replace(llama.apply(made), cpu_fallback=True, ram=parse_ram(ram))

    config = configure(engine)
    config = budget.config(config)
    busy = LoadReading.now().busy_note(begin, config.n_threads or physical_cores())
    if verbose:
        show_log()
    goes_on = interactive and given is not None
    if interactive and not is_terminal(sys.stdin):
        raise InputError("-i needs a terminal, and standard input is not one.", "Leave out -i.")
    question = None if goes_on else one_shot_prompt(given, sys.stdin, notice=lambda line: say(err, line))
    if question is None and output is Output.JSON:
        raise InputError("-o json prints a single answer.", "Give -p TEXT or pipe a text in.")
    if question is not None and resume is not None:
        raise InputError("--resume goes on with a chat, and -p asks for a single answer.", "Leave out one of them.")
    config = budget.measured(config, notify=notifier(err))
    conversation = Conversation(system=system)
    with ModelSwitch(config, engine, configure, notifier(err)) as switch:
        session = switch.session
        settings = settings_of(session, settings)
        warnings = [*layer_notes(config), *([busy] if busy and not view.quiet else [])]
        for line in [*grammar_notes, *prepare_answers(session, drawn, choice, raw=raw)]:
            say(err, line)
        toy = paths.is_bundled(config.model)
        if view.quiet:
            print_warnings(err, session.info, warnings, quiet=True)
        elif question is not None:
            print_header(err, session.info, toy=toy, warnings=warnings)
        else:
            starter, speed = load_catalog().starter() if toy else None, _measured_speed(session)
            print_greeting(err, session.info, toy=toy, starter=starter, cache_speed=speed, warnings=warnings)
        if question is None:
            code = _talk(
                switch,
                conversation,
                settings,
                raw=raw,
                panel=not verbose,
                single_turn=single_turn,
                resume=resume,
                no_autosave=no_autosave,
                first=given if goes_on else None,
            )
        else:
            conversation.ask(question)
            prompt_ids = prompt_tokens(session.model, conversation, raw=raw, template=session.template)
            as_json = output is Output.JSON
            code = answer_once(
                session, prompt_ids, settings, as_json=as_json, panel=not verbose, out=stdout_console(), err=err
            )
        if stats is not None:
            _print_stats(switch.session)
    if code:
        raise typer.Exit(code)


def one_shot_prompt(given: str | None, stream: TextIO | None, *, notice: Callable[[str], None]) -> str | None:
    """The text to answer, or None when a person sits at the terminal and -p was not given.

    With -p and piped input the prompt is -p's text, a blank line, and the input. Raises EmptyPromptError for blanks.
    """
    from moeedge.ui.console import is_terminal

    if is_terminal(stream):
        if given is None:
            return None
        piped = ""
    else:
        piped = _read_piped(stream, with_prompt=given is not None, notice=notice)
    parts = [part for part in (given or "", piped.strip("\n")) if part.strip()]
    if not parts:
        where = "-p is blank" if given is not None else "standard input is empty and not a terminal"
        raise EmptyPromptError(
            f"The prompt is empty: {where}.", "Give -p TEXT, pipe a text in, or start the chat in a terminal."
        )
    return "\n\n".join(parts)


def _read_piped(stream: TextIO | None, *, with_prompt: bool, notice: Callable[[str], None]) -> str:
    """All of standard input, which is no terminal; a notice if the other end stays silent."""
    if stream is None or stream.closed:
        return ""
    if with_prompt and not _is_pipe_or_file(stream):
        return ""  # a socket or device that a service manager left open may never end; -p is enough
    waiting = threading.Timer(_PATIENCE_S, notice, ["Reading the prompt from standard input until it ends (Ctrl-D)."])
    waiting.daemon = True
    waiting.start()
    try:
        text = stream.read()
        text.encode("utf-8")  # in the C locale, bytes that are not UTF-8 become lone surrogates instead of an error
        return text
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise InputError(
            f"Byte {error.start:,} of standard input is not UTF-8 text.", "Convert the text, for instance with iconv."
        ) from None
    except OSError:  # closed in the meantime, or not readable
        return ""
    finally:
        waiting.cancel()


def _is_pipe_or_file(stream: TextIO) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # no descriptor: the text of a test or of an embedding program
        return True
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _talk(
    switch: ModelSwitch,
    conversation: Conversation,
    settings: Settings,
    *,
    raw: bool,
    panel: bool,
    single_turn: bool,
    resume: str | None,
    no_autosave: bool,
    first: str | None,
) -> int:
    """Chats until the user leaves; first: the message that is answered before one is read. Returns the exit code."""
    from moeedge.engine.autosave import Autosave, unfinished_chats
    from moeedge.ui.chat import commands
    from moeedge.ui.chat.prompt import make_reader, open_history
    from moeedge.ui.chat.repl import Repl, origin_of
    from moeedge.ui.console import say, stderr_console, stdout_console

    err, session = stderr_console(), switch.session
    unfinished = unfinished_chats(paths.unfinished_chats_dir, lambda line: say(err, line, style="yellow"))
    if unfinished and resume is None:
        say(err, commands.offer(unfinished), style="yellow")
    history = open_history(paths.history_file, lambda line: say(err, line, style="yellow"))
    repl = Repl(
        session,
        conversation,
        settings,
        read=make_reader(commands.completions(), history),
        out=stdout_console(),
        err=err,
        switch=switch,
        autosave=None if no_autosave else Autosave(paths.unfinished_chats_dir, origin_of(session, raw=raw)),
        unfinished=unfinished,
        raw=raw,
        panel=panel,
        single_turn=single_turn,
    )
    if first is not None:  # as an attached file it is no command, whatever it begins with
        repl.attached = first
        return repl.run("")
    return repl.run(None if resume is None else f"/resume {resume}")


def _list_unfinished() -> None:
    """The chats that --resume N goes on with, on standard output."""
    from moeedge.engine.autosave import unfinished_chats
    from moeedge.ui.chat.commands import unfinished_rows
    from moeedge.ui.console import show_figures, stdout_console

    rows = unfinished_rows(unfinished_chats(paths.unfinished_chats_dir, lambda line: typer.echo(line, err=True)))
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
    from moeedge.engine.budgets import budget_record

    placement = session.placement_stats()
    sensor = session.target.sensor
    record: dict[str, object] = {"device": "none"} if placement is None else placement.to_dict()
    record["sensor"] = None if sensor is None else asdict(sensor.stats())
    record |= budget_record(session.info.expert_budget, gamma=session.gamma)
    earlier = session.info.earlier_runs
    record["earlier_runs"] = None if earlier is None else asdict(earlier)
    typer.echo(json.dumps(record), err=True)
