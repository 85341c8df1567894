//! Stacks of Python functions, if this process has Python 3.11 or newer.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

/// A pointer to a Python object.
type Object = *mut c_void;

/// A position in a code object: the object's address and the offset in bytes.
pub(super) type Place = (usize, c_int);

macro_rules! functions {
    ($($field:ident: $name:literal $(or $earlier:literal)? fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of Python's C API that are called here.
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            /// Returns them if this process has all of them.
            fn find() -> Option<Functions> {
                Some(Functions { $($field: {
                    let address = find($name)$(.or_else(|| find($earlier)))??;
                    // SAFETY: Python's headers give the function of this name this type.
                    unsafe { mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($argument),*) $(-> $result)?>(address) }
                },)* })
            }
        }
    };
}

functions! {
    own_thread: c"PyGILState_GetThisThreadState" fn() -> *mut c_void;
    running_thread: c"PyThreadState_GetUnchecked" or c"_PyThreadState_UncheckedGet" fn() -> *mut c_void;
    take_lock: c"PyGILState_Ensure" fn() -> c_int;
    release_lock: c"PyGILState_Release" fn(c_int);
    is_finalizing: c"Py_IsFinalizing" or c"_Py_IsFinalizing" fn() -> c_int;
    frame: c"PyEval_GetFrame" fn() -> Object;
    frame_code: c"PyFrame_GetCode" fn(Object) -> Object;
    frame_back: c"PyFrame_GetBack" fn(Object) -> Object;
    frame_instruction: c"PyFrame_GetLasti" fn(Object) -> c_int;
    line: c"PyCode_Addr2Line" fn(Object, c_int) -> c_int;
    attribute: c"PyObject_GetAttrString" fn(Object, *const c_char) -> Object;
    text: c"PyUnicode_AsUTF8" fn(Object) -> *const c_char;
    keep: c"Py_IncRef" fn(Object);
    release: c"Py_DecRef" fn(Object);
    clear_error: c"PyErr_Clear" fn();
}

/// Returns a function of this process by name.
fn find(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: the name ends with a zero byte.
    NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) })
}

/// A frame of the thread's stack, while Python's lock (the GIL) is held.
pub(super) struct PythonFrame {
    python: &'static Functions,
    /// An owned reference.
    code: Object,
    /// The offset of the current instruction, in bytes.
    instruction: c_int,
}

/// Returns the result of `act` with this thread's frames, innermost first and at most `count_max`. Holds Python's
/// lock meanwhile. Returns `None` if Python does not know the thread.
pub(super) fn with_frames<R>(count_max: usize, act: impl FnOnce(&[PythonFrame]) -> R) -> Option<R> {
    static PYTHON: OnceLock<Option<Functions>> = OnceLock::new();
    let python = PYTHON.get_or_init(Functions::find).as_ref()?;
    // SAFETY: takes nothing, and may be called by any thread.
    let own = unsafe { (python.own_thread)() };
    // SAFETY: as above.
    if own.is_null() || unsafe { (python.is_finalizing)() } != 0 {
        return None;
    }
    // SAFETY: as above.
    let has_lock = unsafe { (python.running_thread)() } == own;
    let _lock = (!has_lock).then(|| Lock::take(python));
    let frames = frames(python, count_max);
    Some(act(&frames))
}

/// Python's lock.
struct Lock {
    python: &'static Functions,
    state: c_int,
}

impl Lock {
    fn take(python: &'static Functions) -> Lock {
        // SAFETY: Python is there and does not end, and this thread has a state in it.
        let state = unsafe { (python.take_lock)() };
        Lock { python, state }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // SAFETY: the state is what taking the lock returned, in this thread.
        unsafe { (self.python.release_lock)(self.state) }
    }
}

fn frames(python: &'static Functions, count_max: usize) -> Vec<PythonFrame> {
    let mut frames = Vec::new();
    // SAFETY: this thread has the lock. The answer is borrowed, and the frame runs while this does.
    let mut frame = unsafe { (python.frame)() };
    let mut is_borrowed = true;
    while !frame.is_null() {
        // SAFETY: the frame is alive: it runs in this thread. The answer is a reference of ours.
        let code = unsafe { (python.frame_code)(frame) };
        // SAFETY: as above.
        let instruction = unsafe { (python.frame_instruction)(frame) };
        frames.push(PythonFrame {
            python,
            code,
            instruction,
        });
        let mut outer = ptr::null_mut();
        if frames.len() < count_max {
            // SAFETY: as above. The answer is a reference of ours.
            outer = unsafe { (python.frame_back)(frame) };
        }
        if !is_borrowed {
            // SAFETY: it is a reference of ours, which is not used any more.
            unsafe { (python.release)(frame) };
        }
        (frame, is_borrowed) = (outer, false);
    }
    frames
}

impl PythonFrame {
    pub(super) fn place(&self) -> Place {
        (self.code.addr(), self.instruction)
    }

    /// Returns the function's name, its file and the line. Keeps the code object alive for ever.
    pub(super) fn describe_and_keep(&self) -> (String, String, u32) {
        // SAFETY: the lock is held, and the object is alive.
        unsafe { (self.python.keep)(self.code) };
        let name = self
            .text_of(c"co_qualname")
            .or_else(|| self.text_of(c"co_name"));
        let file = self.text_of(c"co_filename").unwrap_or_default();
        // SAFETY: the lock is held, and the object is alive: a frame's, which is a code object.
        let line = unsafe { (self.python.line)(self.code, self.instruction) };
        let line = u32::try_from(line).unwrap_or(0);
        (name.unwrap_or_default(), file, line)
    }

    fn attribute(&self, name: &CStr) -> Object {
        // SAFETY: the lock is held, the object is alive, and the name ends with a zero byte.
        unsafe { (self.python.attribute)(self.code, name.as_ptr()) }
    }

    fn text_of(&self, name: &CStr) -> Option<String> {
        let value = self.attribute(name);
        if value.is_null() {
            // SAFETY: the lock is held.
            unsafe { (self.python.clear_error)() };
            return None;
        }
        // SAFETY: the lock is held, and the object is alive.
        let text = unsafe { (self.python.text)(value) };
        // SAFETY: it is not null then, and ends with a zero byte, as long as the object lives.
        let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
        let text = text.map(|text| text.to_string_lossy().into_owned());
        // SAFETY: it is a reference of ours, which is not used any more.
        unsafe { (self.python.release)(value) };
        text
    }
}

impl Drop for PythonFrame {
    fn drop(&mut self) {
        // SAFETY: the lock is held, and it is a reference of ours.
        unsafe { (self.python.release)(self.code) }
    }
}
