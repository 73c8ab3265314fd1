"""Every error pdlab raises on purpose: what was wrong, the value, and what would be right.

`hint` is the part that tells the reader what to do; `str(error)` holds both, and the command line prints them apart as
JSON (`{"error": {"type", "message", "hint"}}`).
"""

from __future__ import annotations


class PdlabError(Exception):
    """Base of all errors that a caller may expect and handle."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class ConfigError(PdlabError):
    """A field of EngineConfig, or a combination of fields, that cannot work."""


class InvalidRequest(PdlabError):
    """A prompt or sampling parameter that was refused at the door; no other request is affected."""


class ContextTooLong(InvalidRequest):
    """The prompt, or prompt plus max_tokens, does not fit the model's context or the KV memory there is."""


class UnknownModel(PdlabError):
    """A model name that is neither in the catalogue, nor a folder, nor reachable on a hub."""


class WeightsError(PdlabError):
    """Weights that are missing, truncated, of the wrong shape, or hold NaN or infinity."""


class FetchError(PdlabError):
    """A download that failed or whose SHA-256 differs from the pinned one; nothing half-written is kept."""


class DeviceUnavailable(PdlabError):
    """A device, dtype or backend that this machine does not have."""


class CapacityError(PdlabError):
    """More memory was asked for than there is; the message says what would fit."""


class AllocatorError(PdlabError):
    """A broken allocator invariant (a slot owned twice, a leak) or a call that the contract forbids."""


class PolicyError(PdlabError):
    """A scheduling policy failed on the requests it was shown; nothing was planned."""


class StepFailed(PdlabError):
    """A step raised; the requests it carried end with finish_reason 'error' and this cause."""


class EngineClosed(PdlabError):
    """The LLM was used after close()."""


class WorkloadError(PdlabError):
    """A trace file or generator parameter that cannot be read; names the line where there is one."""


class MeasurementError(PdlabError):
    """A measurement table or provenance file that breaks its format."""


class NotebookError(PdlabError):
    """A notebook, parameter or batch description that cannot be run as asked; nothing was executed."""
