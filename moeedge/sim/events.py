"""What happened, when and where: spans of time on the streams of a machine, and their log."""

from __future__ import annotations

from dataclasses import dataclass, field

STREAMS = ("draft", "gpu", "cpu", "link", "host")


@dataclass(frozen=True)
class Span:
    """One piece of work of a stream; what concerns no layer or expert holds -1."""

    stream: str  # of STREAMS
    kind: str  # draft, dense, experts, upload, demand, plan
    start_ns: int
    end_ns: int
    step: int
    layer: int = -1
    n: int = 0  # experts, or tokens of a draft

    @property
    def ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns

    def line(self) -> str:
        """One line of the log: tab-separated, in the order of the fields."""
        return f"{self.start_ns}\t{self.end_ns}\t{self.stream}\t{self.kind}\t{self.step}\t{self.layer}\t{self.n}"


@dataclass
class Log:
    """Spans in the order in which they were decided on, if `kept`; the busy time of each stream in any case."""

    kept: bool = True
    spans: list[Span] = field(default_factory=list)
    busy_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))

    def add(self, span: Span) -> None:
        """Notes one piece of work; empty ones leave no trace."""
        if span.ns <= 0:
            return
        self.busy_ns[span.stream] += span.ns
        if self.kept:
            self.spans.append(span)

    def of_step(self, step: int) -> list[Span]:
        """The spans of one step, transfers that began in it included."""
        return [span for span in self.spans if span.step == step]

    def text(self) -> str:
        """The whole log: a header and one line per span."""
        header = "start_ns\tend_ns\tstream\tkind\tstep\tlayer\tn\n"
        return header + "".join(span.line() + "\n" for span in self.spans)


class Stream:
    """Work that is done one after the other, first in first out: the GPU, the CPU pool."""

    def __init__(self, name: str, log: Log) -> None:
        self.name = name
        self.free_ns = 0
        self._log = log

    def submit(self, now_ns: int, ns: int, kind: str, step: int, layer: int = -1, n: int = 0) -> int:
        """Queues work of `ns`; when it will be done."""
        start_ns = max(now_ns, self.free_ns)
        self.free_ns = start_ns + ns
        self._log.add(Span(self.name, kind, start_ns, self.free_ns, step, layer, n))
        return self.free_ns
