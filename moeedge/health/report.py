"""The findings of `moeedge doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from moeedge.errors import MoeedgeError

Status = Literal["ok", "info", "warning", "broken"]


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    topic: str
    status: Status  # info: could be better; warning: something is slower or missing; broken: commands fail
    text: str  # what was found, in a line
    hint: str = ""  # what to do, in the imperative


@dataclass(frozen=True)
class Report:
    """All findings, in the order in which they are shown."""

    findings: tuple[Finding, ...]

    @property
    def is_broken(self) -> bool:
        """Whether something fails."""
        return any(finding.status == "broken" for finding in self.findings)


def checked(topic: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of a check; an error that it raises on purpose is one: something is broken."""
    found: list[Finding] = []
    try:
        found.extend(check())  # keeps those before an error
    except MoeedgeError as error:
        found.append(Finding(topic, "broken", error.message, error.hint))
    except OSError as error:
        found.append(Finding(topic, "broken", f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")))
    return found
