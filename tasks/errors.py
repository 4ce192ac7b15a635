"""What can go wrong around a stage, besides the user's mistakes that a stage itself finds."""

from mca_lib.errors import ConfigError, ResourceError, UserError


class CanonicalError(ConfigError):
    """A value of a cache key has no canonical form; the message starts with the field."""


class StoreError(ResourceError):
    """The artifact store cannot be used: not a directory, read-only, full, or written by a newer release."""


class LeaseLost(Exception):
    """Another run has taken this stage over; whatever was computed here must not be published."""


class StageFailed(Exception):
    """A child process of a stage failed for a reason that is not the user's; names the log."""


class Cancelled(BaseException):
    """The run was asked to stop. A BaseException, so that no `except Exception` of a stage keeps it going."""


__all__ = ["Cancelled", "CanonicalError", "LeaseLost", "StageFailed", "StoreError", "UserError"]
