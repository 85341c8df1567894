"""A callback for Lightning, of the package `lightning` or `pytorch_lightning`:

from lowtide.lightning import MemoryCallback

trainer = Trainer(callbacks=[MemoryCallback(record_steps=range(10, 13))])
"""

import os
import sys
from typing import Any

from ._callbacks import TrainingMemory, harmless, take_peaks

# A program may have both. Each takes the other's callbacks.
if "pytorch_lightning" in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback


class MemoryCallback(Callback):  # type: ignore[misc]
    """Logs a training's GPU memory to every logger of the trainer, every `log_every_n_steps` steps.

    Figures and arguments are those of `lowtide.transformers.MemoryCallback`. The recording's default directory is
    `default_root_dir`. The categories are logged as soon as the recording ends.
    """

    def __init__(self, record_steps: range | None = None, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._memory = TrainingMemory(record_steps, path)
        self._intervals = 0

    @harmless
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins the figures."""
        self._intervals = _intervals(trainer)
        self._memory.begin(trainer.default_root_dir, trainer.global_rank, trainer.world_size)

    @harmless
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begins a step."""
        self._memory.begin_step(trainer.global_step)

    @harmless
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Ends a step, and logs what there is to log."""
        self._memory.end_step(trainer.global_step)
        before, self._intervals = self._intervals, _intervals(trainer)
        if trainer.is_global_zero:
            _log(trainer, {**self._memory.categories(), **(take_peaks() if self._intervals > before else {})})

    @harmless
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the recording, and logs its categories if they are not logged yet."""
        self._memory.end()
        if trainer.is_global_zero:
            _log(trainer, self._memory.categories())

    @harmless
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends the recording."""
        self._memory.end()


def _intervals(trainer: Any) -> int:
    """Returns how often the trainer was to log until now. With gradient accumulation, several batches are one step."""
    return trainer.global_step // trainer.log_every_n_steps if trainer.log_every_n_steps else 0


def _log(trainer: Any, figures: dict[str, float]) -> None:
    for logger in trainer.loggers if figures else ():
        # Lightning counts from 0. Its `log` would put each figure on the GPU first.
        logger.log_metrics(figures, step=trainer.global_step - 1)
