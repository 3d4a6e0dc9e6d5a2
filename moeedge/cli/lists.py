"""Options that take lists, separated by commas."""

from __future__ import annotations

from moeedge.errors import InputError


def words(text: str, option: str) -> list[str]:
    """The names, each once. Raises InputError where there is none."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise InputError(f"{option} names nothing.", "Give names, separated by commas.")
    return words


def numbers(text: str, option: str) -> list[float]:
    """Numbers, each once. Raises InputError."""
    try:
        return [float(word) for word in words(text, option)]
    except ValueError:
        raise InputError(f'{option} takes numbers, not "{text}".', "Separate them by commas.") from None


def whole_numbers(text: str, option: str) -> list[int]:
    """Integers. Raises InputError."""
    values = numbers(text, option)
    broken = [value for value in values if not value.is_integer()]
    if broken:
        raise InputError(f"{option} takes whole numbers, not {broken[0]:g}.", "Separate them by commas.")
    return [int(value) for value in values]
