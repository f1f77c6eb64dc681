"""What can go wrong, in the words of the person who reads it, and the exit code that each kind maps to.

A message is one sentence that says what is wrong, where, and what to do. `shoal.cli.main` prints it without a
traceback. The codes are the table in docs/reference/exit-codes.md; nothing else in Shoal chooses a number.
"""

DONE = 0
DIFFERENT = 1  # the answer of `shoal checkpoint diff`; no error
WRONG_USAGE = 2
TRANSIENT = 75
WRONG_ENVIRONMENT = 78
TOLD_TO_STOP = 143


class ShoalError(Exception):
    """The root; a bare one is a failure that a retry may cure."""

    exit_code = TRANSIENT


class UsageError(ShoalError):
    """The command line or the run file is wrong; the same input will always be wrong."""

    exit_code = WRONG_USAGE


class SpecError(UsageError):
    """The run file is wrong."""


class SetupError(ShoalError):
    """The machine is wrong: a missing package, file, device or permission; retrying cannot help."""

    exit_code = WRONG_ENVIRONMENT


class DataError(ShoalError):
    """The data is wrong; retrying cannot help."""

    exit_code = WRONG_ENVIRONMENT


class CheckpointError(ShoalError):
    """A checkpoint cannot be used and there is no good one to fall back to."""

    exit_code = WRONG_ENVIRONMENT


class NumericsError(ShoalError):
    """The loss or a gradient is not finite; the order is fixed, so the same steps would end the same way."""

    exit_code = WRONG_ENVIRONMENT


class TransientError(ShoalError):
    """A retry may cure it: a lost peer, a full queue, a server that is away."""


class Stopped(ShoalError):
    """Told to stop (SIGINT, SIGTERM); the state is saved."""

    exit_code = TOLD_TO_STOP


def needs_extra(package: str, extra: str, use: str) -> SetupError:
    """The one way to say that an optional dependency is missing."""
    return SetupError(
        f"{use} needs the package '{package}', which is not installed: run `pip install {package}` "
        f"(it is in Shoal's extra [{extra}])."
    )
