//! CUDA's error codes, which are the same for the driver and the runtime.

use std::ffi::c_int;

pub(super) const SUCCESS: c_int = 0;
pub(super) const INVALID_VALUE: c_int = 1;
pub(super) const OUT_OF_MEMORY: c_int = 2;
pub(super) const NO_DEVICE: c_int = 100;
pub(super) const ILLEGAL_STATE: c_int = 401;
pub(super) const NOT_SUPPORTED: c_int = 801;
pub(super) const STREAM_CAPTURE_UNSUPPORTED: c_int = 900;
pub(super) const STREAM_CAPTURE_WRONG_THREAD: c_int = 910;
pub(super) const UNKNOWN: c_int = 999;
