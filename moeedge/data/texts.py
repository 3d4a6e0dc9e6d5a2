"""Texts for perplexity: the bundled pair's own, and files of the user's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from moeedge.errors import DatasetError

TOY_TEXT = "toy"
CALIBRATION_TEXT = "calibration"


@dataclass(frozen=True)
class EvaluationText:
    """A fixed text, and the facts that identify it."""

    name: str
    text: str
    sha256: str  # of the file


def load_text(name: str) -> EvaluationText:
    """Loads "toy" (chats of the bundled pair's domains, held out of its training data) or a file of UTF-8 text.

    The toy text is `python -m models.toy --text`. Raises DatasetError for an absent, empty or unreadable file.
    """
    if name == TOY_TEXT:
        with as_file(files("moeedge.data") / "toy.txt") as path:
            return _read(TOY_TEXT, path)
    path = Path(name).expanduser()
    return _read(path.name, path)


def load_calibration_text() -> EvaluationText:
    """Loads the text by which expert budgets of models other than the bundled pair are chosen: letters, code, tables.

    Figures about a chosen budget must come from other texts.
    """
    with as_file(files("moeedge.data") / "calibration.txt") as path:
        return _read(CALIBRATION_TEXT, path)


def _read(name: str, path: Path) -> EvaluationText:
    hint = f'Name a file of UTF-8 text, or "{TOY_TEXT}".'
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise DatasetError(f"Cannot read the text {path}: {error.strerror or 'read error'}.", hint) from None
    except UnicodeDecodeError:
        raise DatasetError(f"The text {path} is not UTF-8.", hint) from None
    if not text.strip():
        raise DatasetError(f"The text {path} is empty.", hint)
    return EvaluationText(name, text, hashlib.sha256(data).hexdigest())
