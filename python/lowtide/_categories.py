"""What a program's memory is for, written into its recordings by the program itself."""

import contextlib
import ctypes
import functools
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from ._errors import Error
from ._install import import_torch, is_installed
from ._library import Status, check, error_of, library

VARIABLE = "LOWTIDE_CATEGORIES"
"""The variable with which `run --categories` makes a Python and its children categorize each model."""

_BACKWARD = json.dumps({"phase": "backward"})
_OPTIMIZER = json.dumps({"phase": "optimizer"})
_INPUTS = json.dumps({"category": "inputs"})
_KV_CACHE = json.dumps({"category": "kv_cache"})


class _Recorder(Protocol):
    """Where texts about memory go."""

    def recording(self) -> object:
        """Returns what identifies the recording in progress; something false if there is none."""

    def set(self, text: str) -> None:
        """Sets the text of this thread's events from now on."""

    def annotate(self, address: int, text: str) -> None:
        """Attaches a text to the allocation at an address. Does nothing if it is not the allocator's."""


class _Library:
    """lowtide's own recordings."""

    def recording(self) -> int:
        return _recording_number()

    def set(self, text: str) -> None:
        check(library().lowtide_set_metadata(text.encode()))

    def annotate(self, address: int, text: str) -> None:
        status = library().lowtide_annotate(address, text.encode())
        if status not in (Status.OK, Status.NOT_ALLOCATED):
            raise error_of(status, library().lowtide_last_error())


