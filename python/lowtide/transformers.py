"""A callback for Hugging Face's `Trainer`:

from lowtide.transformers import MemoryCallback

trainer = Trainer(model, args, callbacks=[MemoryCallback(record_steps=range(10, 13))])
"""

import os
import sys
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from ._callbacks import TrainingMemory, harmless, take_peaks
from ._errors import Error


class MemoryCallback(TrainerCallback):  # type: ignore[misc]
    """Logs a training's GPU memory with each loss, to every integration of the trainer: W&B, TensorBoard, MLflow, …

    - `memory/peak_allocated_gib`, `memory/peak_reserved_gib`: the peaks since the last loss.
    - `memory/fragmentation_percent`: the part of the peak of reserved bytes that is above the peak of live bytes.

    Each log starts PyTorch's peaks (`torch.cuda.max_memory_allocated`) anew. If a process has several devices, the
    figures are those of the device that reserved most.

    `record_steps` is a range of steps, counted from 0. Their memory events are recorded to `path`. The default is
    `memory.pickle` in the output directory, or `memory.lowtide` if the job runs on lowtide. In a job of several ranks,
    each has a file, such as `memory.rank3.pickle`. The next loss is logged with what each category holds at the peak of
    the recording: `memory/categories/parameters_gib`, … A training that raises leaves its recording, too.

    If any of this fails, a line on standard error says why, and the training goes on.

    Raises `ValueError` if `record_steps` is no range, or one that leaves steps out.
    """

    def __init__(self, record_steps: range | None = None, path: str | os.PathLike[str] | None = None) -> None:
        self._memory = TrainingMemory(record_steps, path)

    @harmless
    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Makes this the first callback."""
        _put_first(self)

    @harmless
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begins the figures."""
        _put_first(self)
        self._memory.begin(args.output_dir, args.process_index, args.world_size)

    @harmless
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begins a step."""
        self._memory.begin_step(state.global_step)

    @harmless
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends a step."""
        self._memory.end_step(state.global_step)

    @harmless
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Adds the figures to a loss."""
        if control.should_training_stop:
            # Nothing is logged after this.
            self._memory.end()
        # A search for hyperparameters adds up all that an evaluation logs.
        if state.is_world_process_zero and not logs.keys().isdisjoint(("loss", "train_loss")):
            figures = {**self._memory.categories(), **(take_peaks() if "loss" in logs else {})}
            logs.update(figures)
            state.log_history[-1].update(figures)

    @harmless
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the recording."""
        self._memory.end()


def _put_first(callback: MemoryCallback) -> None:
    """Makes a callback the first of the trainer that calls it, so that all others see what it adds to the logs.

    Otherwise the integrations come before a user's callbacks. `Trainer` gives its callbacks no reference to itself.
    """
    frame = sys._getframe()
    while not isinstance(frame.f_locals.get("self"), CallbackHandler):
        if frame.f_back is None:
            raise Error("the integrations of this trainer do not see the memory: it has no CallbackHandler")
        frame = frame.f_back
    callbacks = frame.f_locals["self"].callbacks
    # The handler goes through this list just now. What follows the callback stays where it is.
    callbacks.insert(0, callbacks.pop(callbacks.index(callback)))
