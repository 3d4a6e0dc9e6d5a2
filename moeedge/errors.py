"""Every error that moeedge raises on purpose, as one hierarchy.

Only the CLI turns them into exit codes, 2 for InputError and 1 for the others: it prints `message` and `hint`, never a
traceback.
"""

from __future__ import annotations


class MoeedgeError(Exception):
    """Base of all errors raised on purpose: `message` says what failed, `hint` what to do, in the imperative."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} {hint}".strip())
        self.message = message
        self.hint = hint


class BackendError(MoeedgeError):
    """The native library, or the llama.cpp that it attaches to, is unusable."""


class VersionMismatchError(BackendError):
    """llama.cpp does not have the version or backend API that the native library was compiled for."""


class EngineError(MoeedgeError):
    """llama.cpp failed to load a model, allocate a context or decode a batch, or an answer cannot go on."""


class DeviceFailedError(EngineError):
    """A GPU on which llama.cpp computes failed: it is lost, or has no memory left."""


class MeasurementError(MoeedgeError):
    """Measurements scatter too much to say anything."""


class DownloadError(MoeedgeError):
    """A file could not be downloaded from the hub."""


class SandboxError(MoeedgeError):
    """The sandbox for programs cannot be started."""


class DiskSpaceError(MoeedgeError):
    """A file does not fit on its disk."""


class InputError(MoeedgeError):
    """Invalid input of the user."""

    exit_code = 2


class ModelFileError(InputError):
    """The model file is missing, truncated or not a GGUF file."""


class ModelNameError(InputError):
    """The name means no known model, or one that is not on this machine."""


class CatalogError(InputError):
    """The catalog of models is malformed, or lacks the requested quantization."""


class VocabularyMismatchError(InputError):
    """The draft's vocabulary is not the target's."""


class ContextTooSmallError(InputError):
    """The prompt does not fit the context."""


class EmptyPromptError(InputError):
    """The prompt is empty."""


class DatasetError(InputError):
    """The dataset is unknown, absent or malformed."""


class LayerRangeError(InputError):
    """The layer does not exist or has no experts."""


class DeviceError(InputError):
    """The device is unknown or unusable."""


class BackendFileError(DeviceError):
    """The file that the user names is missing, or no ggml backend that can be used here."""


def require(is_valid: object, message: str) -> None:
    """Raises ValueError with the message for a value that is not valid."""
    if not is_valid:
        raise ValueError(message)
