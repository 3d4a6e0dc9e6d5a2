"""The sessions of a benchmark, opened in passes: which of them are open at once, and on which target.

Stock modes on the shared target stay open, because every pass and the output check need the reference. Modes that fill
a device (expert caches, whole layers) are open at once if they fit together. Otherwise the first pass has the stock
modes and one cache, and every later pass has one more cache, or a mode with whole layers, and the reference once more:
ratios stay those of neighbours in time.

A model that is larger than the memory is measured mode by mode (ArmsInTurn). Stock modes map the file and live from
the page cache, ours load experts into slots: open at once, each would take the memory that the other needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from moeedge.bench.config import REFERENCE, BenchMode, mode_config
from moeedge.bench.harness import BenchArm, open_arm
from moeedge.bench.output_check import OutputCheck
from moeedge.bench.perplexity import Perplexity
from moeedge.bench.records import ArmEnd
from moeedge.bench.samples import Sample
from moeedge.bench.whole_layers import (
    DeviceUse,
    Split,
    SplitPlanner,
    layers_host_bytes,
    load_whole_layers,
    missing_reason,
    session_use,
)
from moeedge.engine.layer_search import has_choice, open_session
from moeedge.engine.loading import host_bytes
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.hardware.devices import ResolvedDevice, read_memory
from moeedge.hardware.memory import available_memory, fits
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.llama.model import Model
from moeedge.units import format_bytes

Report = Callable[[Iterable[str]], None]
# share of the free memory; the rest is for compute buffers and other programs
_USABLE = 0.8
NOTE = (
    "The model does not fit the memory, so modes are measured one after the other. Before each of them the model is "
    "loaded again; neither the page cache nor what earlier runs kept helps it."
)


@dataclass
class Pass:
    """Modes that take turns, and their samples. `repeated` is the reference of an earlier pass: it gets no row."""

    modes: tuple[BenchMode, ...]
    repeated: str | None = None  # label of a mode
    arms: list[BenchArm] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)  # by test
    ends: dict[str, ArmEnd] = field(default_factory=dict)  # by label
    perplexity: dict[str, Perplexity] = field(default_factory=dict)  # of modes with our backend and drafts, by label
    checks: dict[str, OutputCheck] = field(default_factory=dict)  # of modes with their own target, by label


def split_passes(modes: Sequence[BenchMode], *, together: bool, apart: Sequence[BenchMode] = ()) -> list[Pass]:
    """Returns one pass, or one per swept mode where their caches do not fit the device together; none without modes.

    apart: further modes, each of which needs a pass of its own.
    """
    swept = [mode for mode in modes if mode.is_swept]
    later = list(apart)
    first = tuple(modes)
    if not together and len(swept) > 1:
        first = (*(mode for mode in modes if not mode.is_swept), swept[0])
        later = [*swept[1:], *apart]
    reference = tuple(mode for mode in modes if mode.name == REFERENCE)
    repeated = REFERENCE if reference else None
    passes = [Pass(first), *(Pass((*reference, mode), repeated) for mode in later)]
    return [current for current in passes if current.modes]


def largest_cache(modes: Sequence[BenchMode]) -> BenchMode:
    """Returns the swept mode with the largest cache; a size that the engine chooses counts as the largest."""
    return max(modes, key=lambda mode: 2.0 if mode.cache_ratio is None else mode.cache_ratio)


def caches_fit(probe: BenchArm, others: Sequence[BenchMode]) -> bool:
    """Returns whether the device has room for the caches of `others` next to that of `probe`, which is open.

    The emulated device is memory of this machine. A device whose driver reports no memory counts as full.
    """
    stats = probe.session.placement_stats()
    if stats is None:
        return True
    total = expert_bytes(expert_tensors(probe.session.model.path)[0])
    needed = sum(stats.pool_bytes if mode.cache_ratio is None else mode.cache_ratio * total for mode in others)
    if stats.device.startswith("emulated"):
        free_bytes = available_memory()
    elif stats.vram_used_bytes is not None and stats.vram_total_bytes is not None:
        free_bytes = stats.vram_total_bytes - stats.vram_used_bytes
    else:
        return False
    return needed <= _USABLE * free_bytes


class Arms:
    """A context manager: entering opens the arms of the first pass and plans the others.

    Raises InputError on entering where no mode can run.

    base: with the context size of the run. models: the target that the modes share, and the draft model or None.
    report: gets sentences for the user.
    """

    def __init__(
        self,
        base: EngineConfig,
        modes: Sequence[BenchMode],
        device: ResolvedDevice,
        models: tuple[Model, Model | None],
        report: Report,
    ) -> None:
        self._base = base
        self._modes = modes
        self._device = device
        self._models = models
        self._report = report
        self._uses: list[tuple[BenchMode, DeviceUse]] = []  # of our modes, as they were opened
        self._splits: dict[str, Split] = {}  # by label
        self._divided: list[BenchMode] = []  # modes with a target of their own, whose layers they choose
        self._stock: dict[str, BenchArm] = {}
        self._first: dict[str, BenchArm] = {}  # the other arms of the first pass
        self._first_resources = ExitStack()
        self._resources = ExitStack()
        self._left_out: list[str] = []  # a sentence for each mode that cannot run
        self.passes: list[Pass] = []

    def __enter__(self) -> Arms:
        with ExitStack() as stack:
            reasons = {mode: missing_reason(mode, self._device, self._models[0]) for mode in self._modes}
            self._left_out = [f"{mode.label} is left out: {reason}." for mode, reason in reasons.items() if reason]
            modes = [mode for mode, reason in reasons.items() if reason is None]
            layers = [mode for mode in modes if mode.method == "ncmoe"]
            shared = [mode for mode in modes if mode.method == "shared"]
            self._divided = self._own_targets(shared)
            self._stock = self._open([mode for mode in shared if mode.engine == "stock"], stack)
            self._first_resources = stack.enter_context(ExitStack())
            together = self._open_caches([mode for mode in shared if mode.engine == "moeedge"])
            layers = self._plan_layers(layers)
            apart = layers
            if layers and together and self._layers_fit(layers):
                self._first |= self._open(layers, self._first_resources)
                apart = []
            elif layers:
                self._report(["Whole layers and cache do not fit the memory at once: they are measured one by one."])
            kept = [mode for mode in modes if mode in shared or (mode in layers and mode not in apart)]
            self.passes = split_passes(kept, together=together, apart=apart)
            if not self.passes:
                raise InputError("No mode is left to measure.", " ".join(self._left_out))
            self._report(self._left_out)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()

    def stock(self, label: str) -> BenchArm:
        """The arm of a stock mode on the shared target."""
        return self._stock[label]

    @contextmanager
    def opened(self, current: Pass) -> Iterator[None]:
        """Opens the arms of a pass, and closes them unless they are those of the only pass."""
        with ExitStack() as stack:
            opened = self._stock | (self._first if current is self.passes[0] else {})
            opened |= self._open([mode for mode in current.modes if mode.label not in opened], stack)
            current.arms = [opened[mode.label] for mode in current.modes]
            yield
        if len(self.passes) > 1:
            self._first_resources.close()

    def _open_caches(self, modes: Sequence[BenchMode]) -> bool:
        """Opens our modes for the first pass if all of their caches fit the device; returns whether they do."""
        swept = [mode for mode in modes if mode.is_swept]
        self._first |= self._open([mode for mode in modes if mode not in swept], self._first_resources)
        if not swept:
            return True
        largest = largest_cache(swept)
        others = [mode for mode in swept if mode is not largest]
        with ExitStack() as probing:
            probe = self._open([largest], probing)
            if others and not caches_fit(probe[largest.label], others):
                self._report(["The caches do not fit the device at once: they are measured one after the other."])
                return False
            self._first |= probe | self._open(others, probing)
            self._first_resources.enter_context(probing.pop_all())
        return True

    def _plan_layers(self, modes: Sequence[BenchMode]) -> list[BenchMode]:
        """Chooses the layers of each mode; returns the modes that fit the memory to fill."""
        if not modes:
            return []
        planner = SplitPlanner(self._base, self._device, self._models[1])
        kept = []
        for mode in modes:
            budget_bytes = planner.budget_bytes(mode, self._uses)
            split = planner.for_budget(mode, budget_bytes)
            if split is None:
                needed, room = format_bytes(planner.least_bytes(mode)), format_bytes(budget_bytes)
                self._left_out.append(
                    f"{mode.label} is left out: without experts it takes {needed} of the {room} to fill."
                )
                continue
            n_bytes = layers_host_bytes(self._base, self._device, split.layers.n_cpu_moe)
            if not fits(n_bytes):
                self._left_out.append(
                    f"{mode.label} is left out: its own weights take {format_bytes(n_bytes)} of RAM, and next to the "
                    f"other modes {format_bytes(available_memory())} are free."
                )
                continue
            self._splits[mode.label] = split
            layers, taken = split.layers, format_bytes(split.use.total_bytes)
            self._report([
                f"{mode.label} has {layers.n_whole} whole layers on the GPU (--n-cpu-moe {layers.n_cpu_moe}): "
                f"{taken} of the {format_bytes(budget_bytes)} to fill."
            ])  # fmt: skip
            kept.append(mode)
        return kept

    def _open(self, modes: Sequence[BenchMode], stack: ExitStack) -> dict[str, BenchArm]:
        """Opens sessions, those with targets of their own last; `stack` closes them. Returns their arms by label."""
        targets: dict[int, Model] = {}  # by n_cpu_moe
        opened: dict[str, BenchArm] = {}
        for mode in sorted(modes, key=lambda mode: (mode.method == "ncmoe", mode in self._divided)):
            model, draft = self._models
            how: dict[str, Any] = {"model": model, "draft_model": draft}
            if mode in self._divided:
                draft = draft if mode.drafts else None
                how = {"opened": open_session, "own_target": True, "draft_model": draft}
            elif mode.method == "ncmoe":
                n_cpu_moe = self._splits[mode.label].layers.n_cpu_moe
                if n_cpu_moe not in targets:
                    targets[n_cpu_moe] = stack.enter_context(load_whole_layers(self._base, self._device, n_cpu_moe))
                how |= {"model": targets[n_cpu_moe], "own_target": True}
            arm = opened[mode.label] = open_arm(
                self._base, mode, stack, notify=lambda note: self._report([note]), **how
            )
            if mode.engine == "moeedge":
                self._uses.append((mode, session_use(arm.session, self._device)))
        for arm in opened.values():
            self._report(arm.session.info.notes)
        return {mode.label: opened[mode.label] for mode in modes}

    def _own_targets(self, modes: Sequence[BenchMode]) -> list[BenchMode]:
        """The modes that choose themselves which layers are on the GPU, for which each loads a target of its own.

        None where host memory lacks room for these targets next to the shared one.
        """
        found = [
            mode
            for mode in modes
            if mode.engine == "moeedge"
            and self._models[0].host_expert_layers
            and has_choice(mode_config(self._base, mode), self._device)
        ]
        n_bytes = len(found) * host_bytes(self._base, self._device)
        if fits(n_bytes):
            return found
        self._report(
            f"{mode.label} keeps no entire layers on the GPU: weights of its own could take another "
            f"{format_bytes(n_bytes // len(found))} of RAM, and {format_bytes(available_memory())} are free."
            for mode in found
        )
        return []

    def _layers_fit(self, modes: Sequence[BenchMode]) -> bool:
        """Whether GPU and host memory have room for the targets of these modes at once, next to all that is open.

        A GPU whose driver reports no memory counts as full.
        """
        splits = [self._splits[mode.label] for mode in modes]
        sizes = {split.layers.n_cpu_moe for split in splits}
        n_bytes = sum(layers_host_bytes(self._base, self._device, n_cpu_moe) for n_cpu_moe in sizes)
        reading = read_memory(self._device)
        free_bytes = 0 if reading is None else reading.free_bytes
        return fits(n_bytes) and sum(split.use.total_bytes for split in splits) <= _USABLE * free_bytes


class ArmsInTurn:
    """A context manager with the interface of `Arms`: one pass, of whose arms only one is open at a time.

    base: with the context size of the run. report: gets sentences for the user.
    Raises InputError on entering where no mode can run.
    """

    def __init__(self, base: EngineConfig, modes: Sequence[BenchMode], report: Report) -> None:
        ram = "on" if base.ram == "auto" else base.ram  # what the run begins with, whatever is free later
        self._base = replace(base, ram=ram, placement=replace(base.placement, warm_start=False))
        self._modes = modes
        self._report = report
        self._measured: dict[str, BenchArm] = {}  # as they were opened last
        self._reference: BenchArm | None = None
        self._resources = ExitStack()
        self.passes: list[Pass] = []

    def __enter__(self) -> ArmsInTurn:
        kept = [mode for mode in self._modes if mode.method == "shared"]
        left_out = [mode.label for mode in self._modes if mode not in kept]
        reason = "it has no meaning where experts are loaded into RAM"
        self._report([NOTE, *(f"{label} is left out: {reason}." for label in left_out)])
        if not kept:
            raise InputError("No mode is left to measure.", "Choose from stock-ar, stock-sd, moeedge and moeedge-ar.")
        kept.sort(key=lambda mode: mode.label != REFERENCE)  # the others go on from its answers
        self.passes = [Pass(tuple(kept))]
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()

    def stock(self, label: str) -> BenchArm:
        """The reference, opened again: for logits, when nothing is measured any more."""
        if self._reference is None:
            mode = next(mode for mode in self.passes[0].modes if mode.label == label)
            self._reference = self._resources.enter_context(self.open_alone(mode))
        return self._reference

    @contextmanager
    def opened(self, current: Pass) -> Iterator[None]:
        """Nothing is opened for the entire pass."""
        yield
        current.arms = [self._measured[mode.label] for mode in current.modes if mode.label in self._measured]

    @contextmanager
    def open_alone(self, mode: BenchMode) -> Iterator[BenchArm]:
        """A mode with the memory to itself."""
        _drop_page_cache(self._base)
        with ExitStack() as stack:
            arm = self._measured[mode.label] = open_arm(
                self._base, mode, stack, notify=lambda note: self._report([note])
            )
            self._report(arm.session.info.notes)
            yield arm


def _drop_page_cache(config: EngineConfig) -> None:
    """Takes the model's files out of the page cache, where the system can; nothing may map them."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in expert_tensors(config.model)[1]:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
