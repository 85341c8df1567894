//! Error codes as text.

use std::ffi::CStr;
use std::ptr;

use crate::calls::{Outcome, driver_calls};
use crate::pointers::Out;
use crate::sys::{CUresult, StaticText};

driver_calls! {
    fn cuGetErrorName(code: CUresult, text: Out<StaticText>) {
        describe(code, text, |&(_, name, _)| name)
    }

    fn cuGetErrorString(code: CUresult, text: Out<StaticText>) {
        describe(code, text, |&(_, _, description)| description)
    }
}

type Entry = (CUresult, &'static CStr, &'static CStr);

/// Writes one text of an error code. As the manual says, an unknown code sets the text to null and is an error.
fn describe(
    code: CUresult,
    text: Out<StaticText>,
    pick: impl Fn(&Entry) -> &'static CStr,
) -> Outcome {
    let out = text.required()?;
    let found = CUresult::ALL.iter().find(|(known, ..)| *known == code);
    out.set(found.map_or(ptr::null(), |entry| pick(entry).as_ptr()));
    found.map(drop).ok_or(CUresult::INVALID_VALUE)
}
