//! The driver as a whole: its initialization, its version, and the list of exported functions.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use crate::calls::{self, Outcome, driver_calls};
use crate::pointers::{Out, Text};
use crate::sys::*;
use crate::{
    allocations, attributes, capture, context, copies, device, errors, events, host_memory,
    sharing, state, streams, virtual_memory,
};

type Call = (&'static str, *const c_void);

/// The suffixes of function names, newest first, in the reverse order in which CUDA added them.
const SUFFIXES: [&str; 3] = ["_v3", "_v2", ""];

/// A name that a later CUDA version gave to another function, and that version.
const SINCE: (&str, c_int) = ("cuStreamGetCaptureInfo_v3", 12030);

driver_calls! {
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(CUresult::INVALID_VALUE);
        }
        check_faults()?;
        state::start()
    }

    fn cuDriverGetVersion(version: Out<c_int>) {
        version.required()?.set(DRIVER_VERSION);
        Ok(())
    }

    fn cuGetProcAddress_v2(
        symbol: Text,
        function: Out<*const c_void>,
        version: c_int,
        flags: u64,
        status: Out<c_uint>,
    ) {
        let out = function.required()?;
        let symbol = symbol.get()?;
        // Flags 1 and 2 select the kind of default stream. The functions here distinguish them by their handles.
        if flags > 2 {
            return Err(CUresult::INVALID_VALUE);
        }
        let candidates = SUFFIXES.iter().map(|suffix| format!("{symbol}{suffix}"));
        let exported: Vec<Call> = candidates.filter_map(|name| find_exported(&name)).collect();
        let is_old_enough = |&&(name, _): &&Call| name != SINCE.0 || SINCE.1 <= version;
        // The manual: "not found" has its own status and is an error as well.
        let found = exported.iter().find(is_old_enough);
        out.set(found.map_or(ptr::null(), |&(_, address)| address));
        status.set_if_wanted(match found {
            Some(_) => CU_GET_PROC_ADDRESS_SUCCESS,
            None if exported.is_empty() => CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND,
            None => CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT,
        });
        found.map(drop).ok_or(CUresult::NOT_FOUND)
    }
}

/// Checks that every call that is to fail is exported. Otherwise the failure would never happen.
fn check_faults() -> Outcome {
    let is_unknown = |(name, _): &(String, u64)| find_exported(name).is_none();
    match calls::faults().into_iter().find(is_unknown) {
        None => Ok(()),
        Some((name, nth)) => {
            eprintln!("fakecuda: FAKECUDA_FAIL: `{name}:{nth}` names no function that is exported");
            Err(CUresult::INVALID_VALUE)
        }
    }
}

/// Returns the function with exactly this name.
pub(crate) fn find_exported(name: &str) -> Option<Call> {
    let files = [
        CALLS,
        allocations::CALLS,
        attributes::CALLS,
        capture::CALLS,
        context::CALLS,
        copies::CALLS,
        device::CALLS,
        errors::CALLS,
        events::CALLS,
        host_memory::CALLS,
        sharing::CALLS,
        streams::CALLS,
        virtual_memory::CALLS,
    ];
    let mut calls = files.into_iter().flatten();
    calls.find(|(known, _)| *known == name).copied()
}
