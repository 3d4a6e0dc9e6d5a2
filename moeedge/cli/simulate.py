"""`moeedge simulate`: what a policy would do on a machine that is not there."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeedge.cli.common import cli_errors
from moeedge.cli.lists import numbers, whole_numbers, words
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.sim.machine import Machine
    from moeedge.sim.shapes import ModelShape
    from moeedge.sim.simulate import Result, Setup, Source

_PANEL_SWEEP = "What is varied: lists, separated by commas"
_PANEL_DRIVE = "What drives it"


class Output(str, Enum):
    """How the rows are printed."""

    TABLE = "table"
    JSON = "json"


class Tail(str, Enum):
    """What refused drafts route to, where the trace does not say."""

    OPTIMISTIC = "optimistic"
    PESSIMISTIC = "pessimistic"


def simulate(
    hardware: Annotated[
        str,
        typer.Option(
            "--hardware",
            metavar="NAME|FILE",
            help="rtx4090-pcie4, rtx3090, a100, a JSON file of the same fields, a file that moeedge calibrate kept, or "
            '"this": the newest such file of the model.',
        ),
    ] = "rtx4090-pcie4",
    model: Annotated[
        str, typer.Option("-m", "--model", metavar="NAME|FILE", help="qwen3-30b-a3b and others, or a GGUF file.")
    ] = "qwen3-30b-a3b",
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="A routing trace (moeedge trace info). Without one, seeded text of the model's stand-in process.",
            show_default=False,
            rich_help_panel=_PANEL_DRIVE,
        ),
    ] = None,
    n_tokens: Annotated[
        int, typer.Option("-n", "--tokens", help="Tokens of stand-in text.", min=16, rich_help_panel=_PANEL_DRIVE)
    ] = 512,
    max_steps: Annotated[
        int | None,
        typer.Option(
            "--max-steps",
            help="Verifications to simulate, at most.",
            min=1,
            show_default=False,
            rich_help_panel=_PANEL_DRIVE,
        ),
    ] = None,
    acceptance: Annotated[
        float,
        typer.Option("--acceptance", help="Of a draft, where the trace does not say.", rich_help_panel=_PANEL_DRIVE),
    ] = 0.8,
    tail: Annotated[
        Tail, typer.Option("--tail", help="What refused drafts route to.", rich_help_panel=_PANEL_DRIVE)
    ] = Tail.OPTIMISTIC,
    seed: Annotated[int, typer.Option("-s", "--seed", help="Of everything drawn.", rich_help_panel=_PANEL_DRIVE)] = 0,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="LIST",
            help="Systems to run, as for moeedge replay: spac, spac-paper, lru, llama-cpp-sd, hybrimoe and others.",
            rich_help_panel=_PANEL_SWEEP,
        ),
    ] = "spac",
    cache_ratio: Annotated[
        str,
        typer.Option(
            "--cache-ratio",
            metavar="LIST",
            help="Share of all experts that the device holds.",
            rich_help_panel=_PANEL_SWEEP,
        ),
    ] = "0.17",
    gamma: Annotated[
        str, typer.Option("--gamma", metavar="LIST", help="Draft lengths; 0: none.", rich_help_panel=_PANEL_SWEEP)
    ] = "8",
    utility_cap: Annotated[
        str,
        typer.Option("-K", "--utility-cap", metavar="LIST", help="Highest utilities.", rich_help_panel=_PANEL_SWEEP),
    ] = "4",
    link: Annotated[
        str,
        typer.Option(
            "--link", metavar="LIST", help="Speeds of the link, times the machine's own.", rich_help_panel=_PANEL_SWEEP
        ),
    ] = "1",
    ablate: Annotated[str, typer.Option("--ablate", metavar="LIST", help="Parts to switch off, all together.")] = "",
    gantt: Annotated[
        Path | None,
        typer.Option("--gantt", metavar="FILE", help="Draw one step of every row (.png, .svg).", show_default=False),
    ] = None,
    event_log: Annotated[
        Path | None,
        typer.Option("--event-log", metavar="FILE", help="Write all events of the last row.", show_default=False),
    ] = None,
    output: Annotated[Output, typer.Option("-o", "--output", help="Print a table, or JSON rows.")] = Output.TABLE,
) -> None:
    """Simulate policies on a machine: GPU, CPU, link and draft as discrete events, driven by a routing trace.

    Every combination of the lists becomes a row: tokens per second, time per token, and what the device waited for.
    Constants of the built-in machines come from data files with sources; those of this one from moeedge calibrate.
    """
    with cli_errors():
        from moeedge.sim.simulate import simulate as run
        from moeedge.ui.console import stdout_console
        from moeedge.ui.simulate_view import print_rows

        source, shape = _source(trace, model, n_tokens, seed)
        machine, name = _machine(hardware, model, shape)
        about = {
            "hardware": name,
            "model": shape.name if shape else model,
            "trace": trace.name if trace else "stand-in",
        }
        setups = list(
            _setups(
                policies=words(policy, "--policy"),
                ratios=numbers(cache_ratio, "--cache-ratio"),
                gammas=whole_numbers(gamma, "--gamma"),
                caps=whole_numbers(utility_cap, "--utility-cap"),
                links=numbers(link, "--link"),
                common={
                    "acceptance": acceptance,
                    "ablations": frozenset(words(ablate, "--ablate")) if ablate else frozenset(),
                    "tail": tail.value,
                    "seed": seed,
                    "max_steps": max_steps,
                },
            )
        )
        wants_log = gantt is not None or event_log is not None
        results = [run(machine, source, setup, keep_log=wants_log) for setup in setups]
        rows = [result.row(**about) for result in results]
        if output is Output.JSON:
            typer.echo(json.dumps(rows, indent=1))
        else:
            print_rows(rows, stdout_console())
        _write(results, gantt, event_log)


def _source(trace: Path | None, model: str, n_tokens: int, seed: int) -> tuple[Source, ModelShape]:
    """What drives the simulation, and the model's sizes where it has a name or a file."""
    from moeedge.sim.shapes import builtin_models, find_model
    from moeedge.sim.simulate import Recorded, synthetic
    from moeedge.trace_import import read_trace

    is_file = model.endswith(".gguf")
    if trace is None:
        if is_file:
            raise InputError("A model file says nothing of its routing.", "Name a --trace, see moeedge profile.")
        shape = find_model(model)
        return synthetic(shape, n_tokens, 1, seed), shape
    known = builtin_models()
    source = Recorded(read_trace(trace, known[model].n_experts if model in known else None))
    if is_file:
        from moeedge.sim.calibrated import shape_of_file

        shape = shape_of_file(Path(model), source.trace.meta.n_experts_used)
    else:
        shape = find_model(model)
    if source.n_experts != shape.n_experts or len(source.expert_layers) > shape.n_layers:
        raise InputError(
            f"The trace has {len(source.expert_layers)} layers of {source.n_experts} experts, {shape.name} has "
            f"{shape.n_expert_layers} of {shape.n_experts}.",
            "Name the model of the trace.",
        )
    return source, shape


