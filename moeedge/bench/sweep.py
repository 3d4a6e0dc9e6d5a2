"""Sweeps over policies and cache ratios: every mode with our backend becomes one column per combination."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from moeedge.bench.modes import BenchMode
from moeedge.errors import InputError

NO_POLICY = "none"


def parse_policies(text: str | None, known: Iterable[str]) -> tuple[str, ...]:
    """The policies of a comma-separated list, each once; none for None. Raises InputError."""
    if text is None:
        return ()
    usable = [name for name in known if name != NO_POLICY]
    mend = f"Choose from {', '.join(usable)}, separated by commas."
    names = _split(text)
    if not names:
        raise InputError("--policy names no policy.", mend)
    for name in names:
        if name == NO_POLICY:
            raise InputError(
                'The policy "none" moves no expert: there is no cache to measure.', f"Use -dev none instead. {mend}"
            )
        if name not in usable:
            raise InputError(f'There is no policy "{name}".', mend)
    return names


def parse_ratios(text: str | None) -> tuple[float, ...]:
    """The cache ratios of a comma-separated list, each once, in the order given; none for None. Raises InputError."""
    if text is None:
        return ()
    mend = "Give numbers between 0 and 1, separated by commas."
    names = _split(text)
    if not names:
        raise InputError("--cache-ratio names no ratio.", mend)
    ratios = []
    for name in names:
        try:
            ratio = float(name)
        except ValueError:
            raise InputError(f'The cache ratio must be a number, not "{name}".', mend) from None
        if not 0 <= ratio <= 1:  # NaN too
            raise InputError(f"The cache ratio must be in [0, 1], not {name}.", mend)
        ratios.append(ratio)
    return tuple(dict.fromkeys(ratios))


@dataclass(frozen=True)
class Sweep:
    """Policies and cache ratios to compare; an empty list leaves that choice as it is."""

    policies: tuple[str, ...] = ()
    ratios: tuple[float, ...] = ()

    @property
    def asked(self) -> bool:
        """Whether anything is compared."""
        return bool(self.policies or self.ratios)

    def modes(self, modes: Sequence[BenchMode]) -> tuple[BenchMode, ...]:
        """`modes` with each that has our backend once per policy and ratio; stock modes as they are.

        Raises InputError where no mode has our backend.
        """
        if self.asked and all(mode.engine == "stock" for mode in modes):
            raise InputError("Stock modes have no expert cache.", "Name moeedge or moeedge-ar in --modes.")
        swept: list[BenchMode] = []
        for mode in modes:
            if mode.engine == "stock":
                swept.append(mode)
                continue
            for policy in self.policies or (mode.policy,):
                swept += [replace(mode, policy=policy, cache_ratio=ratio) for ratio in self.ratios or (None,)]
        return tuple(swept)


def is_swept(mode: BenchMode) -> bool:
    """Whether this column has an expert cache of its own."""
    return mode.policy is not None or mode.cache_ratio is not None


def _split(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
