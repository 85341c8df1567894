//! Pointers that C passes to the exported functions: the only place that follows them.

use std::ffi::{CStr, c_char};

use crate::sys::CUresult;

/// A `T *` through which a call answers. Nothing is written unless the call succeeds.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

/// An [`Out`] that is not null.
pub(crate) struct Slot<T>(*mut T);

/// A `const T *` from which a call reads.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

/// A `const char *` that ends with a zero.
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl<T> Out<T> {
    /// Takes a pointer that came as another type, for calls whose answer has several.
    pub(crate) fn new(pointer: *mut T) -> Self {
        Self(pointer)
    }

    /// Returns the place for the answer.
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

    /// Answers if the caller wants to know.
    pub(crate) fn set_if_wanted(self, value: T) {
        if let Ok(slot) = self.required() {
            slot.set(value);
        }
    }
}

impl<T> Slot<T> {
    pub(crate) fn set(self, value: T) {
        // SAFETY: 1. `Out` can only come from a caller of an exported function, and not null: see
        // `required`. 2. CUDA's contract asks that caller for a pointer to a writable `T`.
        unsafe { self.0.write(value) }
    }

    /// Returns what is there before the answer, for calls that exchange.
    pub(crate) fn get(&self) -> T
    where
        T: Copy,
    {
        // SAFETY: as in `set`; calls that exchange ask for an initialized value.
        unsafe { self.0.read() }
    }

    /// Writes `values` one after the other, the first at the pointer.
    pub(crate) fn set_all(self, values: &[T])
    where
        T: Copy,
    {
        // SAFETY: 1. As in `set`. 2. The calls that use this are told by the caller how many values
        // there is room for, and pass no more. 3. `values` is ours, so the two do not overlap.
        unsafe {
            self.0
                .copy_from_nonoverlapping(values.as_ptr(), values.len())
        }
    }
}

impl<T: Copy> In<T> {
    /// Returns what the pointer points to.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for null.
    pub(crate) fn get(self) -> Result<T, CUresult> {
        Ok(self.all(1)?[0])
    }

    /// Returns the `count` values from the pointer on.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for null or for none.
    pub(crate) fn all(self, count: usize) -> Result<Vec<T>, CUresult> {
        if self.0.is_null() || count == 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        // SAFETY: 1. `In` can only come from a caller of an exported function, and is not null.
        // 2. CUDA's contract asks that caller for `count` readable values.
        Ok(unsafe { std::slice::from_raw_parts(self.0, count) }.to_vec())
    }
}

impl Text {
    /// Returns the text.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for null or for what is not UTF-8.
    pub(crate) fn get(&self) -> Result<&str, CUresult> {
        if self.0.is_null() {
            return Err(CUresult::INVALID_VALUE);
        }
        // SAFETY: 1. `Text` can only come from a caller of an exported function, and is not null.
        // 2. The contract asks that caller for a string that ends, and that stays until the return.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| CUresult::INVALID_VALUE)
    }
}
