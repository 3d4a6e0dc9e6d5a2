"""The sessions of a benchmark, opened in passes: which of them are open at once, and on which target.

Stock modes on the shared target stay open: every pass and the output check need the reference. Modes that fill a device
(expert caches, whole layers) are open at once if they fit together; otherwise each pass has one of them and the
reference, so that ratios stay those of neighbours in time. A model that is larger than the memory is measured mode by
mode (ArmsInTurn): a stock mode's page cache and our slots would each take the memory that the other needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from moeedge.bench import whole_layers
from moeedge.bench.config import MODES, REFERENCE, BenchMode, mode_config
from moeedge.bench.experiment import BenchArm, Work
from moeedge.bench.quality import OutputCheck, Perplexity
from moeedge.engine.layer_search import has_choice, open_session
from moeedge.engine.loading import host_bytes, load_draft, load_target
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import EngineError, InputError
from moeedge.hardware.devices import ResolvedDevice, read_memory
from moeedge.hardware.host import available_memory, fits
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.llama.model import Model
from moeedge.run import Run, rotated
from moeedge.units import format_bytes

# arms that take turns, their repetitions, and the place of the first of them among the modes of the pass
Turn = tuple[Sequence[BenchArm], Sequence[int], int]
IsDone = Callable[[BenchMode, int], bool]  # whether an interrupted run has measured a mode's repetition
# share of the free memory; the rest is for compute buffers and other programs
_USABLE = 0.8
NOTE = (
    "The model does not fit the memory, so modes are measured one after the other. Before each of them the model is "
    "loaded again; neither the page cache nor what earlier runs kept helps it."
)


def load_models(
    base: EngineConfig, modes: Sequence[BenchMode], stack: ExitStack, device: ResolvedDevice | None = None
) -> tuple[Model, Model | None]:
    """Loads the target, and the draft model if there is one and a mode uses it; `stack` closes them."""
    has_size = any(mode.cache_ratio is not None for mode in modes)
    # a model that fits a GPU is not left there entirely where modes ask for a cache
    target = stack.enter_context(load_target(base, device, whole_fits=False if has_size else None))
    has_draft = isinstance(base.draft, Path) and base.gamma > 0
    if not (has_draft and any(mode.drafts and not mode.source for mode in modes)):
        return target, None
    return target, stack.enter_context(load_draft(base, device))


def open_arm(
    base: EngineConfig,
    mode: BenchMode,
    stack: ExitStack,
    *,
    opened: Callable[..., Session] = Session.open,
    own_target: bool = False,
    **options: Any,
) -> BenchArm:
    """Opens the session of a mode by `opened` with its options; `stack` closes it. Errors name the mode."""
    try:
        session = stack.enter_context(opened(mode_config(base, mode), **options))
    except (InputError, EngineError) as error:
        raise type(error)(f"{mode.label} cannot run: {error.message}", error.hint) from error
    return BenchArm(mode, session, own_target)


@dataclass
class Pass:
    """Modes that take turns, and their works. `repeated` is the reference of an earlier pass: it gets no row."""

    modes: tuple[BenchMode, ...]
    repeated: str | None = None  # label of a mode
    works: Sequence[Work] = ()
    is_measured: bool = False  # entirely, or until it was cancelled or failed
    arms: list[BenchArm] = field(default_factory=list)
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)  # fields of Setup, by label
    perplexity: dict[str, Perplexity] = field(default_factory=dict)  # of modes with our backend and drafts, by label
    checks: dict[str, OutputCheck] = field(default_factory=dict)  # of modes with their own target, by label


def split_passes(modes: Sequence[BenchMode], *, together: bool, apart: Sequence[BenchMode] = ()) -> list[Pass]:
    """Returns one pass, or one per swept mode where their caches do not fit together, and one per mode of `apart`."""
    alone = [] if together else [mode for mode in modes if mode.is_swept][1:]
    first = [mode for mode in modes if mode not in alone]
    reference = [mode for mode in modes if mode.name == REFERENCE]
    later = [Pass((*reference, mode), REFERENCE if reference else None) for mode in (*alone, *apart)]
    return [Pass(tuple(first)), *later] if first else later


@dataclass(kw_only=True, eq=False)
class _Sessions:
    """Base of both kinds of arms. Raises InputError on entering where no mode can run."""

    base: EngineConfig  # with the context size of the run
    modes: Sequence[BenchMode]
    run: Run  # shows sentences
    passes: list[Pass] = field(default_factory=list)
    resources: ExitStack = field(default_factory=ExitStack)

    def __exit__(self, *error: object) -> None:
        self.resources.close()


@dataclass(kw_only=True, eq=False)
class Arms(_Sessions):
    """A context manager: entering opens the arms of the first pass and plans the others."""

    device: ResolvedDevice
    models: tuple[Model, Model | None]  # the target that the modes share, and the draft model
    uses: list[tuple[BenchMode, whole_layers.DeviceUse]] = field(default_factory=list)  # of our modes, once open
    splits: dict[str, whole_layers.Split] = field(default_factory=dict)  # by label
    divided: Sequence[BenchMode] = ()  # modes with a target of their own, whose layers they choose
    always: dict[str, BenchArm] = field(default_factory=dict)  # stock modes on the shared target, by label
    first: dict[str, BenchArm] = field(default_factory=dict)  # the other arms of the first pass
    first_resources: ExitStack = field(default_factory=ExitStack)
    left_out: list[str] = field(default_factory=list)  # a sentence for each mode that cannot run

    def __enter__(self) -> Arms:
        counts = dict.fromkeys(mode.n_parallel for mode in self.modes)
        with ExitStack() as stack:
            if any(counts):  # texts together: the modes of one number take turns, since speed-ups compare them
                self.always = self._open([MODES[REFERENCE]], stack)
                self.passes = [Pass(tuple(mode for mode in self.modes if mode.n_parallel == n)) for n in counts]
                self.resources = stack.pop_all()
                return self
            reasons = {mode: whole_layers.missing_reason(mode, self.device, self.models[0]) for mode in self.modes}
            self.left_out = [f"{mode.label} is left out: {reason}." for mode, reason in reasons.items() if reason]
            modes = [mode for mode, reason in reasons.items() if reason is None]
            layers = [mode for mode in modes if mode.method == "ncmoe"]
            shared = [mode for mode in modes if mode.method == "shared"]
            self.divided = self._own_targets(shared)
            self.always = self._open([mode for mode in shared if mode.engine == "stock"], stack)
            self.first_resources = stack.enter_context(ExitStack())
            together = self._open_caches([mode for mode in shared if mode.engine == "moeedge"])
            apart = layers = self._plan_layers(layers)
            if layers and together and self._layers_fit():
                self.first |= self._open(layers, self.first_resources)
                apart = []
            elif layers:
                self.run.say("Whole layers and cache do not fit the memory at once: they are measured one by one.")
            at_once = [mode for mode in modes if mode in (*shared, *layers) and mode not in apart]
            self.passes = split_passes(at_once, together=together, apart=apart)
            if not self.passes:
                raise InputError("No mode is left to measure.", " ".join(self.left_out))
            for note in self.left_out:
                self.run.say(note)
            self.resources = stack.pop_all()
        return self

    @property
    def reference(self) -> BenchArm:
        """Stock llama.cpp on the shared target."""
        return self.always[REFERENCE]

    @contextmanager
    def opened(self, current: Pass) -> Iterator[None]:
        """Opens the arms of a pass, and closes them unless they are those of the only pass."""
        with ExitStack() as stack:
            arms = self.always | (self.first if current is self.passes[0] else {})
            arms |= self._open([mode for mode in current.modes if mode.label not in arms], stack)
            current.arms = [arms[mode.label] for mode in current.modes]
            yield
        if len(self.passes) > 1:
            self.first_resources.close()

    def turns(self, current: Pass, repetitions: int, is_done: IsDone) -> Generator[Turn]:
        """All arms take turns in all repetitions."""
        yield current.arms, range(repetitions), 0

    def _open_caches(self, modes: Sequence[BenchMode]) -> bool:
        """Opens our modes for the first pass if all of their caches fit the device; returns whether they do."""
        swept = [mode for mode in modes if mode.is_swept]
        self.first |= self._open([mode for mode in modes if not mode.is_swept], self.first_resources)
        if not swept:
            return True
        # a size that the engine chooses counts as the largest
        largest = max(swept, key=lambda mode: 2.0 if mode.cache_ratio is None else mode.cache_ratio)
        others = [mode for mode in swept if mode is not largest]
        with ExitStack() as probing:
            probe = self._open([largest], probing)
            stats = probe[largest.label].session.placement_stats()
            if others and stats is not None:
                total = expert_bytes(expert_tensors(self.base.model)[0])
                sizes = (stats.pool_bytes if mode.cache_ratio is None else mode.cache_ratio * total for mode in others)
                if sum(sizes) > self._usable_bytes(stats.pool_bytes):
                    self.run.say("The caches do not fit the device at once: they are measured one after the other.")
                    return False
            self.first |= probe | self._open(others, probing)
            self.first_resources.enter_context(probing.pop_all())
        return True

    def _plan_layers(self, modes: Sequence[BenchMode]) -> list[BenchMode]:
        """Chooses the layers of each mode; returns the modes that fit the memory to fill."""
        if not modes:
            return []
        planner = whole_layers.SplitPlanner(self.base, self.device, self.models[1])
        for mode in modes:
            budget_bytes = planner.budget_bytes(mode, self.uses)
            room, split = f"of the {format_bytes(budget_bytes)} to fill", planner.for_budget(mode, budget_bytes)
            if split is None:
                left_out = f"without experts it takes {format_bytes(planner.least_bytes(mode))} {room}"
            elif not fits(n_bytes := whole_layers.layers_host_bytes(self.base, self.device, split.layers)):
                free = f"next to the other modes {format_bytes(available_memory())} are free"
                left_out = f"its own weights take {format_bytes(n_bytes)} of RAM, and {free}"
            else:
                self.splits[mode.label] = split
                how = f"{split.layers.n_whole} whole layers on the GPU (--n-cpu-moe {split.layers.n_cpu_moe})"
                self.run.say(f"{mode.label} has {how}: {format_bytes(split.use.total_bytes)} {room}.")
                continue
            self.left_out.append(f"{mode.label} is left out: {left_out}.")
        return [mode for mode in modes if mode.label in self.splits]

    def _open(self, modes: Sequence[BenchMode], stack: ExitStack) -> dict[str, BenchArm]:
        """Opens sessions, those with targets of their own last; `stack` closes them. Returns their arms by label."""
        arms: dict[str, BenchArm] = {}

        @cache
        def target(n_cpu_moe: int) -> Model:
            return stack.enter_context(whole_layers.load_whole_layers(self.base, self.device, n_cpu_moe))

        for mode in sorted(modes, key=lambda mode: (mode.method == "ncmoe", mode in self.divided)):
            model, draft = self.models
            how: dict[str, Any] = {"model": model, "draft_model": draft}
            if mode in self.divided:
                how = {"opened": open_session, "own_target": True, "draft_model": draft if mode.drafts else None}
            elif mode.method == "ncmoe":
                how |= {"model": target(self.splits[mode.label].layers.n_cpu_moe), "own_target": True}
            arm = arms[mode.label] = open_arm(self.base, mode, stack, run=self.run, **how)
            if mode.engine == "moeedge":
                self.uses.append((mode, whole_layers.session_use(arm.session, self.device)))
        for arm in arms.values():
            for note in arm.session.info.notes:
                self.run.say(note)
        return {mode.label: arms[mode.label] for mode in modes}

    def _own_targets(self, modes: Sequence[BenchMode]) -> list[BenchMode]:
        """The modes that choose layers for the GPU and load targets of their own; none where host memory lacks room."""
        ours = [mode for mode in modes if mode.engine == "moeedge" and self.models[0].host_expert_layers]
        choosing = [mode for mode in ours if has_choice(mode_config(self.base, mode), self.device)]
        n_bytes = len(choosing) * host_bytes(self.base, self.device)
        if fits(n_bytes):
            return choosing
        for mode in choosing:
            self.run.say(
                f"{mode.label} keeps no entire layers on the GPU: weights of its own could take another "
                f"{format_bytes(n_bytes // len(choosing))} of RAM, and {format_bytes(available_memory())} are free."
            )
        return []

    def _layers_fit(self) -> bool:
        """Whether GPU and host memory have room for the targets of all splits at once, next to all that is open."""
        targets = {split.layers for split in self.splits.values()}
        n_bytes = sum(whole_layers.layers_host_bytes(self.base, self.device, layers) for layers in targets)
        n_device_bytes = sum(split.use.total_bytes for split in self.splits.values())
        return fits(n_bytes) and n_device_bytes <= self._usable_bytes()

    def _usable_bytes(self, pool_bytes: int = 0) -> float:
        """Of what is free on the device next to a cache of `pool_bytes`; 0 where its driver reports no memory."""
        if self.device.kind == "emulated":
            return _USABLE * available_memory()
        reading = read_memory(self.device, pool_bytes=pool_bytes)
        return 0.0 if reading is None else _USABLE * reading.free_bytes


@dataclass(kw_only=True, eq=False)
class ArmsInTurn(_Sessions):
    """A context manager with the interface of `Arms`: one pass, of whose arms only one is open at a time."""

    measured: dict[str, BenchArm] = field(default_factory=dict)  # as they were opened last

    def __enter__(self) -> ArmsInTurn:
        ram = "on" if self.base.ram == "auto" else self.base.ram  # what the run begins with, whatever is free later
        placement = replace(self.base.placement, warm_start=False)
        self.base = replace(self.base, ram=ram, placement=placement)
        modes = [mode for mode in self.modes if mode.method == "shared"]
        left_out = [mode.label for mode in self.modes if mode not in modes]
        reason = "it has no meaning where experts are loaded into RAM"
        for note in (NOTE, *(f"{label} is left out: {reason}." for label in left_out)):
            self.run.say(note)
        if not modes:
            raise InputError("No mode is left to measure.", "Choose from stock-ar, stock-sd, moeedge and moeedge-ar.")
        modes.sort(key=lambda mode: mode.label != REFERENCE)  # the others go on from its answers
        self.passes = [Pass(tuple(modes))]
        return self

    @cached_property
    def reference(self) -> BenchArm:
        """Stock llama.cpp, opened again: for logits, when nothing is measured any more."""
        mode = next(mode for mode in self.passes[0].modes if mode.label == REFERENCE)
        return self.resources.enter_context(self.open_alone(mode))

    @contextmanager
    def opened(self, current: Pass) -> Iterator[None]:
        """Nothing is opened for the entire pass."""
        yield
        current.arms = [self.measured[mode.label] for mode in current.modes if mode.label in self.measured]

    def turns(self, current: Pass, repetitions: int, is_done: IsDone) -> Generator[Turn]:
        """Opens and closes each mode in every repetition, in rotated order."""
        for repetition in range(repetitions):
            for place, mode in enumerate(rotated(current.modes, repetition)):
                # the last repetition opens every mode, for what its row says about it
                if repetition == repetitions - 1 or not is_done(mode, repetition):
                    with self.open_alone(mode) as arm:
                        yield [arm], [repetition], place

    @contextmanager
    def open_alone(self, mode: BenchMode) -> Iterator[BenchArm]:
        """A mode with the memory to itself."""
        _drop_page_cache(self.base)
        with ExitStack() as stack:
            arm = self.measured[mode.label] = open_arm(self.base, mode, stack, run=self.run)
            for note in arm.session.info.notes:
                self.run.say(note)
            yield arm


def _drop_page_cache(config: EngineConfig) -> None:
    """Takes the model's files out of the page cache, where the system can; nothing may map them."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in expert_tensors(config.model)[1]:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
