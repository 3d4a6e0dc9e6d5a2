"""Times of the pieces of work of a step, in nanoseconds, for one model on one machine.

They follow from a machine's bandwidths and a model's sizes (`roofline_costs`), or from what `moeedge calibrate`
measured (`measured_costs`). Built-in machines are in sim/data/hardware.json, each constant with its source:

    {"name": "...", "gpu_bytes_per_s": ..., ..., "sources": {"gpu_bytes_per_s": "..."}}

Overheads of programs are in sim/data/programs.json and, for published systems, in sim/data/papers.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import InputError, require
from moeedge.lab.sim.model_shape import ModelShape, Side, entry_of, only_known, pick, read_data, read_json
from moeedge.policies.cost_model import CostModel, expert_seconds
from moeedge.scheduler.calibration import Calibration, measurement_files, parse_measurement

_COUNTED_TOKENS = 9  # of the counts for more than one token


def to_ns(seconds: float) -> int:
    return round(seconds * 1e9)


# calls of the counting device, and the constant of handoffs.json that each of them takes
_CALL_TIMES = {
    **dict.fromkeys(("gets", "sets"), "blocking_copy_s"),  # of pageable memory, with a synchronisation of its own
    **dict.fromkeys(("gets_async", "sets_async"), "queued_copy_s"),  # of pinned memory, in the order of a queue
    "waits": "wait_s",  # from the end of the GPU's work until the host goes on
    "syncs": "sync_s",  # that find nothing to wait for
    "events": "event_s",
    "launches": "launch_s",  # of a graph, from the call to its first kernel
}


@dataclass(frozen=True, kw_only=True)
class Calls:
    """What the host asks of the GPU at one moment of a layer."""

    fixed_s: float  # apart from the bytes
    n_bytes: float  # up or down
    blocking: bool  # the bytes are of pageable memory


@dataclass(frozen=True, kw_only=True)
class Handoff:
    """How a program shares layers with the host, and what its calls cost as far as nothing else hides them."""

    one: dict[str, Calls]  # of one token, by moment: down, submit, join, up; hidden: while the GPU computes, no time
    nine: dict[str, Calls]  # of nine tokens; other numbers in proportion to the bytes
    cpu_region_s: float  # starting and joining the CPU's threads, for one graph
    token_divide_s: float  # dividing a block of one token: picking slots, gathering and scattering columns
    pageable_bytes_per_s: float
    cpu_regions: int = 1  # graphs that the CPU's threads compute per layer, at least one of them the missing experts
    divides: bool = False  # both sides compute a part of the same layer
    launched_ahead: bool = False  # the GPU's half starts before the host knows the layer's experts
    chunk_bytes: float = 0  # of the uploads that small copies to the GPU wait for; 0: nothing is uploaded meanwhile
    chunks_ahead: float = 0  # of them that such a copy waits for while uploads are under way

    def seconds(self, moment: str, n_tokens: int, link_bytes_per_s: float) -> float:
        """The time of one of the moments in a layer with so many tokens."""
        moments, scale = (self.one, 1.0) if n_tokens == 1 else (self.nine, n_tokens / _COUNTED_TOKENS)
        if moment not in moments:
            return 0.0
        calls = moments[moment]
        return calls.fixed_s + scale * calls.n_bytes / (
            self.pageable_bytes_per_s if calls.blocking else link_bytes_per_s
        )

    def divide_s(self, n_tokens: int) -> float:
        """Dividing a block between the sides; 0 where they do not share one."""
        return n_tokens * self.token_divide_s if self.divides else 0.0


def find_handoff(name: str, side: Side = "chosen") -> Handoff:
    """A program's handoff, with one side of the constants."""
    data = read_data("handoffs.json")
    values = only_known(pick(entry_of(data["programs"], name), side), Handoff)
    times = pick(data["calls"], side)

    def timed(counts: dict[str, float]) -> Calls:
        require(counts.keys() <= {*_CALL_TIMES, "bytes_up", "bytes_down"}, f"an unknown call among {', '.join(counts)}")
        fixed_s = sum(counts.get(call, 0) * times[constant] for call, constant in _CALL_TIMES.items())
        n_bytes = counts.get("bytes_up", 0) + counts.get("bytes_down", 0)
        return Calls(fixed_s=fixed_s, n_bytes=n_bytes, blocking=bool({"gets", "sets"} & counts.keys()))

    for tokens in ("one", "nine"):
        values[tokens] = {moment: timed(counts) for moment, counts in values[tokens].items()}
    return Handoff(
        cpu_region_s=times["cpu_region_s"],
        token_divide_s=times["divide_s"],
        pageable_bytes_per_s=times["pageable_bytes_per_s"],
        **values,
    )