def _machine(hardware: str, model: str, shape: ModelShape) -> tuple[Machine, str]:
    from moeedge.sim.hardware import find_hardware
    from moeedge.sim.machine import from_hardware

    if hardware == "this" or hardware.endswith(".json"):
        from moeedge.sim.calibrated import hardware_named, newest_calibration, read_calibration

        if hardware_named(hardware):
            kept = newest_calibration(Path(model).name) if hardware == "this" else read_calibration(Path(hardware))
            return kept.machine, kept.file.stem
    found = find_hardware(hardware)
    return from_hardware(found, shape), found.name


def _setups(
    *,
    policies: list[str],
    ratios: list[float],
    gammas: list[int],
    caps: list[int],
    links: list[float],
    common: dict[str, Any],
) -> Iterator[Setup]:
    from moeedge.sim.simulate import Setup

    for name, ratio, gamma, cap, link in itertools.product(policies, ratios, gammas, caps, links):
        yield Setup(policy=name, cache_ratio=ratio, gamma=gamma, cap=cap, link_factor=link, **common)


def _write(results: list[Result], gantt: Path | None, event_log: Path | None) -> None:
    if gantt is not None:
        from moeedge.ui.gantt import draw_gantt
        from moeedge.ui.simulate_view import chart_of

        draw_gantt([chart_of(result) for result in results], gantt)
    if event_log is not None:
        try:
            event_log.write_text(results[-1].log.text(), encoding="utf-8")
        except OSError as error:
            raise InputError(f"Cannot write {event_log}: {error.strerror}.", "Name another file.") from None
