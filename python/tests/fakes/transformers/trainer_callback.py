"""`transformers.trainer_callback`."""

from collections.abc import Iterable


class TrainerCallback:
    """Has a hook for each event."""

    def on_init_end(self, args: object, state: object, control: object, **_: object) -> None: ...

    def on_train_begin(self, args: object, state: object, control: object, **_: object) -> None: ...

    def on_train_end(self, args: object, state: object, control: object, **_: object) -> None: ...

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None: ...

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None: ...


class CallbackHandler(TrainerCallback):
    """Calls the callbacks in their order. It does not tell them who it is."""

    def __init__(self, callbacks: Iterable[TrainerCallback]) -> None:
        self.callbacks = list(callbacks)

    def call_event(self, event: str, args: object, state: object, control: object, **more: object) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(args, state, control, **more)
