"""What a program's memory is for, written into its recordings by the program itself."""

import contextlib
import ctypes
import functools
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, Protocol

from ._errors import Error, first_line, report_line
from ._install import import_torch, is_installed
from ._library import Status, check, error_of, library

VARIABLE = "LOWTIDE_CATEGORIES"
"""The variable with which `run --categories` makes a Python and its children categorize each model."""

_PROGRAM = json.dumps({"phase": "program"})
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
        # It fails in a forked child alone, in which nothing is recorded.
        library().lowtide_set_metadata(text.encode())

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
            self._torch._C._cuda_annotateMemory(address, text)


_P = ParamSpec("_P")


def _harmless(hook: Callable[Concatenate[Any, _P], None]) -> Callable[Concatenate[Any, _P], None]:
    """Returns a categorization's hook whose errors never reach the program: the first one ends it, and is printed."""

    @functools.wraps(hook)
    def call(categorization: Any, /, *arguments: _P.args, **named: _P.kwargs) -> None:
        # The compiler sees a constant, and leaves the rest of the hook out.
        if sys.modules["torch"].compiler.is_compiling():
            return
        try:
            hook(categorization, *arguments, **named)
        except Exception as error:
            categorization.fail(error)

    return call


class Categorization:
    """A model and optimizers whose memory is categorized, until `remove`."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder
        self._handles: list[Any] = []
        self._recording: object = None
        # Weak: a model is freed when the program drops it, as without this.
        self._models: list[weakref.ref[Any]] = []
        self._optimizers: list[weakref.ref[Any]] = []

    def remove(self) -> None:
        """Ends it: the hooks are removed. What is in recordings stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for model in _alive(self._models):
            _hooked().difference_update(model.modules())
        self._recorder.set("")

    def fail(self, error: Exception) -> None:
        """Ends it, and prints why."""
        self.remove()
        report_line(f"the program goes on, but its memory is not categorized: {first_line(error)}")

    @_harmless
    def enter_first(self, model: Any, arguments: Any) -> None:
        """Begins the forward pass in which a model was added, for which its own hooks are too late."""
        self.before_forward(model, arguments, {})
        # Otherwise nothing would leave it.
        if self._handles:
            _thread.enter(self._recorder, json.dumps({"module": type(model).__name__}))

    def add_model(self, model: Any) -> None:
        """Adds a model, whose forward passes are then followed."""
        self._models.append(weakref.ref(model))
        for path, module in model.named_modules():
            # A part of the model may be categorized already.
            if module not in _hooked():
                _hooked().add(module)
                text = json.dumps({"module": _clean(path) or type(model).__name__})
                self._handles.append(module.register_forward_pre_hook(self._enter_module(text)))
                self._handles.append(module.register_forward_hook(self._leave_module, always_call=True))
        for name, parameter in model.named_parameters():
            _names()[parameter] = _split(name)
            if parameter.requires_grad and parameter.is_leaf:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._after_gradient))
        self._handles.append(model.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True))
        self._handles.append(model.register_forward_hook(self._after_forward, with_kwargs=True))
        _find_backward(self._recorder, model)
        _thread.enter_anew(self._recorder, _PROGRAM)

    def add_optimizer(self, optimizer: Any) -> None:
        """Adds an optimizer, whose steps are then followed."""
        self._optimizers.append(weakref.ref(optimizer))
        self._handles.append(optimizer.register_step_pre_hook(self.before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))

    @_harmless
    def before_forward(self, _model: Any, arguments: Any, named: Any) -> None:
        """Runs before a model's forward pass."""
        if _thread.is_in_module():
            return
        # A step may have other memory than the last one: a model may have been offloaded in between.
        if sys.modules["torch"].is_grad_enabled():
            self._recording = None
        if not self._is_recording():
            return
        tensors = _tensors((arguments, {name: value for name, value in named.items() if name != "past_key_values"}))
        for tensor in tensors:
            if not tensor.requires_grad and tensor not in _names():
                self._annotate(tensor, _INPUTS)

    @_harmless
    def _after_forward(self, _model: Any, _arguments: Any, named: Any, output: Any) -> None:
        if not self._is_recording():
            return
        cache = named.get("past_key_values")
        if cache is None:
            cache = getattr(output, "past_key_values", None)
        for tensor in _tensors(_cached(cache)):
            # Some models fill a cache when they train, too. Then it is what backward needs.
            if not tensor.requires_grad:
                self._annotate(tensor, _KV_CACHE)

    @_harmless
    def _after_gradient(self, parameter: Any) -> None:
        if parameter.is_cuda and not _thread.is_in_module():
            self._recorder.set(_BACKWARD)
        if self._is_recording():
            self._annotate_gradient(parameter)

    @_harmless
    def before_step(self, _optimizer: Any, _arguments: Any, _named: Any) -> None:
        """Runs before an optimizer's step."""
        _thread.enter_anew(self._recorder, _OPTIMIZER)

    @_harmless
    def _after_step(self, optimizer: Any, _arguments: Any, _named: Any) -> None:
        _thread.enter_anew(self._recorder, _PROGRAM)
        if self._is_recording():
            self._annotate_state(optimizer)

    def _enter_module(self, text: str) -> Callable[[Any, Any], None]:
        """Returns the hook before the forward pass of a module that this text names."""
        backward = json.dumps({"phase": "backward", **json.loads(text)})

        @_harmless
        def before(_: Categorization, _module: Any, _arguments: Any) -> None:
            _thread.enter(self._recorder, backward if _is_in_backward() else text)

        return functools.partial(before, self)

    @_harmless
    def _leave_module(self, _module: Any, _arguments: Any, _output: Any) -> None:
        _thread.leave(self._recorder)

    def _is_recording(self) -> bool:
        """Returns whether something is recorded. A recording that is new, or taken for new, is told what is there."""
        recording = self._recorder.recording()
        is_new, self._recording = recording != self._recording, recording
        if recording and is_new:
            self._annotate_all()
        return bool(recording)

    def _annotate_all(self) -> None:
        for model in _alive(self._models):
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                self._annotate(tensor, _text("parameters", *_split(name)))
                if tensor.is_leaf:
                    self._annotate_gradient(tensor)
        for optimizer in _alive(self._optimizers):
            self._annotate_state(optimizer)

    def _annotate_gradient(self, parameter: Any) -> None:
        if parameter.grad is not None:
            self._annotate(parameter.grad, _text("gradients", *_names().get(parameter, ("", ""))))

    def _annotate_state(self, optimizer: Any) -> None:
        for parameter, state in optimizer.state.items():
            path, name = _names().get(parameter, ("", ""))
            for key, value in state.items():
                for tensor in _tensors(value):
                    self._annotate(tensor, _text("optimizer_state", path, f"{name}.{key}"))

    def _annotate(self, tensor: Any, text: str) -> None:
        for address in _addresses(tensor):
            self._recorder.annotate(address, text)


