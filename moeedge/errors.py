"""Every error that moeedge raises on purpose, as one hierarchy.

MoeedgeError                    exit 1   something failed
  BackendError                  exit 1   the native library or llama.cpp cannot be used
    VersionMismatchError        exit 1   another llama.cpp version or backend API than we were compiled against
  EngineError                   exit 1   llama.cpp refused to load, allocate or decode
  DownloadError                 exit 1   the hub did not answer or answered wrongly
  SandboxError                  exit 1   a program's tests cannot be run apart
  DiskSpaceError                exit 1   a file does not fit on the disk
  InputError                    exit 2   what the user gave cannot be used
    ModelFileError              exit 2   missing, truncated or non-GGUF model file
    ModelNameError              exit 2   no model of that name, or it is not on this machine
    CatalogError                exit 2   the catalog cannot be used, or lacks a quantization
    VocabularyMismatchError     exit 2   draft and target do not share a vocabulary
    ContextTooSmallError        exit 2   the prompt does not fit the context
    EmptyPromptError            exit 2   nothing to answer
    DatasetError                exit 2   unknown dataset, absent or malformed file
    LayerRangeError             exit 2   no such layer
    DeviceError                 exit 2   no such device

Only the CLI turns them into exit codes: it prints `message` as one sentence and `mend` as the next, never a traceback.
"""

from __future__ import annotations


class MoeedgeError(Exception):
    """Base of all errors raised on purpose; `message` says what is wrong, `mend` what to do about it."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} {hint}".strip())
        self.message = message
        self.hint = hint


class BackendError(MoeedgeError):
    """The native library, or the llama.cpp that it attaches to, cannot be used."""


class VersionMismatchError(BackendError):
    """llama.cpp has another version or backend API than the one that the native library was compiled against."""


class EngineError(MoeedgeError):
    """llama.cpp refused to load a model, allocate a context or decode a batch."""


class DownloadError(MoeedgeError):
    """A file could not be fetched from the hub."""


class SandboxError(MoeedgeError):
    """No process of its own can be had for a program's tests."""


class DiskSpaceError(MoeedgeError):
    """A file does not fit on the disk that it is written to."""


class InputError(MoeedgeError):
    """What the user gave cannot be used."""

    exit_code = 2


class ModelFileError(InputError):
    """The model file is missing, truncated or not a GGUF file."""


class ModelNameError(InputError):
    """The name stands for no model, or for one that is not on this machine."""


class CatalogError(InputError):
    """The catalog of models cannot be used, or lacks what was asked for."""


class VocabularyMismatchError(InputError):
    """The draft's vocabulary is not the target's."""


class ContextTooSmallError(InputError):
    """The prompt does not fit the context."""


class EmptyPromptError(InputError):
    """There is nothing to answer."""


class DatasetError(InputError):
    """The dataset is unknown, absent or malformed."""


class LayerRangeError(InputError):
    """The layer does not exist or has no experts."""


class DeviceError(InputError):
    """The device is unknown or unusable."""
