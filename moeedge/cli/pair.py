"""Which target and draft a command runs: what -m and -md say, or the bundled pair."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeedge import paths

Draft = Path | Literal["ngram"] | None


@dataclass(frozen=True)
class Pair:
    """A target and where its drafts come from."""

    target: Path
    draft: Draft

    @property
    def bundled(self) -> bool:
        """Whether the target is the bundled toy model."""
        return paths.is_bundled(self.target)


def resolve_pair(model: Path | None, draft: str | None) -> Pair:
    """The pair that the values of -m and -md name.

    Without -m it is the bundled target. Without -md the bundled target gets the bundled draft and any other model none;
    "ngram" and "none" are no files. Raises ModelFileError where the bundled files are missing.
    """
    target = model if model is not None else paths.bundled_target()
    if draft == "none":
        return Pair(target, None)
    if draft == "ngram":
        return Pair(target, "ngram")
    if draft is not None:
        return Pair(target, Path(draft))
    return Pair(target, paths.bundled_draft() if paths.is_bundled(target) and target.name == "target.gguf" else None)