class _Thread(threading.local):
    """What a thread runs."""

    def __init__(self) -> None:
        # The texts of the modules that run, outermost first.
        self._texts: list[str] = []

    def is_in_module(self) -> bool:
        return bool(self._texts)

    def enter(self, recorder: _Recorder, text: str) -> None:
        self._texts.append(text)
        recorder.set(text)

    def leave(self, recorder: _Recorder) -> None:
        if self._texts:
            self._texts.pop()
        outermost = _BACKWARD if _is_in_backward() else _PROGRAM
        recorder.set(self._texts[-1] if self._texts else outermost)

    def enter_anew(self, recorder: _Recorder, text: str) -> None:
        """Sets the text, whatever ran before."""
        self._texts.clear()
        recorder.set(text)


_thread = _Thread()


def _find_backward(recorder: _Recorder, model: Any) -> None:
    """Runs a backward pass of one number, so that the thread of backward passes is known before the first one."""
    torch = sys.modules["torch"]
    for device in {parameter.device for parameter in model.parameters() if parameter.is_cuda}:
        if not torch.cuda.is_current_stream_capturing():
            with torch.inference_mode(False), torch.enable_grad():
                probe = torch.zeros((), device=device, requires_grad=True)
                probe.register_post_accumulate_grad_hook(lambda _: recorder.set(_BACKWARD))
                probe.backward()


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

    def begin(add: Callable[[Categorization, Any], None], what: Any) -> Categorization:
        categorization = Categorization(recorder)
        try:
            add(categorization, what)
        except Exception as error:
            categorization.fail(error)
        return categorization

    def before_forward(module: Any, arguments: Any) -> None:
        # A module that was not known runs by itself: those in it run later.
        if torch.compiler.is_compiling() or module in known:
            return
        known.update(module.modules())
        if module not in _hooked() and any(True for _ in module.parameters()):
            begin(Categorization.add_model, module).enter_first(module, arguments)

    def before_step(optimizer: Any, _arguments: Any, _named: Any) -> None:
        if not torch.compiler.is_compiling() and optimizer not in known:
            known.add(optimizer)
            begin(Categorization.add_optimizer, optimizer).before_step(optimizer, (), {})

    register_module_forward_pre_hook(before_forward)
    register_optimizer_step_pre_hook(before_step)


@functools.cache
def _names() -> Any:
    """Returns the module's path and the name of each parameter of a model that was categorized."""
    # Tensors compare their elements, so they cannot be keys of other dicts.
    return sys.modules["torch"].utils.weak.WeakTensorKeyDictionary()


@functools.cache
def _hooked() -> "weakref.WeakSet[Any]":
    """Returns the modules that have hooks."""
    return weakref.WeakSet()


def _alive(references: Iterable["weakref.ref[Any]"]) -> list[Any]:
    return [referent for reference in references if (referent := reference()) is not None]


def _is_in_backward() -> bool:
    """Returns whether this thread runs a backward pass, as while checkpointing computes a module again."""
    return int(sys.modules["torch"]._C._current_graph_task_id()) != -1


def _recorder_of(torch: Any) -> _Recorder:
    memory = torch.cuda.memory
    if hasattr(torch._C, "_cuda_annotateMemory") and memory._memory_metadata_supported():
        return _Torch(torch)
    if is_installed():
        return _Library()
    raise Error("categories need PyTorch on lowtide, as by `lowtide run`, or PyTorch 2.14 or newer")


def _recording_number() -> int:
    number = ctypes.c_uint64()
    check(library().lowtide_recording(ctypes.byref(number)))
    return number.value


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
    # A cache of an encoder and a decoder has two others.
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    of_parts = [tensor for part in parts if part is not None for tensor in _cached(part)]
    return [*of_layers, *of_parts, *(getattr(cache, name, ()) for name in ("key_cache", "value_cache"))]


def _addresses(tensor: Any) -> list[int]:
    """Returns the addresses of a tensor's storages on a GPU. Tensors of PyTorch's subclasses may have several."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [address for part in inner for address in _addresses(part)]
    # Sparse tensors, and those of tracers, have no storage.
    with contextlib.suppress(RuntimeError, NotImplementedError):
        if tensor.is_cuda and tensor.untyped_storage().nbytes() > 0:
            return [tensor.untyped_storage().data_ptr()]
    return []
