"""Errors of devices."""

__all__ = ["DeviceError"]


class DeviceError(RuntimeError):
    """A device is missing, too old, or can't run the code; says what to do."""
