"""The sessions of a benchmark, opened in passes: which of them are open at once, and on which target.

Stock modes on the shared target stay open, because every pass and the output check need the reference. Modes that fill
a device (expert caches, whole layers) are open at once if they fit together; otherwise they come one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType

from moeedge.bench.config import BenchMode, mode_config
from moeedge.bench.harness import BenchArm, open_arm, open_arms
from moeedge.bench.passes import Pass, caches_fit, largest_cache, layers_fit, split_passes
from moeedge.bench.whole_layers import (
    DeviceUse,
    Split,
    SplitPlanner,
    describe,
    layers_host_bytes,
    load_whole_layers,
    missing_reason,
    session_use,
)
from moeedge.engine.layer_search import has_choice, open_session
from moeedge.engine.loading import host_bytes
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.hardware.devices import ResolvedDevice
from moeedge.hardware.memory import available_memory, fits
from moeedge.llama.model import Model
from moeedge.notifications import Notification
from moeedge.units import format_bytes

Report = Callable[[Iterable[str]], None]


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
            modes = [mode for mode in self._modes if self._can_run(mode)]
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def measured(self, mode: BenchMode) -> BenchArm:
        """The arm that was measured; its session may be closed, but tells what it had."""
        return next(arm for current in self.passes for arm in current.arms if arm.mode == mode)

    @contextmanager
    def recorder(self, mode: BenchMode) -> Iterator[BenchArm]:
        """An arm that sees the routing of all layers of the shared target, as `mode` has it.

        It is the mode's own if that is open. One that has layers on the GPU sees nothing of these: then, a session on
        the shared target without a cache.
        """
        opened = self._first if len(self.passes) == 1 else {}
        with ExitStack() as stack:
            if mode in self._divided:
                (arm,) = open_arms(self._base, [replace(mode, cache_ratio=0.0)], self._models, stack)
                yield arm
            else:
                yield opened[mode.label] if mode.label in opened else self._open([mode], stack)[mode.label]

    def _can_run(self, mode: BenchMode) -> bool:
        reason = missing_reason(mode, self._device, self._models[0])
        if reason is not None:
            self._left_out.append(f"{mode.label} is left out: {reason}.")
        return reason is None

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
            self._report([describe(mode, split, budget_bytes)])
            kept.append(mode)
        return kept

    def _open(self, modes: Sequence[BenchMode], stack: ExitStack) -> dict[str, BenchArm]:
        """Opens sessions; `stack` closes them. Returns their arms by label, in the order of `modes`."""
        divided = [mode for mode in modes if mode in self._divided]
        shared = [mode for mode in modes if mode.method == "shared" and mode not in divided]
        arms = open_arms(self._base, shared, self._models, stack, notify=self._notify)
        arms += [self._open_divided(mode, stack) for mode in divided]
        self._uses += [
            (arm.mode, session_use(arm.session, self._device)) for arm in arms if arm.mode.engine == "moeedge"
        ]
        targets: dict[int, Model] = {}
        for mode in modes:
            if mode.method == "ncmoe":
                arms.append(self._open_layers(mode, targets, stack))
        for arm in arms:
            self._report(arm.session.info.notes)
        by_label = {arm.mode.label: arm for arm in arms}
        return {mode.label: by_label[mode.label] for mode in modes}

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
        """Whether GPU and host memory have room for the targets of these modes at once, next to all that is open."""
        splits = [self._splits[mode.label] for mode in modes]
        sizes = {split.layers.n_cpu_moe for split in splits}
        n_bytes = sum(layers_host_bytes(self._base, self._device, n_cpu_moe) for n_cpu_moe in sizes)
        return fits(n_bytes) and layers_fit([split.use for split in splits], self._device)

    def _open_divided(self, mode: BenchMode, stack: ExitStack) -> BenchArm:
        draft = self._models[1] if mode.drafts else None
        return open_arm(
            self._base, mode, stack, opened=open_session, own_target=True, draft_model=draft, notify=self._notify
        )

    def _notify(self, note: Notification) -> None:
        self._report([note])

    def _open_layers(self, mode: BenchMode, targets: dict[int, Model], stack: ExitStack) -> BenchArm:
        """Opens stock llama.cpp with whole layers; `targets` keeps the models by their n_cpu_moe."""
        n_cpu_moe = self._splits[mode.label].layers.n_cpu_moe
        if n_cpu_moe not in targets:
            targets[n_cpu_moe] = stack.enter_context(load_whole_layers(self._base, self._device, n_cpu_moe))
        return open_arm(
            self._base,
            mode,
            stack,
            own_target=True,
            model=targets[n_cpu_moe],
            draft_model=self._models[1],
            notify=self._notify,
        )
