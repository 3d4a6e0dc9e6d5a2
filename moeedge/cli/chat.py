"""`moeedge chat`: talk to a model, or get a single answer."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import typer

from moeedge import paths
from moeedge.cli import options
from moeedge.cli.common import cli_errors, show_log
from moeedge.cli.pair import Pair, check_device, layer_notes, limit_openmp_spin, placement_config, resolve_pair
from moeedge.engine.conversation import Conversation
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.engine.session import Session
    from moeedge.ui.chat.settings import Settings


_DEFAULT = SamplingConfig()


def chat(
    model: options.Model = None,
    model_draft: options.ModelDraft = None,
    draft_max: options.DraftMax = None,
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
    limit_openmp_spin(device, may_emulate=model is None or paths.is_bundled(model))
    # what follows loads numpy, llama.cpp and the terminal libraries: not needed for --help
    from moeedge.cli.prompt_input import accept_any_text
    from moeedge.ui.chat.settings import Settings

    with cli_errors():
        accept_any_text()
        if raw and system_prompt:
            raise InputError("A system prompt (-sys) needs a chat template.", "Leave out --raw.")
        sampling = _sampling(temp, top_k, top_p, min_p, repeat_penalty, repeat_last_n, seed)
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
        settings = Settings(sampling, n_predict=n_predict, gamma=config.gamma)
        if verbose:
            show_log()
        as_json = output is options.Output.JSON
        conversation = _conversation(prompt, system_prompt, as_json=as_json)
        talk = _Talk(config, conversation, settings, pair, raw, panel=not verbose)
        code = talk.run(single_turn=single_turn, as_json=as_json, stats=stats is not None)
        if code:
            raise typer.Exit(code)


def _sampling(
    temp: float, top_k: int, top_p: float, min_p: float, repeat_penalty: float, repeat_last_n: int, seed: int
) -> SamplingConfig:
    from moeedge.ui.chat.settings import seed_or_random

    return SamplingConfig(
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        repeat_last_n=repeat_last_n,
        seed=seed_or_random(seed),
    )


def _conversation(prompt: str | None, system_prompt: str, *, as_json: bool) -> Conversation:
    """With an open question, unless a person sits at the terminal and -p was not given."""
    from moeedge.cli.prompt_input import one_shot_prompt, valid_text
    from moeedge.ui.console import say, stderr_console

    err = stderr_console()
    text = one_shot_prompt(prompt and valid_text(prompt), sys.stdin, complain=lambda line: say(err, line))
    if text is None and as_json:
        raise InputError("-o json prints a single answer.", "Give -p TEXT or pipe a text in.")
    conversation = Conversation(system=valid_text(system_prompt))
    if text is not None:
        conversation.ask(text)
    return conversation


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

    config: EngineConfig
    conversation: Conversation
    settings: Settings
    pair: Pair
    raw: bool
    panel: bool

    def run(self, *, single_turn: bool, as_json: bool, stats: bool) -> int:
        """Answer the conversation's open question, or chat where there is none. Returns the exit code."""
        from moeedge.engine.session import Session
        from moeedge.ui.console import notifier, stderr_console

        with Session.open(self.config, notify=notifier(stderr_console())) as session:
            notes = layer_notes(self.config.n_gpu_layers or 0)
            if self.conversation.messages:
                code = self._one_shot(session, notes, as_json=as_json)
            else:
                code = self._interactive(session, notes, single_turn=single_turn)
            if stats:
                _print_stats(session)
        return code

    def _one_shot(self, session: Session, notes: list[str], *, as_json: bool) -> int:
        from moeedge.engine.conversation import prompt_tokens
        from moeedge.ui.chat.greeting import print_header
        from moeedge.ui.chat.single import answer_once
        from moeedge.ui.console import stderr_console, stdout_console

        err = stderr_console()
        print_header(err, session.info, toy=self.pair.bundled, warnings=notes)
        return answer_once(
            session,
            prompt_tokens(session.model, self.conversation, raw=self.raw),
            self.settings,
            as_json=as_json,
            panel=self.panel,
            out=stdout_console(),
            err=err,
        )

    def _interactive(self, session: Session, notes: list[str], *, single_turn: bool) -> int:
        from moeedge.ui.chat import commands
        from moeedge.ui.chat.greeting import print_greeting
        from moeedge.ui.chat.prompt import make_reader, open_history
        from moeedge.ui.chat.repl import Repl
        from moeedge.ui.console import say, stderr_console, stdout_console

        err = stderr_console()
        print_greeting(err, session.info, toy=self.pair.bundled, warnings=notes)
        history = open_history(paths.history_file, lambda line: say(err, line, style="yellow"))
        repl = Repl(
            session,
            self.conversation,
            replace(self.settings, gamma=session.gamma),  # 0 where there is no draft
            read=make_reader(commands.names(), history),
            out=stdout_console(),
            err=err,
            autosave=lambda: paths.cache_dir() / "chat_autosave.json",
            raw=self.raw,
            panel=self.panel,
            single_turn=single_turn,
        )
        return repl.run()
