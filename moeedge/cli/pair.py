"""Which target and draft a command runs: what -m and -md say, or the bundled pair.

The value of -dev, checked before anything is loaded.

What the options of expert placement mean, before llama.cpp is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moeedge import paths
from moeedge.engine.types import EngineConfig
from moeedge.scheduler.config import PlacementConfig

if TYPE_CHECKING:
    from moeedge.hub.local import LocalModel
import os
from collections.abc import Sequence

from moeedge.errors import InputError
from moeedge.hardware.spec import EMULATED, RPC_SCHEME, DeviceSpec
from moeedge.native.abi import PrefillPath
from moeedge.units import parse_size

Draft = Path | Literal["ngram"] | None
DRAFT_MAX = 4  # tokens per draft, where neither the user nor the catalog says


@dataclass(frozen=True)
class Pair:
    """A target and where its drafts come from."""

    target: Path
    draft: Draft
    draft_max: int = DRAFT_MAX  # what suits the pair

    def engine_config(
        self,
        *,
        ctx_size: int,
        threads: int,
        draft_max: int | None,
        n_gpu_layers: int | None,
        device: str,
        context_shift: bool = False,
        placement: PlacementConfig | None = None,
        emulate: bool = False,
    ) -> EngineConfig:
        """What the options that all commands share ask of the engine.

        draft_max: None takes what suits the pair. emulate: auto without a GPU runs the bundled model on the emulated
        device.
        """
        return EngineConfig(
            model=self.target,
            draft=self.draft,
            n_ctx=ctx_size,
            n_threads=threads,
            gamma=self.draft_max if draft_max is None else draft_max,
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
    """The pair that the values of -m and -md name; says on standard error what a name stands for.

    Without -m it is the bundled target. Without -md the bundled target gets the bundled draft, a model of the catalog
    the best of its drafts that is on this machine, and any other model none; "ngram" and "none" are no files. A path
    that exists wins over a name. Raises ModelFileError where the bundled files are missing, ModelNameError for a name
    that is unknown or whose files are not here.
    """
    given: Draft = None
    if draft == "ngram":
        given = "ngram"
    elif draft is not None and draft != "none":
        given = _locate(draft).path
    if model is None or (str(model).lower() == "bundled" and not model.exists()):
        model = paths.bundled_target()
    if paths.is_bundled(model):
        own = draft is None and model.name == "target.gguf"
        return Pair(model, paths.bundled_draft() if own else given)
    target = _locate(str(model))
    return Pair(target.path, given) if target.choice is None else _from_catalog(target, given, choose=draft is None)


def _locate(text: str) -> LocalModel:
    from moeedge.hub.local import locate

    found = locate(text)
    _tell(found.name, found.path)
    return found


def _from_catalog(target: LocalModel, draft: Draft, *, choose: bool) -> Pair:
    """The pair of an entry of the catalog, with what it suggests where the user said nothing, and says so."""
    from moeedge.hub.catalog import load_catalog
    from moeedge.hub.local import local_draft

    assert target.choice is not None
    entry = target.choice.entry
    if choose and entry.drafts:
        found = local_draft(load_catalog(), target.choice)
        if found is None:
            _say(f"Its draft {entry.drafts[0]} is not on this machine: no drafts (moeedge pull {entry.drafts[0]}).")
        else:
            draft = found.path
            _tell(found.name, found.path, before="Draft, by the catalog: ")
    if draft is None or entry.draft_max is None:
        return Pair(target.path, draft)
    if entry.draft_max != DRAFT_MAX:
        _say(f"The catalog suggests {entry.draft_max} tokens per draft for it; --draft-max says otherwise.")
    return Pair(target.path, draft, entry.draft_max)


def _tell(name: str, path: Path, *, before: str = "") -> None:
    if name:
        _say(f"{before}{name} is {path}")


def _say(text: str) -> None:
    from moeedge.ui.console import say, stderr_console

    say(stderr_console(), text)


AUTO = "auto"
NONE = "none"


def check_device(text: str) -> None:
    """Raises DeviceError for a device that is written wrongly or that nothing here offers, naming the known ones."""
    spec = DeviceSpec.parse(text)
    if spec.kind != "name":
        return
    from moeedge.hardware.devices import check_known
    from moeedge.llama import library

    library.start()
    check_known(spec)


def layer_notes(n_gpu_layers: int) -> list[str]:
    """What -ngl does here, in a sentence; nothing when it was not given."""
    if n_gpu_layers == 0:
        return []
    from moeedge import native

    if any(device.kind in ("GPU", "IGPU") for device in native.devices()):
        return []
    return ["llama.cpp lists no GPU here: -ngl has no effect."]


_SPIN_COUNT = "1000"


def placement_config(
    *,
    vram: str | None = None,
    cache_ratio: float | None = None,
    policy: str = "spac",
    ablate: Sequence[str] = (),
    utility_cap: int = 4,
    forgetting: float = 0.1,
    prefill_path: str = "auto",
    no_calibrate: bool = False,
    measure_anew: bool = False,
) -> PlacementConfig:
    """The values of the options of the same names. Raises InputError and ValueError for what cannot be meant."""
    from moeedge.policies import registry

    if policy not in registry.POLICIES:
        raise InputError(f'There is no policy "{policy}".', f"Known: {', '.join(registry.POLICIES)}.")
    return PlacementConfig(
        vram_bytes=None if vram is None else parse_size(vram),
        cache_ratio=cache_ratio,
        policy=policy,
        ablations=frozenset(ablate),
        utility_cap=utility_cap,
        forgetting=forgetting,
        prefill=PrefillPath(prefill_path),
        calibrate=not no_calibrate,
        measure_anew=measure_anew,
    )


def limit_openmp_spin(device: str, *, may_emulate: bool = False) -> None:
    """Makes idle OpenMP threads give their core away soon where another team of threads computes beside them.

    That is the emulated device, or a worker, which may be of this machine.

    Read when llama_cpp is loaded, so this must come before. may_emulate: auto may turn out to be the emulated device.
    """
    if device.startswith((EMULATED, RPC_SCHEME)) or (may_emulate and device == "auto"):
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
