//! The program's own functions: what a thread is in of which Python knows nothing, in programs of C++ and Rust
//! and where PyTorch works backward.
//!
//! As the job runs, only the addresses of calls are gathered. Which functions they lie in, whoever writes the
//! recording looks up, in the symbols and the debugging information of the files that the process runs. Where a
//! file has no debugging information, a function goes by the nearest symbol before it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CStr, OsStr, c_int, c_void};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use addr2line::{Loader, demangle_auto};

use super::stacks::FrameText;

/// What a function is called that nothing names, as PyTorch calls it.
const UNKNOWN: &str = "??";

/// How the functions begin by which PyTorch calls this library.
const SHIM: &str = "lowtide::";

/// Where Linux shows a process the program that it runs, whose name the loader does not know.
const PROGRAM: &str = "/proc/self/exe";

unsafe extern "C" {
    /// Of the library that Rust unwinds with, as C++ does.
    fn _Unwind_Backtrace(
        visit: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
        argument: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(context: *mut c_void) -> usize;
}

/// `_URC_NO_REASON`: go on.
const GO_ON: c_int = 0;
/// `_URC_END_OF_STACK`: that is enough.
const STOP: c_int = 5;

/// Returns the addresses that this thread's functions return to, innermost first and at most so many.
#[inline(never)]
pub(super) fn calls(count_max: usize) -> Vec<usize> {
    let mut calls = Vec::with_capacity(count_max);
    // SAFETY: the function is of the type that it wants, and gets the vector, which outlives the walk.
    unsafe { _Unwind_Backtrace(visit, (&raw mut calls).cast()) };
    calls
}

/// Notes where a function is, until the vector is full.
///
/// # Safety
///
/// The context is the unwinder's, and the argument a `Vec<usize>` that nobody else uses.
unsafe extern "C" fn visit(context: *mut c_void, calls: *mut c_void) -> c_int {
    // SAFETY: by the contract of this function.
    let calls = unsafe { &mut *calls.cast::<Vec<usize>>() };
    // SAFETY: by the contract of this function.
    let address = unsafe { _Unwind_GetIP(context) };
    // A thread's first function returns nowhere.
    if address == 0 || calls.len() == calls.capacity() {
        return STOP;
    }
    calls.push(address);
    GO_ON
}

/// The functions of the files that a process runs, as far as they were asked for.
#[derive(Default)]
pub(super) struct Functions {
    /// `None` where a file cannot be read.
    files: HashMap<PathBuf, Option<Loader>>,
    /// Those that a call lies in, innermost first: several where some were inlined.
    known: HashMap<usize, Vec<FrameText>>,
}

impl Functions {
    /// Returns the functions that calls lie in, innermost first, without lowtide's own on top. Linear in the files
    /// that the process runs, and slow where one of them is seen for the first time.
    pub(super) fn of_calls(&mut self, calls: &[usize]) -> Vec<FrameText> {
        let objects = objects();
        let own = object_of(&objects, (of_this_library as *const c_void).addr() as u64);
        let is_own = |&&call: &&usize| own.is_some_and(|own| own.contains(inside(call)));
        let outside = calls.iter().skip_while(is_own);
        let functions = outside.flat_map(|&call| self.of_call(&objects, call).to_vec());
        let is_of_shim = |(name, _, _): &FrameText| name.starts_with(SHIM);
        functions.skip_while(is_of_shim).collect()
    }

    fn of_call(&mut self, objects: &[Object], call: usize) -> &[FrameText] {
        match self.known.entry(call) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(vacant) => {
                let address = inside(call);
                let Some(object) = object_of(objects, address) else {
                    return vacant.insert(vec![unknown(Path::new(""))]);
                };
                let file = { self.files.entry(object.path.clone()) }
                    .or_insert_with(|| Loader::new(&object.path).ok());
                let address = address.wrapping_sub(object.bias);
                let functions = { file.as_ref() }.map(|file| look_up(file, address, object));
                let functions = functions.filter(|functions| !functions.is_empty());
                vacant.insert(functions.unwrap_or_else(|| vec![unknown(&object.path)]))
            }
        }
    }
}

/// Returns an address in a call that returns to `call`, where another function may begin.
fn inside(call: usize) -> u64 {
    (call as u64).wrapping_sub(1)
}

/// Lies in this library.
fn of_this_library() {}

fn unknown(path: &Path) -> FrameText {
    (UNKNOWN.to_owned(), text_of(path), 0)
}

fn text_of(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Returns the functions at an address of a file, innermost first; none where nothing names any.
fn look_up(file: &Loader, address: u64, object: &Object) -> Vec<FrameText> {
    let mut functions = Vec::new();
    if let Ok(mut frames) = file.find_frames(address) {
        while let Ok(Some(frame)) = frames.next() {
            let name = { frame.function.as_ref() }.and_then(|name| name.demangle().ok());
            let Some(name) = name else {
                continue;
            };
            let place = frame.location.as_ref();
            let line = place.and_then(|place| place.line).unwrap_or(0);
            let path = place.and_then(|place| place.file);
            let path = path.map_or_else(|| text_of(&object.path), str::to_owned);
            functions.push((name.into_owned(), path, line));
        }
    }
    if functions.is_empty()
        && let Some(symbol) = file.find_symbol(address)
    {
        let name = demangle_auto(symbol.into(), None).into_owned();
        functions.push((name, text_of(&object.path), 0));
    }
    functions
}

/// A file of which parts are in this process's memory.
struct Object {
    path: PathBuf,
    /// What an address in the file is less than in memory.
    bias: u64,
    /// Where its parts are.
    parts: Vec<Range<u64>>,
}

impl Object {
    fn contains(&self, address: u64) -> bool {
        self.parts.iter().any(|part| part.contains(&address))
    }
}

fn object_of(objects: &[Object], address: u64) -> Option<&Object> {
    objects.iter().find(|object| object.contains(address))
}

/// Returns the files that this process runs now.
fn objects() -> Vec<Object> {
    let mut objects: Vec<Object> = Vec::new();
    // SAFETY: the function is of the type that it wants, and gets the vector, which outlives the walk.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut objects).cast()) };
    objects
}

/// Notes a file.
///
/// # Safety
///
/// `info` is the loader's, and the argument a `Vec<Object>` that nobody else uses.
unsafe extern "C" fn note(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    objects: *mut c_void,
) -> c_int {
    // SAFETY: by the contract of this function.
    let objects = unsafe { &mut *objects.cast::<Vec<Object>>() };
    // SAFETY: by the contract of this function.
    let info = unsafe { &*info };
    let bias = info.dlpi_addr;
    // SAFETY: the loader has so many, one behind the other, while this function runs.
    let parts = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let loaded = parts.iter().filter(|part| part.p_type == libc::PT_LOAD);
    let parts = loaded.map(|part| {
        let start = bias.wrapping_add(part.p_vaddr);
        start..start.wrapping_add(part.p_memsz)
    });
    // SAFETY: it is null, or ends with a zero byte.
    let name = (!info.dlpi_name.is_null()).then(|| unsafe { CStr::from_ptr(info.dlpi_name) });
    let name = name.filter(|name| !name.is_empty());
    let path = name.map_or(OsStr::new(PROGRAM), |name| {
        OsStr::from_bytes(name.to_bytes())
    });
    objects.push(Object {
        path: path.into(),
        bias,
        parts: parts.collect(),
    });
    0
}
