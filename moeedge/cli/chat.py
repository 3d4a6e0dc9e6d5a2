"""`moeedge chat`: talk to a model, or get a single answer."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import typer

import moeedge
from moeedge import paths
from moeedge.cli import options
from moeedge.cli.common import cli_errors
from moeedge.cli.device import check_device, layer_notes
from moeedge.cli.log import show_log
from moeedge.cli.pair import Pair, resolve_pair
from moeedge.cli.placement import calm_idle_threads, placement_config
from moeedge.engine.conversation import Conversation
from moeedge.engine.types import SamplingConfig
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.engine.session import Session
    from moeedge.ui.settings import Settings

_DEFAULT = SamplingConfig()


def chat(
    model: options.Model = None,
    model_draft: options.ModelDraft = None,
    draft_max: options.DraftMax = 4,
    prompt: options.Prompt = None,
    system_prompt: options.SystemPrompt = "",
    n_predict: options.NPredict = -1,
    output: options.OutputFormat = options.Output.TEXT,
    single_turn: options.SingleTurn = False,
    raw: options.Raw = False,
    temp: options.Temp = _DEFAULT.temperature,
    top_k: options.TopK = _DEFAULT.top_k,
    top_p: options.TopP = _DEFAULT.top_p,
    min_p: options.MinP = _DEFAULT.min_p,
    repeat_penalty: options.RepeatPenalty = _DEFAULT.repeat_penalty,
    repeat_last_n: options.RepeatLastN = _DEFAULT.repeat_last_n,
    seed: options.Seed = -1,
    ctx_size: options.CtxSize = 0,
    context_shift: options.ContextShift = False,
    threads: options.Threads = 0,
    n_gpu_layers: options.NGpuLayers = None,
    device: options.Device = "auto",
    vram: options.Vram = None,
    cache_ratio: options.CacheRatio = None,
    policy: options.Policy = "spac",
    ablate: options.Ablate = [],  # noqa: B006 (typer copies it)
    utility_cap: options.UtilityCap = 4,
    forgetting: options.Forgetting = 0.1,
    prefill_path: options.PrefillPath = "auto",
    no_calibrate: options.NoCalibrate = False,
    stats: options.Stats = None,
    verbose: options.Verbose = False,
) -> None:
    """Chat with a model, or answer a single prompt with -p TEXT or text piped in.

    The answer goes to standard output, everything else to standard error.
    """
    calm_idle_threads(device, may_emulate=model is None or paths.is_bundled(model))
    # what follows loads numpy, llama.cpp and the terminal libraries: not needed for --help
    from moeedge.cli.prompt_input import accept_any_text, one_shot_prompt, valid_text
    from moeedge.engine.session import Session
    from moeedge.ui.console import say, stderr_console
    from moeedge.ui.settings import Settings, seed_or_random

    with cli_errors():
        accept_any_text()
        err = stderr_console()
        if raw and system_prompt:
            raise InputError("A system prompt (-sys) needs a chat template.", "Leave out --raw.")
        settings = Settings(
            sampling=SamplingConfig(
                temperature=temp,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repeat_penalty=repeat_penalty,
                repeat_last_n=repeat_last_n,
                seed=seed_or_random(seed),
            ),
            n_predict=n_predict,
            gamma=draft_max,
        )
        placement = placement_config(
            vram=vram,
            cache_ratio=cache_ratio,
            policy=policy,
            ablate=ablate,
            utility_cap=utility_cap,
            forgetting=forgetting,
            prefill_path=prefill_path,
            no_calibrate=no_calibrate,
        )
        check_device(device)
        pair = resolve_pair(model, model_draft)
        config = pair.engine_config(
            ctx_size=ctx_size,
            threads=threads,
            draft_max=draft_max,
            n_gpu_layers=n_gpu_layers,
            device=device,
            context_shift=context_shift,
            placement=placement,
            emulate=True,
        )
        if verbose:
            show_log()
        text = one_shot_prompt(prompt and valid_text(prompt), sys.stdin, complain=lambda line: say(err, line))
        as_json = output is options.Output.JSON
        if text is None and as_json:
            raise InputError("-o json prints a single answer.", "Give -p TEXT or pipe a text in.")
        conversation = Conversation(system=valid_text(system_prompt))
        if text is not None:
            conversation.ask(text)
        with Session.open(config, tell=lambda line: say(err, line)) as session:
            notes = layer_notes(config.n_gpu_layers or 0)
            talk = _Talk(session, conversation, settings, pair, notes, raw, panel=not verbose)
            session.on_note = lambda line: say(err, line, style="yellow")
            code = talk.interactive(single_turn=single_turn) if text is None else talk.one_shot(as_json=as_json)
            if stats is not None:
                _print_stats(session)
        if code:
            raise typer.Exit(code)


def _print_stats(session: Session) -> None:
    """One JSON line on standard error: every counter of expert placement, and those of the sensor."""
    import json

    placement = session.placement_stats()
    sensor = session.target.sensor
    record: dict[str, object] = {"device": "none"} if placement is None else placement.to_dict()
    record["sensor"] = None if sensor is None else asdict(sensor.stats())
    typer.echo(json.dumps(record), err=True)


@dataclass(frozen=True)
class _Talk:
    """What both ways of talking need."""

    session: Session
    conversation: Conversation
    settings: Settings
    pair: Pair
    notes: list[str]  # about the options, beside those of the engine
    raw: bool
    panel: bool

    def one_shot(self, *, as_json: bool) -> int:
        """Answer the conversation's open question. Returns the exit code."""
        from moeedge.engine.turn import prompt_tokens
        from moeedge.ui.console import say, stderr_console, stdout_console
        from moeedge.ui.header import header_line, hints
        from moeedge.ui.one_shot import answer_once

        err = stderr_console()
        info = self.session.info
        for line in [header_line(info), *self.notes, *hints(info, toy=self.pair.bundled)]:
            say(err, line)
        return answer_once(
            self.session,
            prompt_tokens(self.session.model, self.conversation, raw=self.raw),
            self.settings,
            as_json=as_json,
            panel=self.panel,
            out=stdout_console(),
            err=err,
        )

    def interactive(self, *, single_turn: bool) -> int:
        """Chat until the user leaves. Returns the exit code."""
        from moeedge.ui import commands
        from moeedge.ui.console import say, stderr_console, stdout_console
        from moeedge.ui.header import print_header
        from moeedge.ui.prompt import make_reader, open_history
        from moeedge.ui.repl import Repl

        err = stderr_console()
        print_header(err, self.session.info, version=moeedge.__version__, toy=self.pair.bundled)
        for line in self.notes:
            say(err, line)
        history = open_history(paths.history_file, lambda line: say(err, line, style="yellow"))
        repl = Repl(
            self.session,
            self.conversation,
            replace(self.settings, gamma=self.session.gamma),  # 0 where there is no draft
            read=make_reader(commands.names(), history),
            out=stdout_console(),
            err=err,
            autosave=lambda: paths.cache_dir() / "chat_autosave.json",
            raw=self.raw,
            panel=self.panel,
            single_turn=single_turn,
        )
        return repl.run()
