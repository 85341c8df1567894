"""The exceptions of lowtide. A message is one line; an out-of-memory error has more lines, which say why."""


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