TOKENS_MAX = 256  # of one expert: where the curves end
_EXPERT_TENSORS = 3  # gate, up, down
_CPU_ONLY = ":cpu"  # after the name of a machine
_DENSE_TENSORS = 9  # four of attention and two norms of it, two norms of the layer, the router
NsArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """Bandwidths that programs reach, not those of the data sheet; the data file names their sources."""

    name: str
    gpu_bytes_per_s: float
    gpu_flops: float
    cpu_bytes_per_s: float
    cpu_flops: float
    link_bytes_per_s: float
    link_latency_s: float  # of one transfer of any size
    layer_overhead_s: float  # of a layer's launches, in addition to its memory traffic
    sync_s: float  # handing a layer's hidden states to the CPU and back
    has_gpu: bool = True

    def __post_init__(self) -> None:
        for name in ("gpu_bytes_per_s", "gpu_flops", "cpu_bytes_per_s", "cpu_flops", "link_bytes_per_s"):
            require(getattr(self, name) > 0, f"{name} must be > 0")
        for name in ("link_latency_s", "layer_overhead_s", "sync_s"):
            require(getattr(self, name) >= 0, f"{name} must be >= 0")


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Overheads of the program around a policy; the defaults are those of bandwidths and operations alone."""

    layer_overhead_s: float = 0.0  # of every layer of the target, in addition to the hardware's own
    draft_layer_overhead_s: float = 0.0  # the same of the draft model
    expert_overhead_s: float = 0.0  # of every expert of a layer, used or not: a loop over them
    transfer_factor: float = 1.0  # time of a transfer over that of its bytes
    whole_layers: bool = True  # layer offload moves all experts of a layer, not only those in use
    dense_travels: bool = False  # layer offload moves attention and the rest of a layer, too
    head_travels: bool = False  # layer offload moves the output matrix, too, which comes after the last layer
    tensor_s: float = 0.0  # of every tensor that layer offload moves, in addition to its bytes
    schedule_s: float = 0.0  # observing and planning, per step
    handoff: Handoff | None = None  # of blocks that the host has a part in; None: the hardware's `sync_s`
    block_s: float = 0.0  # launches of a layer's experts, which are part of the hardware's `layer_overhead_s`
    tile_s: float = 0.0  # of every expert in a table that is multiplied with several tokens, used or not
    reread: float = 0.0  # share of an expert that the device reads again for each token after the first
    link_interference: float = 0.0  # share of the link's rate that uploads take from the CPU's


@dataclass(frozen=True, eq=False)
class StepCosts:
    """Nanoseconds of each piece of work. Curves are indexed by the tokens that an expert serves; [0] is 0."""

    cpu_ns: NsArray  # [TOKENS_MAX + 1], an expert on the CPU
    device_ns: NsArray  # [TOKENS_MAX + 1], an expert on the device
    block_ns: int  # of a block that the device computes at least in part
    sync_ns: int  # of a block that CPU and device share
    transfer_ns: int  # an expert to the device, without the latency
    demand_ns: int  # the same while the computation waits for it
    latency_ns: int  # of a transfer
    dense_ns: int  # a layer without its experts
    head_ns: int  # the output matrix, once per step
    draft_ns: int  # a token of the draft model
    schedule_ns: int  # observing and planning, per step
    dense_demand_ns: int = 0  # the rest of an absent layer, moved on demand
    head_demand_ns: int = 0  # the output matrix, moved on demand, once per step
    whole_layers: bool = True  # see Framework
    handoff: Handoff | None = None  # see Framework
    link_bytes_per_s: float = 1.0  # of the handoff's copies
    tile_ns: float = 0.0  # see Framework
    n_layouts: int = 1  # of experts, each with a table of its own
    cpu_bytes_per_s: float = math.inf
    link_interference: float = 0.0  # see Framework

    @property
    def busy_link_factor(self) -> float:
        """Of the CPU's time while uploads are under way."""
        if self.link_interference == 0:
            return 1.0
        taken = self.link_interference * min(self.link_bytes_per_s, self.cpu_bytes_per_s / 2)
        return self.cpu_bytes_per_s / (self.cpu_bytes_per_s - taken)

    def handoff_ns(self, moment: str, n_tokens: int) -> int:
        assert self.handoff is not None
        return to_ns(self.handoff.seconds(moment, n_tokens, self.link_bytes_per_s))

    def with_link(self, factor: float) -> StepCosts:
        """The same with a link that is `factor` times as fast."""
        scaled = ("transfer_ns", "demand_ns", "dense_demand_ns", "head_demand_ns")
        slower = {name: round(getattr(self, name) / factor) for name in scaled}
        return replace(self, **slower, link_bytes_per_s=self.link_bytes_per_s * factor)

    def cost_model(self, cap: int) -> CostModel:
        """The costs that a policy's balancer gets, in seconds.

        The shares r_c and r_g, which a warm-up measures, are straight lines: half of the work each at tau = 0, the
        CPU has all at K.
        """
        share = np.linspace(0.0, 1.0, cap + 1)
        return CostModel(
            cpu_expert_s=self.cpu_ns[:17].astype(np.float64) * 1e-9,
            device_expert_s=self.device_ns[:17].astype(np.float64) * 1e-9,
            transfer_expert_s=(self.transfer_ns + self.latency_ns) * 1e-9,
            draft_token_s=self.draft_ns * 1e-9,
            block_overhead_s=self.block_ns * 1e-9,
            layer_rest_s=self.dense_ns * 1e-9,
            r_c=0.5 + 0.5 * share,
            r_g=0.5 * (1 - share),
        )


