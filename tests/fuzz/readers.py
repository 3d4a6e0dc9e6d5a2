"""What reads the files that moeedge has kept, called with a changed one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from moeedge.bench.budget_choice import BudgetChoice
from moeedge.bench.journal import Journal
from moeedge.engine.autosave import unfinished_chats
from moeedge.engine.conversation import Conversation
from moeedge.engine.layer_choice import LayerChoice
from moeedge.lab.traces.importers import read_trace
from moeedge.lab.traces.schedule import recorded_schedule
from moeedge.llama.json_schema import schema_grammar
from moeedge.policies.cost_model import CostModel
from moeedge.scheduler.calibration import Calibration, parse_measurement
from moeedge.scheduler.disk import DiskCalibration


def measurements(name: str) -> None:
    """A kept measurement is read, or measured again: ValueError says so."""
    text = Path(name).read_bytes().decode("utf-8", "replace")
    for kind in (Calibration, CostModel, LayerChoice, BudgetChoice, DiskCalibration):
        with suppress(ValueError):
            parse_measurement(kind, text)


def journal(name: str) -> None:
    """An interrupted benchmark goes on from its file, or says why not."""
    Journal.resume(name, [])


def unfinished(name: str) -> None:
    """A chat that was cut off is offered, or set aside; as is one that /load reads."""
    path = Path(name)
    folder = path.with_name("chats")
    folder.mkdir(exist_ok=True)
    (folder / "chat.jsonl").write_bytes(path.read_bytes())
    unfinished_chats(lambda: folder)
    Conversation.load(path)


def trace(name: str) -> None:
    """A recorded routing is read and looked through, or refused."""
    recorded_schedule(read_trace(Path(name)))


def schema(name: str) -> None:
    """A JSON schema becomes a grammar, or is refused."""
    schema_grammar(Path(name).read_bytes().decode("utf-8", "replace"))
