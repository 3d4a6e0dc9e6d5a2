"""JSON that a user wrote or that comes from a file: one error for all that can be wrong with it."""

from __future__ import annotations

import json
from typing import Any


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, which says where, also for values that Python cannot use."""
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} in line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("values are nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"{error.object[error.start]!r} is half of a character") from None
    except ValueError:  # an integer of more digits than Python converts
        raise ValueError("a number has too many digits") from None
