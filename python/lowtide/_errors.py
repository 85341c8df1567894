"""What lowtide raises. A message is one line, but where a request ran out of memory: lines below it say why."""


class Error(RuntimeError):
    """Something that lowtide could not do."""


class ConfigError(Error, ValueError):
    """The strategy or an option is unknown, or an option's value is refused."""


class StartedError(Error):
    """It is too late: CUDA is in use."""


class NoDriverError(Error):
    """NVIDIA's driver is not there, does not start, or is too old."""


class TorchError(Error):
    """PyTorch is not installed, too old, or has no CUDA."""


class OutOfMemoryError(Error):
    """The device has too little memory for what is to come back. Nothing is lost by it: free some, and try again.

    PyTorch's requests for memory raise `torch.OutOfMemoryError`, as they do without lowtide.
    """


class PausedError(Error):
    """The memory is away: its region is paused."""


class BackupError(Error):
    """Contents could not be kept or brought back. Nothing is lost by it, and the next attempt may work."""