class _Torch:
    """PyTorch's history since 2.14. On lowtide, the shim passes the texts on to lowtide's recordings, too."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def recording(self) -> object:
        number = _recording_number() if is_installed() else 0
        has_history = self._torch._C._cuda_isHistoryEnabled()
        return (number, has_history) if number or has_history else None

    def set(self, text: str) -> None:
        self._torch.cuda.memory._set_memory_metadata(text)

    def annotate(self, address: int, text: str) -> None:
        # Another allocator may have made it, such as NCCL's.
        with contextlib.suppress(RuntimeError):
            self._torch.cuda.memory._annotate_memory(address, text)


class Categorization:
    """A model and optimizers whose memory is categorized, until `remove`."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder
        self._handles: list[Any] = []
        # What is annotated, in the recording in progress: each text's tensor, by its address.
        self._recording: object = None
        self._annotated: dict[str, int] = {}
        # The parameters and buffers of models, with what is said of each.
        self._kept: list[tuple[Any, str]] = []
        self._optimizers: list[Any] = []

    def remove(self) -> None:
        """Ends it: the hooks are removed. What is in recordings stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def add_model(self, model: Any) -> None:
        _thread.is_program = True
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self._kept.append((tensor, _text("parameters", *_split(name))))
        for path, module in model.named_modules():
            text = json.dumps({"module": _clean(path) or type(model).__name__})
            backward = json.dumps({"phase": "backward", **json.loads(text)})
            before, after = _enter_module(self._recorder, text, backward), _leave_module(self._recorder)
            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(after, always_call=True))
        for name, parameter in model.named_parameters():
            _names()[parameter] = _split(name)
            if parameter.requires_grad and parameter.is_leaf:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._after_gradient))
        self._handles.append(model.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True))
        self._handles.append(model.register_forward_hook(self._after_forward, with_kwargs=True))
        self._find_backward(model)

    def add_optimizer(self, optimizer: Any) -> None:
        self._optimizers.append(optimizer)
        self._handles.append(optimizer.register_step_pre_hook(self.before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def before_forward(self, model: Any, arguments: Any, named: Any) -> None:
        """What the hook of a model does before its forward pass."""
        self._before_forward(model, arguments, named)
        _enter_module(self._recorder, json.dumps({"module": type(model).__name__}), _BACKWARD)(model, arguments)

    def before_step(self, _optimizer: Any, _arguments: Any, _named: Any) -> None:
        """What the hook of an optimizer does before its step."""
        _thread.enter_anew(self._recorder, _OPTIMIZER)

    def _before_forward(self, _model: Any, arguments: Any, named: Any) -> None:
        if _is_compiling():
            return
        if not _thread.is_backward:
            _thread.is_program = True
            _thread.enter_anew(self._recorder, "")
        if not self._is_recording():
            return
        for tensor, text in self._kept:
            self._annotate_new(tensor, text)
        for optimizer in self._optimizers:
            self._annotate_state(optimizer)
        named = {name: value for name, value in named.items() if name != "past_key_values"}
        for tensor in _tensors((arguments, named)):
            if not tensor.requires_grad and tensor not in _names():
                self._annotate(tensor, _INPUTS)

    def _after_forward(self, _model: Any, _arguments: Any, named: Any, output: Any) -> None:
        if _is_compiling() or not self._is_recording():
            return
        cache = named.get("past_key_values")
        if cache is None:
            cache = getattr(output, "past_key_values", None)
        for tensor in _tensors(_cached(cache)):
            # Some models fill a cache when they train, too. Then it is what backward needs.
            if not tensor.requires_grad:
                self._annotate(tensor, _KV_CACHE)

    def _after_gradient(self, parameter: Any) -> None:
        if _is_compiling():
            return
        if parameter.is_cuda:
            _thread.begin_backward(self._recorder)
        if self._is_recording():
            self._annotate_gradient(parameter)

    def _after_step(self, optimizer: Any, _arguments: Any, _named: Any) -> None:
        _thread.enter_anew(self._recorder, "")
        if self._is_recording():
            self._annotate_state(optimizer)

    def _is_recording(self) -> bool:
        recording = self._recorder.recording()
        if recording != self._recording:
            self._recording = recording
            self._annotated.clear()
            if recording:
                self._annotate_gradients()
        return bool(recording)

    def _annotate_gradients(self) -> None:
        """Annotates the gradients that earlier backward passes left."""
        for tensor, _ in self._kept:
            if tensor.is_leaf:
                self._annotate_gradient(tensor)

    def _annotate_gradient(self, parameter: Any) -> None:
        if parameter.grad is not None:
            self._annotate(parameter.grad, _text("gradients", *_names().get(parameter, ("", ""))))

    def _annotate_state(self, optimizer: Any) -> None:
        for parameter, state in optimizer.state.items():
            path, name = _names().get(parameter, ("", ""))
            for key, value in state.items():
                for tensor in _tensors(value):
                    self._annotate_new(tensor, _text("optimizer_state", path, f"{name}.{key}"))

    def _annotate_new(self, tensor: Any, text: str) -> None:
        """Annotates a tensor that stays, if this recording has it not at this address already."""
        for address in _addresses(tensor):
            if self._annotated.get(text) != address:
                self._annotated[text] = address
                self._recorder.annotate(address, text)

    def _annotate(self, tensor: Any, text: str) -> None:
        for address in _addresses(tensor):
            self._recorder.annotate(address, text)

    def _find_backward(self, model: Any) -> None:
        """Runs a backward pass of one number, so that the thread of backward passes is known before the first one."""
        torch = sys.modules["torch"]
        for device in {parameter.device for parameter in model.parameters() if parameter.is_cuda}:
            if not torch.cuda.is_current_stream_capturing():
                with torch.inference_mode(False), torch.enable_grad():
                    probe = torch.zeros((), device=device, requires_grad=True)
                    probe.register_post_accumulate_grad_hook(lambda _: _thread.begin_backward(self._recorder))
                    probe.backward()


class _Thread(threading.local):
    """What a thread runs."""

    is_program = False
    """Whether it has run a forward pass of a model other than for a backward pass."""

    is_backward = False
    """Whether it runs backward passes, and nothing else."""

    def __init__(self) -> None:
        # The texts of the modules that run, outermost first.
        self._texts: list[str] = []

    def enter(self, recorder: _Recorder, text: str) -> None:
        self._texts.append(text)
        recorder.set(text)

    def leave(self, recorder: _Recorder) -> None:
        if self._texts:
            self._texts.pop()
        recorder.set(self._texts[-1] if self._texts else self._outermost())

    def enter_anew(self, recorder: _Recorder, text: str) -> None:
        """Sets the text, whatever ran before: a step that raised was not left."""
        self._texts.clear()
        recorder.set(text)

    def begin_backward(self, recorder: _Recorder) -> None:
        """Notes that autograd runs here, unless the program does, too."""
        if not self.is_program and not self.is_backward:
            self.is_backward = True
            recorder.set(_BACKWARD)

    def _outermost(self) -> str:
        return _BACKWARD if self.is_backward else ""


_thread = _Thread()


def categorize(model: Any, *optimizers: Any) -> Categorization:
    """Writes into recordings what memory a model and its optimizers hold, by the path of each `nn.Module`.

    From now on, recordings have the module that made each allocation, and which of them are parameters and buffers,
    gradients, optimizer state, inputs, and the KV cache of transformers' models. `lowtide summary` and `lowtide report`
    then need no call stacks. A recording may begin before or after. Each forward pass of a module takes some
    microseconds longer. In code that `torch.compile` compiled, there are no modules.

    It works with lowtide's recordings, and with PyTorch's own history since PyTorch 2.14. Returns a handle, whose
    `remove` removes the hooks. Raises `TorchError` without PyTorch, and `Error` if neither records.
    """
    categorization = Categorization(_recorder_of(import_torch()))
    categorization.add_model(model)
    for optimizer in optimizers:
        categorization.add_optimizer(optimizer)
    return categorization


def categorize_all_if_asked() -> None:
    """Categorizes every model and optimizer of this process, once it is used, if `LOWTIDE_CATEGORIES` is set."""
    if os.environ.get(VARIABLE, "") in ("", "0"):
        return
    torch = import_torch()
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    recorder = _recorder_of(torch)
    known: weakref.WeakSet[Any] = weakref.WeakSet()

    def before_forward(module: Any, arguments: Any) -> None:
        # A module that was not known runs by itself: those in it run later.
        if _is_compiling() or module in known:
            return
        known.update(module.modules())
        if any(True for _ in module.parameters()):
            categorization = Categorization(recorder)
            categorization.add_model(module)
            categorization.before_forward(module, arguments, {})

    def before_step(optimizer: Any, arguments: Any, named: Any) -> None:
        if optimizer not in known:
            known.add(optimizer)
            categorization = Categorization(recorder)
            categorization.add_optimizer(optimizer)
            categorization.before_step(optimizer, arguments, named)

    register_module_forward_pre_hook(before_forward)
    register_optimizer_step_pre_hook(before_step)


@functools.cache
def _names() -> Any:
    """Returns the module's path and the name of each parameter of a model that was categorized."""
    # Tensors compare their elements, so they cannot be keys of other dicts.
    return sys.modules["torch"].utils.weak.WeakTensorKeyDictionary()


