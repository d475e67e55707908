"""Every error autoprec raises on purpose.

A message says what was attempted, the offending value, what is allowed and what to do. Whatever is not an
`AutoprecError` is a bug in autoprec (or an exception of the user's own code, which is never swallowed).
"""


class AutoprecError(Exception):
    """Base of all errors a user can meet; the command line exits with `exit_code`."""

    exit_code = 2


class FormatError(AutoprecError):
    """A number format that does not exist, or that the device cannot run."""


class PolicyError(AutoprecError):
    """A policy, rule or site pattern that is wrong."""


class PolicyFileError(PolicyError):
    """A policy file that cannot be read; the message starts with `file:line:`."""


class ApplyError(AutoprecError):
    """A policy that cannot be installed in this model."""


class TraceError(AutoprecError):
    """A policy that the kernels did not honor, or a step that cannot be traced."""


class ScalingError(AutoprecError):
    """Loss scaling in an order that would train on wrong gradients."""


class GuardError(AutoprecError):
    """A run that the guard stopped, or a guard that cannot watch this run."""


class WorkloadError(AutoprecError):
    """A workload that cannot be loaded, or that is broken before any precision is lowered."""


class CaptureError(AutoprecError):
    """A workload that cannot be recorded."""


class ReplayError(CaptureError):
    """A recording that does not reproduce the loss it recorded."""


class DeviceError(AutoprecError):
    """A device that is not there or cannot do what was asked."""


class MeasurementError(AutoprecError):
    """A measurement that cannot be made or interpreted."""


class SpaceError(AutoprecError):
    """A search space file that is wrong."""


class StudyError(AutoprecError):
    """A study storage that is locked, foreign or unreadable."""


class RecordError(AutoprecError):
    """A record file that cannot be read or written."""


class GatesError(AutoprecError):
    """A gates file that is wrong, or a gate that does not exist; of a file the message starts with `file:line:`."""


class OutputError(AutoprecError):
    """A result that cannot be written: full disk, read-only folder, missing parent."""


def a_or_an(value: object) -> str:
    """Return what a value is, for a message: `an int`, `a Tensor`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"