def builtin_hardware(side: Side = "chosen") -> dict[str, HardwareSpec]:
    """The machines of sim/data/hardware.json by name."""
    table = read_data("hardware.json")["hardware"]
    return {
        name: HardwareSpec(name=name, **only_known(pick(entry_of(table, name), side), HardwareSpec)) for name in table
    }


def find_hardware(text: str, side: Side = "chosen") -> HardwareSpec:
    """A built-in machine, or one from a JSON file of the same fields; with ":cpu" after it, without its GPU.

    Raises InputError for anything else.
    """
    if text.endswith(_CPU_ONLY):  # the CPU computes all; a layer starts as many threads as it launched kernels
        machine = find_hardware(text.removesuffix(_CPU_ONLY), side)
        rates = {"gpu_bytes_per_s": machine.cpu_bytes_per_s, "gpu_flops": machine.cpu_flops}
        return replace(machine, name=text, **rates, sync_s=0.0, has_gpu=False)
    known = builtin_hardware(side)
    if text in known:
        return known[text]
    if not text.endswith(".json"):
        hint = f"Choose from {', '.join(known)}, or give a file that ends in .json."
        raise InputError(f"Unknown hardware '{text}'.", hint)
    path = Path(text)
    entry: dict[str, Any] = {"name": path.stem} | read_json(path)
    try:
        return HardwareSpec(**only_known(pick(entry, side), HardwareSpec))
    except (TypeError, ValueError) as error:
        raise InputError(f"{path} describes no hardware: {error}.", "Format: docs/lab/simulation.md.") from None


def program_of(policy: str, side: Side = "chosen") -> Framework:
    """The overheads of the program that runs a policy: this engine, llama.cpp, or that of a published system."""
    data = read_data("programs.json")
    name = data["policies"].get(policy, data["otherwise"])
    values = only_known(pick(entry_of(data["programs"], name), side), Framework)
    if values.get("handoff") is not None:
        values["handoff"] = find_handoff(values["handoff"], side)
    return Framework(**values)


