"""Errors made for people: what was wrong, where, and what to do about it.

The command line prints a ``RollmillError`` as one message and exits with ``exit_code``; any other
exception is a defect of Rollmill and keeps its traceback.
"""


class RollmillError(Exception):
    """A problem that the user can mend.

    Args:
        message: what was wrong and where (file, task id, column, reference).
        hint: what to do about it; None where the message says it already.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None):
        super().__init__(message if hint is None else f"{message}\n{hint}")
        self.message = message
        self.hint = hint


class ConfigError(RollmillError):
    """A setting is unknown, malformed or out of bounds."""


class InputError(RollmillError):
    """Input data (a task file, a policy directory, a grader) cannot be used as it is."""


class NotFoundError(RollmillError):
    """A reference, run, benchmark, grader or file does not exist."""


class KindError(RollmillError):
    """A reference points at an artifact of another kind than the stage needs."""


class StoreError(RollmillError):
    """The store cannot be reached, read or written safely."""


class CorruptError(RollmillError):
    """A stored object is damaged: truncated, unreadable, or its checksum differs."""


class StageFailed(RollmillError):
    """A stage gave up: too many failures, or a worker process died; finished shards are kept."""

    exit_code = 1
