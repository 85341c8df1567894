"""`lightning.pytorch`: a `Trainer` in the order of 1.9 to 2.6."""

from collections.abc import Callable, Sequence


class Callback:
    """Has a hook for each event; these are the ones that are called here."""

    def on_train_start(self, trainer: object, pl_module: object) -> None: ...

    def on_train_end(self, trainer: object, pl_module: object) -> None: ...

    def on_exception(self, trainer: object, pl_module: object, exception: BaseException) -> None: ...


class Logger:
    """What sends figures to W&B, TensorBoard or MLflow."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.seen.append({"step": step, **metrics})


class Trainer:
    """Trains by calling a function with the number of each batch, from 0. So many batches are a step."""

    default_root_dir = "out"
    log_every_n_steps = 2

    def __init__(
        self,
        callbacks: Sequence[Callback],
        accumulate_grad_batches: int = 1,
        max_steps: int = 6,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.callbacks = callbacks
        self.accumulate_grad_batches = accumulate_grad_batches
        self.max_steps = max_steps
        self.global_rank, self.world_size, self.is_global_zero = rank, ranks, rank == 0
        self.global_step = 0
        self.loggers = [Logger(), Logger()]

    def fit(self, train: Callable[[int], None]) -> None:
        try:
            self._call("on_train_start")
            for batch in range(self.max_steps * self.accumulate_grad_batches):
                self._call("on_train_batch_start", None, batch)
                train(batch)
                self.global_step = (batch + 1) // self.accumulate_grad_batches
                self._call("on_train_batch_end", None, None, batch)
            self._call("on_train_end")
        except BaseException as error:
            self._call("on_exception", error)
            raise

    def _call(self, event: str, *arguments: object) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, None, *arguments)
