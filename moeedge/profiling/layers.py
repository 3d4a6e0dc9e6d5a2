"""Which layers to look at: "47", "0,5,40-47" or "all", checked against the model."""

from __future__ import annotations

import re

from moeedge.errors import InputError, LayerRangeError


def parse_layers(text: str, n_layers: int, *, single: bool = False) -> list[int]:
    """Layer indices in the order named, without repetition; "all" is every layer. `single`: one number only.

    Raises InputError for what is no list of layers, LayerRangeError for a layer outside 0..n_layers-1.
    """
    if single:
        if re.fullmatch(r"\s*-?\d{1,9}\s*", text, flags=re.ASCII) is None:
            raise InputError(f'--layer takes one layer, not "{text}".', "Use --layers for a list or for all.")
        return [check_layer(int(text), n_layers)]
    if text.strip().lower() == "all":
        return list(range(n_layers))
    chosen: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(-?\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part, flags=re.ASCII)
        if match is None:
            raise InputError(f'"{text}" is not a list of layers.', 'Write it as 47, as 0,5,40-47 or as "all".')
        first = check_layer(int(match[1]), n_layers)
        last = first if match[2] is None else check_layer(int(match[2]), n_layers)
        if last < first:
            raise InputError(f'The range "{part.strip()}" runs backwards.', f"Write it as {last}-{first}.")
        chosen.extend(range(first, last + 1))
    return list(dict.fromkeys(chosen))


def check_layer(layer: int, n_layers: int) -> int:
    """`layer` itself. Raises LayerRangeError, with the valid range, where the model has no such layer."""
    if not 0 <= layer < n_layers:
        valid = f"0 to {n_layers - 1}" if n_layers > 1 else "0 only"
        raise LayerRangeError(f"Layer {layer} does not exist: this model's layers are {valid}.")
    return layer


def describe_layers(layers: list[int]) -> str:
    """A list of layers as people write it: "1-26" or "0, 2, 4-6"."""
    parts: list[str] = []
    start = 0
    for i, layer in enumerate(layers):
        if i + 1 == len(layers) or layers[i + 1] != layer + 1:
            parts.append(str(layer) if start == i else f"{layers[start]}-{layer}")
            start = i + 1
    return ", ".join(parts)