def _recorder_of(torch: Any) -> _Recorder:
    memory = torch.cuda.memory
    if hasattr(memory, "_annotate_memory") and memory._memory_metadata_supported():
        return _Torch(torch)
    if is_installed():
        return _Library()
    raise Error("categories need PyTorch on lowtide, as by `lowtide run`, or PyTorch 2.14 or newer")


def _recording_number() -> int:
    number = ctypes.c_uint64()
    check(library().lowtide_recording(ctypes.byref(number)))
    return number.value


def _is_compiling() -> bool:
    # The compiler sees a constant, and leaves the rest of the hook out.
    return bool(sys.modules["torch"].compiler.is_compiling())


def _enter_module(recorder: _Recorder, text: str, backward: str) -> Callable[[Any, Any], None]:
    """Returns the hook before a module's forward pass. `backward` is the text of one that a backward pass runs."""

    def before(_module: Any, _arguments: Any) -> None:
        if not _is_compiling():
            _thread.enter(recorder, backward if _thread.is_backward else text)

    return before


def _leave_module(recorder: _Recorder) -> Callable[[Any, Any, Any], None]:
    def after(_module: Any, _arguments: Any, _output: Any) -> None:
        if not _is_compiling():
            _thread.leave(recorder)

    return after


@functools.cache
def _text(category: str, path: str, name: str) -> str:
    return json.dumps({"category": category, "module": path, "name": name})


def _split(name: str) -> tuple[str, str]:
    path, _, last = _clean(name).rpartition(".")
    return path, last


def _clean(path: str) -> str:
    """Returns a path without the modules that `torch.compile` puts around others."""
    return path.replace("_orig_mod.", "").removesuffix("_orig_mod")


def _tensors(value: Any) -> list[Any]:
    """Returns the tensors on a GPU in tuples, lists and dicts."""
    torch = sys.modules["torch"]
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda]


def _cached(cache: Any) -> Iterable[Any]:
    """Returns the tensors in a cache of transformers, of any release."""
    if isinstance(cache, (tuple, list)):
        return cache
    layers = getattr(cache, "layers", ())
    of_layers = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    return [*of_layers, *(getattr(cache, name, ()) for name in ("key_cache", "value_cache"))]


def _addresses(tensor: Any) -> Iterator[int]:
    """Returns the addresses of a tensor's storages on a GPU. Tensors of PyTorch's subclasses may have several."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _addresses(getattr(tensor, name))
    elif tensor.is_cuda and tensor.untyped_storage().nbytes() > 0:
        yield from _address(tensor)


def _address(tensor: Any) -> list[int]:
    # A tensor of a tracer has no memory, and raises.
    with contextlib.suppress(RuntimeError):
        return [tensor.untyped_storage().data_ptr()]
    return []
