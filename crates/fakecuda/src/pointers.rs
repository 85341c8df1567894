//! Pointers that C passes to the exported functions. Only this file dereferences them.

use std::ffi::{CStr, c_char};
use std::ptr;

use crate::sys::CUresult;

/// A `T *` that a call writes its result through. Nothing is written unless the call succeeds.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

/// An [`Out`] that is not null.
pub(crate) struct Slot<T>(*mut T);

/// A `const T *` that a call reads from.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

/// A `const char *` to a zero-terminated string.
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl<T> Out<T> {
    pub(crate) const NULL: Self = Self(ptr::null_mut());

    /// Wraps a pointer that was passed with another type, for calls whose result has several types.
    pub(crate) fn new(pointer: *mut T) -> Self {
        Self(pointer)
    }

    /// Returns the pointer if it is not null.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for null.
    pub(crate) fn required(self) -> Result<Slot<T>, CUresult> {
        if self.0.is_null() {
            return Err(CUresult::INVALID_VALUE);
        }
        Ok(Slot(self.0))
    }

    /// Writes the value unless the pointer is null.
    pub(crate) fn set_if_wanted(self, value: T) {
        if let Ok(slot) = self.required() {
            slot.set(value);
        }
    }
}

impl<T> Slot<T> {
    pub(crate) fn set(self, value: T) {
        // SAFETY: 1. `Out` can only come from a caller of an exported function, and is not null: see `required`. 2.
        // CUDA's contract requires that caller to pass a pointer to a writable `T`.
        unsafe { self.0.write(value) }
    }

    /// Returns the current value, for calls that exchange values.
    pub(crate) fn get(&self) -> T
    where
        T: Copy,
    {
        // SAFETY: as in `set`; calls that exchange values require an initialized one.
        unsafe { self.0.read() }
    }

    /// Writes `values` consecutively, starting at the pointer.
    pub(crate) fn set_all(self, values: &[T])
    where
        T: Copy,
    {
        // SAFETY: 1. As in `set`. 2. The caller says how many values there is room for, and the calls that use this
        // write no more. 3. `values` is ours, so the two do not overlap.
        unsafe {
            self.0
                .copy_from_nonoverlapping(values.as_ptr(), values.len())
        }
    }
}

impl<T: Copy> In<T> {
    /// Returns the value that the pointer points to.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for null.
    pub(crate) fn get(self) -> Result<T, CUresult> {
        Ok(self.all(1)?[0])
    }

    /// Returns `count` values, starting at the pointer.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for null or a count of 0.
    pub(crate) fn all(self, count: usize) -> Result<Vec<T>, CUresult> {
        if self.0.is_null() || count == 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        // SAFETY: 1. `In` can only come from a caller of an exported function, and is not null. 2. CUDA's contract
        // requires that caller to pass `count` readable values.
        Ok(unsafe { std::slice::from_raw_parts(self.0, count) }.to_vec())
    }
}

impl Text {
    /// Returns the text.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for null or text that is not UTF-8.
    pub(crate) fn get(&self) -> Result<&str, CUresult> {
        if self.0.is_null() {
            return Err(CUresult::INVALID_VALUE);
        }
        // SAFETY: 1. `Text` can only come from a caller of an exported function, and is not null. 2. The contract
        // requires that caller to pass a zero-terminated string that stays valid until the return.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| CUresult::INVALID_VALUE)
    }
}
