"""Which target and draft a command runs: what -m and -md say, or the bundled pair."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeedge import paths
from moeedge.cli.device import NONE
from moeedge.engine.types import EngineConfig, PlacementConfig

Draft = Path | Literal["ngram"] | None


@dataclass(frozen=True)
class Pair:
    """A target and where its drafts come from."""

    target: Path
    draft: Draft

    def engine_config(
        self,
        *,
        ctx_size: int,
        threads: int,
        draft_max: int,
        n_gpu_layers: int | None,
        device: str,
        context_shift: bool = False,
        placement: PlacementConfig | None = None,
        emulate: bool = False,
    ) -> EngineConfig:
        """What the options that all commands share ask of the engine.

        emulate: auto without a GPU runs the bundled model on the emulated device.
        """
        return EngineConfig(
            model=self.target,
            draft=self.draft,
            n_ctx=ctx_size,
            n_threads=threads,
            gamma=draft_max,
            n_gpu_layers=0 if device == NONE else n_gpu_layers,
            device=device,
            emulate_bundled=emulate,
            placement=placement or PlacementConfig(),
            context_shift=context_shift,
        )

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
