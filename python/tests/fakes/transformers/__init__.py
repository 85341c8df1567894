"""As much of Hugging Face's Transformers as calls callbacks: a `Trainer` in the order of 4.40 to 5.24."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

from .trainer_callback import CallbackHandler, TrainerCallback


class Integration(TrainerCallback):
    """What sends the logs to W&B, TensorBoard or MLflow."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, args: object, state: SimpleNamespace, control: object, logs: dict[str, float]) -> None:
        if state.is_world_process_zero:
            self.seen.append({"step": state.global_step, **logs})


class Trainer:
    """Trains by calling a function with the number of each step, from 0, and logs the loss every second step."""

    def __init__(
        self,
        step: Callable[[int], None],
        callbacks: Sequence[TrainerCallback],
        steps: int = 6,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.integration = Integration()
        self.step = step
        self.args = SimpleNamespace(output_dir="out", process_index=rank, world_size=ranks)
        self.state = SimpleNamespace(global_step=0, max_steps=steps, log_history=[], is_world_process_zero=rank == 0)
        self.control = SimpleNamespace(should_training_stop=False)
        # The integrations come before the callbacks of the user.
        self.handler = CallbackHandler([self.integration, *callbacks])
        self._call("on_init_end")

    def train(self) -> dict[str, float]:
        self.state.global_step, self.control.should_training_stop = 0, False
        self._call("on_train_begin")
        while not self.control.should_training_stop:
            self._call("on_step_begin")
            self.step(self.state.global_step)
            self.state.global_step += 1
            self._call("on_step_end")
            self.control.should_training_stop = self.state.global_step == self.state.max_steps
            if self.state.global_step % 2 == 0:
                self.log({"loss": 0.5})
        metrics = {"train_loss": 0.5}
        self.log(metrics)
        self._call("on_train_end")
        return metrics

    def log(self, logs: dict[str, float]) -> None:
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._call("on_log", logs=logs)

    def _call(self, event: str, **more: object) -> None:
        self.handler.call_event(event, self.args, self.state, self.control, **more)
