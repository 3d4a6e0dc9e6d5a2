"""Models in several files."""

from __future__ import annotations

from pathlib import Path

import gguf


def split(path: Path, folder: Path) -> list[Path]:
    """The model in files of at most 20 tensors."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(folder / "m.gguf", "qwen3moe", split_max_tensors=20)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            of = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, of)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("m-*.gguf"))
