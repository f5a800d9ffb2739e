"""Every error a user can meet, and the exit code each one maps to.

SparkchatError            1   anything without a more precise class
├── UsageError            2   an option or a value that cannot be honoured
├── ModelNotFound         3   unknown name, or offline and not cached
├── NotEnoughMemory       4
├── NotEnoughDisk         5
├── DamagedFile           6   truncated, mis-shaped, wrong checksum, or NaN at run time
├── Unreachable          69   the hub or the package index does not answer
├── EngineCrash          70   the engine process died
├── NoAccess             77   gated or private, or the access token is refused
├── Interrupted         130   ctrl+c
└── Terminated          143   SIGTERM

A message is one line: what was asked, what is wrong, what to type instead.
"""


class SparkchatError(Exception):
    """Base of all errors that are shown as one line; ``exit_code`` ends the process."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        # One line by construction: library messages folded into ours may carry newlines.
        super().__init__(" ".join(str(message).split()))

    @property
    def message(self) -> str:
        return str(self)


class UsageError(SparkchatError):
    """An option, argument, profile key or request field that cannot be honoured."""

    exit_code = 2


class ModelNotFound(SparkchatError):
    """The model name is unknown, or it is not on disk and may not or cannot be fetched."""

    exit_code = 3


class NotEnoughMemory(SparkchatError):
    """Weights, caches and working space do not fit."""

    exit_code = 4


class NotEnoughDisk(SparkchatError):
    """The download or the file to write does not fit."""

    exit_code = 5


class DamagedFile(SparkchatError):
    """A file is truncated, mis-shaped, has the wrong checksum, or yields NaN when run."""

    exit_code = 6


class Unreachable(SparkchatError):
    """The network, the hub or the package index does not answer, and what is needed is not on disk."""

    exit_code = 69


class NoAccess(SparkchatError):
    """A repository exists but may not be read: gated, private, or the access token is refused."""

    exit_code = 77


class EngineCrash(SparkchatError):
    """The engine process ended without being asked to."""

    exit_code = 70


class Interrupted(SparkchatError):
    """The user pressed ctrl+c."""

    exit_code = 130


class Terminated(SparkchatError):
    """The process was asked to end by SIGTERM."""

    exit_code = 143


_BY_NAME = {
    cls.__name__: cls
    for cls in (
        SparkchatError,
        UsageError,
        ModelNotFound,
        NotEnoughMemory,
        NotEnoughDisk,
        DamagedFile,
        Unreachable,
        NoAccess,
        EngineCrash,
        Interrupted,
        Terminated,
    )
}


def error_from_name(name: str, message: str) -> SparkchatError:
    """Rebuild an error that crossed the engine pipe as its class name and message."""
    return _BY_NAME.get(name, SparkchatError)(message)
