"""The outputs of `moeedge profile`: text or JSON, pictures, the report; of a run or of a recorded trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeedge.cli import options
from moeedge.cli.declare import option
from moeedge.cli.profile_run import Profiled
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.analysis.model_profile import ModelProfile
    from moeedge.analysis.profile import LayerProfile
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.pictures import Picture
    from moeedge.ui.progress import Bar

_REPORTS = (".html", ".json")

Report = Annotated[
    Path | None,
    option(options.OUTPUT, "--report FILE.html|FILE.json", "Write all pictures and numbers as one page, or as JSON."),
]
Pictures = Annotated[
    Path | None, option(options.OUTPUT, "--pictures FOLDER", "Write every picture of the report as a PNG.")
]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The files that a profile reads and writes."""

    report: Report = None
    pictures: Pictures = None
    plot: options.Plot = None


@dataclass(frozen=True, kw_only=True)
class ProfileOutput:
    """Where the results go."""

    files: OutputOptions
    as_json: bool
    single: bool  # one object instead of an array

    @classmethod
    def of(cls, files: OutputOptions, *, as_json: bool, single: bool) -> ProfileOutput:
        """Raises InputError for a place that cannot be written."""
        from moeedge.ui.console import check_output, check_picture

        if files.plot is not None:
            check_picture(files.plot)
        if files.report is not None and files.report.suffix.lower() not in _REPORTS:
            raise InputError(f"--report cannot write {files.report.name}.", "End the name in .html or .json.")
        if files.report is not None:
            check_output(files.report)
        if files.pictures is not None and files.pictures.exists() and not files.pictures.is_dir():
            raise InputError(f"{files.pictures} is not a folder.", "Give --pictures a folder.")
        return cls(files=files, as_json=as_json, single=single)

    @property
    def wants_model(self) -> bool:
        """Whether more than the layers asked for is profiled: only an array of layers has no place for it."""
        return self.files.report is not None or self.files.pictures is not None or not self.as_json or self.single

    def write(self, profiled: Profiled) -> int:
        """Computes what is asked for, and writes it. Returns the exit code: not 0 after an interruption."""
        from moeedge.analysis.profile_json import run_facts
        from moeedge.ui.layer_pictures import plot_profiles

        run = run_facts(profiled.trace, profiled.recording)
        model, code = _model_profile(profiled) if self.wants_model else (None, 0)
        layers = _layer_profiles(profiled) if model is None else model.layers
        self._print(layers, model, run)
        if self.files.plot is not None:
            meta = profiled.trace.meta
            title = f"{meta.model}, {meta.parameters.get('dataset', '')}, gamma {meta.gamma}"
            plot_profiles(layers, title, self.files.plot)
        if model is not None and (self.files.report is not None or self.files.pictures is not None):
            code = self._write_report(model, run) or code
        return code

    def _print(
        self,
        layers: Sequence[LayerProfile],
        model: ModelProfile | None,
        run: dict[str, Any],
    ) -> None:
        """The profile on standard output."""
        from moeedge.analysis.profile_json import layer_report, model_report
        from moeedge.ui.console import stdout_console
        from moeedge.ui.profile_views import print_model, print_profiles

        if not self.as_json:
            print_profiles(layers, stdout_console())
            if model is not None:
                print_model(model, stdout_console())
            return
        reports = [layer_report(layer, run) for layer in layers]
        if self.single and model is not None:
            reports[0]["model_profile"] = model_report(model)
        typer.echo(json.dumps(reports[0] if self.single else reports, ensure_ascii=False))

    def _write_report(self, profile: ModelProfile, run: dict[str, Any]) -> int:
        """The page or its JSON, and the pictures as files. After a signal the pictures that were drawn until then."""
        from moeedge.analysis.profile_json import complete_report
        from moeedge.ui.chat.interrupt import Interrupt
        from moeedge.ui.console import say, stderr_console
        from moeedge.ui.pictures import save_picture
        from moeedge.ui.profile_findings import findings, run_lines
        from moeedge.ui.profile_pictures import profile_pictures
        from moeedge.ui.progress import count_bar
        from moeedge.ui.report import report_html, write_report

        err = stderr_console()
        report, folder = self.files.report, self.files.pictures
        numbers: dict[str, Any] = complete_report(profile, run)
        pictures = profile_pictures(profile)
        draws_page = report is not None and report.suffix.lower() == ".html"
        n_drawn = len(pictures) * (draws_page + (folder is not None))
        with Interrupt() as interrupt, count_bar(err, "drawing", "pictures", n_drawn) as bar:
            interrupt.arm()
            if report is not None and draws_page:
                head = f"Profile of {profile.meta.model}", run_lines(profile), findings(profile)
                write_report(report, report_html(*head, _until_stopped(pictures, bar, interrupt), numbers))
            elif report is not None:
                write_report(report, json.dumps(numbers, ensure_ascii=False, allow_nan=False) + "\n")
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                for picture in _until_stopped(pictures, bar, interrupt):
                    save_picture(picture, folder / f"{picture.key}.png")
        if interrupt.exit_code:
            say(err, "Stopped: pictures are missing.", style="yellow")
        written = [str(path) for path in (report, folder) if path is not None]
        say(err, f"Written: {', '.join(written)}.")
        return interrupt.exit_code


def _until_stopped(pictures: Sequence[Picture], bar: Bar, interrupt: Interrupt) -> Iterator[Picture]:
    for picture in pictures:
        if interrupt():
            return
        yield picture
        bar.add()


def _layer_profiles(profiled: Profiled) -> list[LayerProfile]:
    from moeedge.analysis.profile import profile_layers, profile_steps

    if profiled.steps is None:
        return profile_layers(profiled.trace, profiled.layers)
    return profile_steps(profiled.trace, profiled.steps, profiled.layers, profiled.gamma or 0)


def _model_profile(profiled: Profiled) -> tuple[ModelProfile, int]:
    """The profile, and the exit code: after a signal it has the layers done until then."""
    from moeedge.analysis.model_profile import profile_model
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.console import say, stderr_console
    from moeedge.ui.progress import count_bar

    err = stderr_console()
    n_layers = len(profiled.trace.expert_layers())
    with Interrupt() as interrupt, count_bar(err, "profiling", "layers", n_layers) as bar:
        interrupt.arm()
        profile = profile_model(
            profiled.trace,
            profiled.layers,
            steps=profiled.steps,
            gamma=profiled.gamma,
            on_layer=lambda done: bar.update(completed=done),
            cancel=interrupt,
        )
    if interrupt.exit_code:
        say(err, f"Stopped: curves of {len(profile.curves)} of {n_layers} layers.", style="yellow")
    return profile, interrupt.exit_code
