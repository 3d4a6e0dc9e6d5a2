"""What it costs to hand a layer from the GPU to the host and its result back: counted calls times their times.

A layer of which the host computes a part, or whose ids the host must know, has four moments:

  down     the GPU has computed what the experts read: the host gets it, and knows the layer's experts
  submit   the host starts the GPU's half of a divided block, before it computes its own
  join     both halves are done: the host gets the GPU's columns
  up       the GPU gets the host's result, and goes on

sim/data/handoffs.json states the calls at each moment for every program, for one token and for nine, and the time of
each kind of call. docs/benchmarks/round-trips-0.6.0.json has the counts that the counting device of the tests recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moeedge.sim.constants import Side, pick
from moeedge.sim.model_shape import only_known, read_data

_COUNTED_TOKENS = 9  # of the counts for more than one token


@dataclass(frozen=True, kw_only=True)
class CallTimes:
    """Seconds of one call as far as nothing else hides them."""

    blocking_copy_s: float  # between pageable memory and the GPU, with its own synchronisation
    queued_copy_s: float  # between pinned memory and the GPU, in the order of a queue
    wait_s: float  # from the end of the GPU's work until the host goes on
    sync_s: float  # a synchronisation that finds nothing to wait for
    event_s: float  # recording an event, or making a queue wait for one
    launch_s: float  # a graph, from the call to its first kernel
    cpu_region_s: float  # starting and joining the CPU's threads, for one graph
    divide_s: float  # dividing a block of one token: picking slots, gathering and scattering columns
    pageable_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Calls:
    """What the host asks of the GPU at one moment of a layer; the names are those of the counting device."""

    gets: float = 0  # blocking
    sets: float = 0
    gets_async: float = 0
    sets_async: float = 0
    copies: float = 0  # within the device
    events: float = 0
    waits: float = 0
    syncs: float = 0  # that find nothing to wait for
    launches: float = 0
    bytes_up: float = 0
    bytes_down: float = 0

    def seconds(self, times: CallTimes, link_bytes_per_s: float, scale: float = 1.0) -> float:
        """Their time with `scale` times the bytes; blocking copies are of pageable memory."""
        blocking, queued = self.gets + self.sets, self.gets_async + self.sets_async + self.copies
        bytes_per_s = times.pageable_bytes_per_s if blocking else link_bytes_per_s
        return (
            blocking * times.blocking_copy_s
            + queued * times.queued_copy_s
            + self.events * times.event_s
            + self.waits * times.wait_s
            + self.syncs * times.sync_s
            + self.launches * times.launch_s
            + scale * (self.bytes_up + self.bytes_down) / bytes_per_s
        )


@dataclass(frozen=True, kw_only=True)
class Moments:
    """The calls of a layer with a given number of tokens."""

    down: Calls = Calls()
    submit: Calls = Calls()
    join: Calls = Calls()
    up: Calls = Calls()
    hidden: Calls = Calls()  # made while the GPU computes what comes before: they cost the host no time of its own


@dataclass(frozen=True, kw_only=True)
class Handoff:
    """How a program shares layers with the host, and what its calls cost."""

    name: str
    one: Moments  # of one token
    nine: Moments  # of nine tokens; other numbers in proportion to the bytes
    times: CallTimes
    cpu_regions: int = 1  # graphs that the CPU's threads compute per layer, at least one of them the missing experts
    divides: bool = False  # both sides compute a part of the same layer
    launched_ahead: bool = False  # the GPU's half starts before the host knows the layer's experts
    chunk_bytes: float = 0  # of the uploads that small copies to the GPU wait for; 0: nothing is uploaded meanwhile
    chunks_ahead: float = 0  # of them that such a copy waits for while uploads are under way

    def seconds(self, moment: str, n_tokens: int, link_bytes_per_s: float) -> float:
        """The time of one of the moments in a layer with so many tokens."""
        moments, scale = (self.one, 1.0) if n_tokens == 1 else (self.nine, n_tokens / _COUNTED_TOKENS)
        calls: Calls = getattr(moments, moment)
        return calls.seconds(self.times, link_bytes_per_s, scale)

    def divide_s(self, n_tokens: int) -> float:
        """Dividing a block between the sides; 0 where they do not share one."""
        return n_tokens * self.times.divide_s if self.divides else 0.0

    def fixed_s(self, link_bytes_per_s: float, n_tokens: int = 1) -> float:
        """All that a layer costs apart from its experts: `m` of a divided one, `s` of one that the CPU computes."""
        moments = sum(self.seconds(name, n_tokens, link_bytes_per_s) for name in ("down", "submit", "join", "up"))
        return moments + self.divide_s(n_tokens) + self.cpu_regions * self.times.cpu_region_s


def find_handoff(name: str, side: Side = "chosen") -> Handoff:
    """A program's handoff, with one side of the constants."""
    data = read_data("handoffs.json")
    values = only_known(pick(data["programs"][name], side), Handoff)
    values |= {tokens: _moments(values[tokens]) for tokens in ("one", "nine")}
    return Handoff(name=name, times=CallTimes(**only_known(pick(data["calls"], side), CallTimes)), **values)


def _moments(entry: dict[str, Any]) -> Moments:
    return Moments(**{name: Calls(**calls) for name, calls in entry.items()})
