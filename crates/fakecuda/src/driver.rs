//! The driver as a whole: its beginning, its version, and every exported function by name.

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

/// Suffixes of a name in the order in which CUDA added them, newest first.
const SUFFIXES: [&str; 3] = ["_v3", "_v2", ""];

/// Names that a later CUDA gave to another function, and the version that did.
const SINCE: [(&str, c_int); 2] = [
    ("cuStreamGetCaptureInfo_v3", 12030),
    ("cuEventElapsedTime_v2", 12080),
];

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
        // 1 and 2 choose among default streams; the functions here take both by their names.
        if flags > 2 {
            return Err(CUresult::INVALID_VALUE);
        }
        let candidates = SUFFIXES.iter().map(|suffix| format!("{symbol}{suffix}"));
        let exported: Vec<Call> = candidates.filter_map(|name| find_exported(&name)).collect();
        let is_old_enough = |&&(name, _): &&Call| {
            let since = SINCE.iter().find(|(known, _)| *known == name);
            since.is_none_or(|&(_, since)| since <= version)
        };
        // The manual: not found is an answer of its own, and a failure too.
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

/// Checks that each call that is to fail is exported: another would never fail.
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

/// Returns the function of exactly this name.
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