def roofline_costs(hardware: HardwareSpec, shape: ModelShape, framework: Framework | None = None) -> StepCosts:
    """Costs from sizes: the longer of bytes over bandwidth and operations over speed, plus stated overheads."""
    framework = framework or Framework()
    if not hardware.has_gpu:
        framework = replace(framework, handoff=None, block_s=0.0, tile_s=0.0, reread=0.0)
    tokens = np.arange(TOKENS_MAX + 1)

    def curve(bytes_per_s: float, flops: float, reread: float = 0.0) -> NsArray:
        n_bytes = shape.expert_bytes * (1 + reread * np.maximum(tokens - 1, 0))
        times = np.maximum(n_bytes / bytes_per_s, tokens * shape.expert_flops / flops)
        times[0] = 0.0
        rounded: NsArray = np.rint(times * 1e9).astype(np.int64)
        return rounded

    overhead_s = hardware.layer_overhead_s + framework.layer_overhead_s - framework.block_s
    overhead_s += shape.n_experts * framework.expert_overhead_s
    draft_s = 0.0
    if shape.draft is not None:
        draft_layer_s = hardware.layer_overhead_s + framework.draft_layer_overhead_s
        draft_s = shape.draft.bytes / hardware.gpu_bytes_per_s + shape.draft.n_layers * draft_layer_s
    link_s = framework.transfer_factor / hardware.link_bytes_per_s  # per byte
    transfer_s = shape.expert_bytes * link_s
    dense_travel_s = shape.dense_layer_bytes * link_s + _DENSE_TENSORS * framework.tensor_s
    head_travel_s = shape.head_bytes * link_s + framework.tensor_s
    return StepCosts(
        cpu_ns=curve(hardware.cpu_bytes_per_s, hardware.cpu_flops),
        device_ns=curve(hardware.gpu_bytes_per_s, hardware.gpu_flops, framework.reread),
        block_ns=to_ns(framework.block_s),
        sync_ns=to_ns(hardware.sync_s) if framework.handoff is None else 0,
        transfer_ns=to_ns(transfer_s),
        demand_ns=to_ns(transfer_s + _EXPERT_TENSORS * framework.tensor_s),
        latency_ns=to_ns(hardware.link_latency_s),
        dense_ns=to_ns(shape.dense_layer_bytes / hardware.gpu_bytes_per_s + overhead_s),
        head_ns=to_ns(shape.head_bytes / hardware.gpu_bytes_per_s),
        draft_ns=to_ns(draft_s),
        schedule_ns=to_ns(framework.schedule_s),
        dense_demand_ns=to_ns(dense_travel_s) if framework.dense_travels else 0,
        head_demand_ns=to_ns(head_travel_s) if framework.head_travels else 0,
        whole_layers=framework.whole_layers,
        handoff=framework.handoff,
        link_bytes_per_s=hardware.link_bytes_per_s,
        tile_ns=framework.tile_s * 1e9,
        n_layouts=shape.n_layouts,
        cpu_bytes_per_s=hardware.cpu_bytes_per_s,
        link_interference=framework.link_interference,
    )


def measured_costs(units: CostModel, *, schedule_s: float = 0.0) -> StepCosts:
    """Costs from a calibration: the head is part of `layer_rest_s`, latencies are part of the times."""
    tokens = np.arange(TOKENS_MAX + 1.0)
    transfer_ns = to_ns(units.transfer_expert_s)
    return StepCosts(
        cpu_ns=np.rint(expert_seconds(units.cpu_expert_s, tokens) * 1e9).astype(np.int64),
        device_ns=np.rint(expert_seconds(units.device_expert_s, tokens) * 1e9).astype(np.int64),
        block_ns=to_ns(units.block_overhead_s),
        sync_ns=0,
        transfer_ns=transfer_ns,
        demand_ns=transfer_ns,
        latency_ns=0,
        dense_ns=to_ns(units.layer_rest_s),
        head_ns=0,
        draft_ns=to_ns(units.draft_token_s),
        schedule_ns=to_ns(schedule_s),
    )


def calibrated_costs(hardware: str, model: str) -> tuple[StepCosts, str] | None:
    """Costs and name of the calibration that `--hardware` asks for, None where it asks for other hardware.

    "this" is the newest calibration kept for a model file of this name; any other is named by its file. Raises
    InputError where "this" has none, and for a file without unit times.
    """
    if hardware == "this":
        files = measurement_files(model)
        if not files:
            raise InputError(f"No calibration is kept for {model}.", f"Run moeedge calibrate -m {model} first.")
        path = files[-1]
    else:
        path = Path(hardware)
        if path.suffix != ".json" or not path.exists() or "units" not in read_json(path):
            return None
    try:
        calibration = parse_measurement(Calibration, path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a calibration: {error}.", "Write one with moeedge calibrate.") from None
    if calibration.units is None:
        raise InputError(
            f"{path} has no times of experts, because no layer was shared between CPU and device.",
            "Run moeedge calibrate with a larger --cache-ratio.",
        )
    return measured_costs(calibration.units), path.stem
