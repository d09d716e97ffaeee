"""Everything the runtime raises on purpose. A message says what was wrong, what was expected, and what to do."""


class TideError(Exception):
    """Base of all errors meant for the user; the command line prints the message and exits with `exit_code`."""

    exit_code = 2


class BundleError(TideError):
    """A bundle, or a file in it, is missing, corrupt, or of a version this runtime does not support."""


class AdapterError(TideError):
    """A LoRA adapter is missing, broken, or changes the model in a way that cannot be added to a compiled one."""


class MissingExtraError(TideError):
    """A command needs packages that an extra of ``tide-llm`` brings; the message has the command that installs them."""


class UnsupportedModelError(TideError):
    """The model's architecture, or a feature it uses, cannot be compiled."""


class PromptError(TideError):
    """A prompt or chat is empty, too long, malformed, or has token ids outside the vocabulary."""


class ParamsError(TideError, ValueError):
    """A generation parameter or a configuration value is outside its allowed range.

    ``field``: its name; None where the message alone has it.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class GrammarError(ParamsError):
    """A grammar cannot be compiled or followed; the message has the reason."""


class OutputError(TideError):
    """Output cannot be written: the directory already exists, or the disk is full."""


class TargetError(TideError):
    """A target cannot be built or run on this machine."""


class DeviceMemoryError(TargetError):
    """A device has not as much memory as is asked for."""


class IncompleteBundleError(TargetError):
    """A bundle was written with some of the targets that were asked for; the others cannot be built."""

    exit_code = 3


class VerificationError(TideError):
    """A bundle's outputs differ from the eager model's."""


class CacheFullError(TideError):
    """The KV cache has no room for another token."""


class QueueFullError(TideError):
    """The queue is full; send the request again later, or to another engine."""


class EngineClosedError(TideError):
    """The engine was closed, has failed, or was loaded before this process was forked."""


class NumericsError(TideError):
    """The model produced logits no token can be chosen from: NaN, or an infinite maximum."""


class ModelFilesError(TideError):
    """A model directory or hub id cannot be read: missing, incomplete, truncated, or pickled weights."""


class DataError(TideError):
    """Calibration data is missing, unreadable, too small, or not text."""


class CalibrationError(TideError):
    """A calibration is missing, incomplete, broken, or belongs to another model."""
