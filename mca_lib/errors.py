"""Errors that a user can mend. One type per kind of mistake; the message says what is wrong, where, and what to do.

Anything else that escapes is a defect of ours and keeps its traceback.
"""


class UserError(Exception):
    """Base of every error whose remedy is in the user's hands; printed as one line, exit code 2."""


class ConfigError(UserError):
    """A field of the recipe or of the arguments is wrong, or two fields contradict each other."""


class DataError(UserError):
    """A data file or a row of it cannot be used."""


class ModelError(UserError):
    """A model directory is unsupported, incomplete or inconsistent."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, damaged or of another model."""


class ResourceError(UserError):
    """Disk, memory or devices do not suffice."""
