"""The exceptions of lowtide. A message is one line; an out-of-memory error has more lines, which say why."""

import sys


class Error(RuntimeError):
    """Something that lowtide could not do."""


class ConfigError(Error, ValueError):
    """The strategy or an option is unknown, or an option's value is refused."""


class StartedError(Error):
    """CUDA is in use already."""


class NoDriverError(Error):
    """NVIDIA's driver is missing, does not start, or is too old."""


class TorchError(Error):
    """PyTorch is not installed, too old, or has no CUDA."""


class OutOfMemoryError(Error):
    """The device has too little free memory for a resume. Nothing is lost: free some, and try again.

    PyTorch's requests for memory raise `torch.OutOfMemoryError`, as they do without lowtide.
    """


class PausedError(Error):
    """The memory is in a region that is paused."""


class BackupError(Error):
    """A region's contents could not be saved or restored. Nothing is lost, and the next attempt may work."""


def report_line(message: str) -> None:
    """Prints a message as one line to standard error."""
    print(f"lowtide: {message}", file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
