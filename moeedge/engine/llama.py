"""The thin typed wrapper over llama_cpp's low-level API: models, vocabularies, contexts.

The parts: library.py starts llama.cpp and our backend, gguf_file.py looks at a file before it is loaded, model.py and
chat_format.py hold the model with its vocabulary and template, batch.py and context.py decode.
"""

from __future__ import annotations

from moeedge.engine.context import Context, Logits
from moeedge.engine.model import Model, ModelInfo

__all__ = ["Context", "Logits", "Model", "ModelInfo"]
