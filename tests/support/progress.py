"""Progress that remembers what it was told."""

from __future__ import annotations

from moeedge.run import Progress


class SeenProgress(Progress):
    """Keeps tasks, amounts and phases in the order of the calls."""

    def __init__(self) -> None:
        self.tasks: list[tuple[str, float]] = []
        self.amounts: list[float] = []
        self.phases: list[str] = []

    def start(self, label: str, total: float) -> None:
        self.tasks.append((label, total))

    def add(self, amount: float = 1) -> None:
        self.amounts.append(amount)

    def phase(self, text: str) -> None:
        self.phases.append(text)
