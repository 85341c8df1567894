//! Stacks of the program's native functions, for threads without Python functions: programs in C++ and Rust, and
//! PyTorch's backward pass.
//!
//! While the job runs, only return addresses are collected. The thread that writes the recording looks up their
//! functions, in the symbols and debugging information of the files that the process runs. If a file has no
//! debugging information, a function has its symbol's name. Separate files of debugging information are not
//! searched, except those that `-gsplit-dwarf` makes. A program without unwind tables shows only its innermost
//! functions.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{OsStr, c_int, c_void};
use std::fs;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use addr2line::{Loader, demangle_auto};

/// A function's name, its file and the line.
pub(super) type FrameText = (String, String, u32);

/// The name of a function that no symbol names, as in PyTorch.
const UNKNOWN: &str = "??";

/// The name prefix of the functions by which PyTorch calls this library.
const SHIM: &str = "lowtide::";

unsafe extern "C" {
    /// From the unwinder library that Rust and C++ use.
    fn _Unwind_Backtrace(
        visit: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
        argument: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(context: *mut c_void) -> usize;
}

/// `_URC_NO_REASON`: continue.
const GO_ON: c_int = 0;
/// `_URC_END_OF_STACK`: stop.
const STOP: c_int = 5;

/// Returns the return addresses of this thread's stack, innermost first, at most `count_max`.
#[inline(never)]
pub(super) fn calls(count_max: usize) -> Vec<usize> {
    let mut calls = Vec::with_capacity(count_max);
    // SAFETY: the function is of the type that it wants, and gets the vector, which outlives the walk.
    unsafe { _Unwind_Backtrace(visit, (&raw mut calls).cast()) };
    calls
}

/// Stores a frame's address, until the vector is full.
///
/// # Safety
///
/// The context is the unwinder's, and the argument a `Vec<usize>` that nobody else uses.
unsafe extern "C" fn visit(context: *mut c_void, calls: *mut c_void) -> c_int {
    // SAFETY: by the contract of this function.
    let calls = unsafe { &mut *calls.cast::<Vec<usize>>() };
    // SAFETY: by the contract of this function.
    let address = unsafe { _Unwind_GetIP(context) };
    // A thread's first function has no return address.
    if address == 0 || calls.len() == calls.capacity() {
        return STOP;
    }
    calls.push(address);
    GO_ON
}

/// The functions of the files that a process runs, loaded on demand.
#[derive(Default)]
pub(super) struct Functions {
    objects: Vec<Object>,
    /// The numbers of loads and unloads when these objects were listed.
    changes: Changes,
    /// `None` for a file that cannot be read.
    files: HashMap<PathBuf, Option<Loader>>,
    /// The functions of each call, innermost first: several if some were inlined.
    known: HashMap<usize, Vec<FrameText>>,
}

impl Functions {
    /// Returns the functions that contain the calls, innermost first, without lowtide's own at the top. Slow for
    /// a file that is seen for the first time.
    pub(super) fn of_calls(&mut self, calls: &[usize]) -> Vec<FrameText> {
        self.refresh();
        let own = (of_this_library as *const c_void).addr() as u64;
        let own = object_of(&self.objects, own).map(|own| own.parts.clone());
        let is_own =
            |&&call: &&usize| { own.iter().flatten() }.any(|part| part.contains(&inside(call)));
        let outside = calls.iter().skip_while(is_own);
        let functions = outside.flat_map(|&call| self.of_call(call).to_vec());
        let is_of_shim = |(name, _, _): &FrameText| name.starts_with(SHIM);
        functions.skip_while(is_of_shim).collect()
    }

    /// Forgets addresses where another object may be loaded now.
    fn refresh(&mut self) {
        let loaded = Loaded::since(self.changes);
        if loaded.is_listed {
            self.changes = loaded.changes;
            self.objects = loaded.with_paths();
            self.known.clear();
        }
    }

    fn of_call(&mut self, call: usize) -> &[FrameText] {
        match self.known.entry(call) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(vacant) => {
                let address = inside(call);
                let Some(object) = object_of(&self.objects, address) else {
                    return vacant.insert(vec![unknown(Path::new(""))]);
                };
                // The file is not ours. If reading it fails in any way, it yields no functions.
                let file = { self.files.entry(object.path.clone()) }.or_insert_with(|| {
                    let load = || Loader::new(&object.path).ok();
                    catch_unwind(load).ok().flatten()
                });
                let look_up = || look_up(file.as_ref()?, address, object);
                let functions = catch_unwind(AssertUnwindSafe(look_up)).ok().flatten();
                vacant.insert(functions.unwrap_or_else(|| vec![unknown(&object.path)]))
            }
        }
    }
}

/// Returns an address inside the call instruction: at the return address `call` another function may begin.
fn inside(call: usize) -> u64 {
    (call as u64).wrapping_sub(1)
}

/// A function in this library.
fn of_this_library() {}

fn unknown(path: &Path) -> FrameText {
    (UNKNOWN.to_owned(), text_of(path), 0)
}

fn text_of(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Returns the functions at an address in memory, from an object's file, innermost first; `None` if no function
/// is known there.
fn look_up(file: &Loader, address: u64, object: &Object) -> Option<Vec<FrameText>> {
    let address = address.wrapping_sub(object.bias);
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
    if functions.is_empty() {
        let symbol = file.find_symbol(address)?;
        let name = demangle_auto(symbol.into(), None).into_owned();
        functions.push((name, text_of(&object.path), 0));
    }
    Some(functions)
}

/// A file whose parts are mapped in this process's memory.
#[derive(Debug)]
struct Object {
    /// Ends with ` (deleted)` if the file was deleted.
    path: PathBuf,
    /// The difference between an address in memory and in the file.
    bias: u64,
    /// The mapped ranges.
    parts: Vec<Range<u64>>,
}

fn object_of(objects: &[Object], address: u64) -> Option<&Object> {
    let contains = |part: &Range<u64>| part.contains(&address);
    objects
        .iter()
        .find(|object| object.parts.iter().any(contains))
}

/// The objects in a process at one moment.
#[derive(Default)]
struct Loaded {
    /// Without their paths.
    objects: Vec<Object>,
    /// The numbers of objects that the process has loaded and unloaded until then.
    changes: Changes,
    /// Whether these numbers have changed since the last list. Otherwise the walk ends at the first object.
    is_listed: bool,
}

impl Loaded {
    /// Lists the objects, if any was loaded or unloaded since these numbers were read.
    fn since(changes: Changes) -> Loaded {
        let mut loaded = Loaded {
            changes,
            ..Loaded::default()
        };
        // SAFETY: the function is of the type that it wants, and gets the value, which outlives the walk.
        unsafe { libc::dl_iterate_phdr(Some(note_object), (&raw mut loaded).cast()) };
        loaded
    }

    /// Returns the objects with their paths. The loader has the names that were passed to it. They may be links or
    /// relative to an earlier directory, and the program has none. The kernel's map has the real paths.
    fn with_paths(self) -> Vec<Object> {
        let maps = fs::read("/proc/self/maps").unwrap_or_default();
        let lines = maps.split(|&byte| byte == b'\n');
        let mapped: Vec<(Range<u64>, &[u8])> = lines.filter_map(mapping).collect();
        let objects = self.objects.into_iter().map(|object| {
            let start = object.parts.first().map_or(0, |part| part.start);
            let file = mapped.iter().find(|(part, _)| part.contains(&start));
            let path = OsStr::from_bytes(file.map_or(b"", |(_, path)| path)).into();
            Object { path, ..object }
        });
        objects.collect()
    }
}

/// Returns the mapped range and the path in a line of `/proc/self/maps`.
fn mapping(line: &[u8]) -> Option<(Range<u64>, &[u8])> {
    // The path is the last of six columns, and the only one with slashes.
    let path = &line[line.iter().position(|&byte| byte == b'/')?..];
    let columns = str::from_utf8(&line[..line.len() - path.len()]).ok()?;
    let (start, end) = columns.split(' ').next()?.split_once('-')?;
    let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16).ok());
    Some((start?..end?, path))
}

/// Stores an object's address ranges, and the numbers of loads and unloads, which every object has.
///
/// # Safety
///
/// `info` is the loader's, and the argument a `Loaded` that nobody else uses.
unsafe extern "C" fn note_object(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    loaded: *mut c_void,
) -> c_int {
    // SAFETY: by the contract of this function.
    let loaded = unsafe { &mut *loaded.cast::<Loaded>() };
    // SAFETY: by the contract of this function. C libraries have all of its fields for longer than Rust supports
    // them.
    let info = unsafe { &*info };
    let changes = (info.dlpi_adds, info.dlpi_subs);
    loaded.is_listed |= changes != loaded.changes;
    if !loaded.is_listed {
        // A value other than 0 stops the walk.
        return 1;
    }
    loaded.changes = changes;
    let (bias, parts, count) = (info.dlpi_addr, info.dlpi_phdr, info.dlpi_phnum);
    if parts.is_null() {
        return 0;
    }
    // SAFETY: the loader has so many, one behind the other, while this function runs.
    let parts = unsafe { std::slice::from_raw_parts(parts, count.into()) };
    let mapped = parts.iter().filter(|part| part.p_type == libc::PT_LOAD);
    let parts = mapped.map(|part| {
        let start = bias.wrapping_add(part.p_vaddr);
        start..start.wrapping_add(part.p_memsz)
    });
    loaded.objects.push(Object {
        path: PathBuf::new(),
        bias,
        parts: parts.collect(),
    });
    0
}

/// The numbers of objects that the process has loaded and unloaded.
type Changes = (u64, u64);

#[cfg(test)]
mod tests {
    use std::iter;

    use super::*;

    #[test]
    fn a_line_of_the_map_says_where_a_file_is() {
        let line = b"7f47f4579000-7f47f457b400 r-xp 0001f000 fe:00 1835028    /opt/my lib/libx.so (deleted)";
        let path: &[u8] = b"/opt/my lib/libx.so (deleted)";
        assert_eq!(
            mapping(line),
            Some((0x7f47_f457_9000..0x7f47_f457_b400, path))
        );
        for line in [
            "",
            "7f-80 rw-p 0 00:00 0",
            "7ffe-7fff r-xp 0 00:00 0   [vdso]",
            "x /y",
        ] {
            assert_eq!(mapping(line.as_bytes()), None, "{line}");
        }
    }

    #[inline(never)]
    fn outer(count_max: usize) -> Vec<usize> {
        let calls = calls(count_max);
        assert!(calls.len() <= count_max);
        calls
    }

    /// All of a test's functions are in the same object as lowtide, whose functions are removed at the top.
    #[test]
    fn calls_are_those_of_this_thread_and_not_more_than_wanted() {
        let mut functions = Functions::default();
        assert_eq!(outer(2).len(), 2);
        let calls = outer(128);
        functions.refresh();
        let names = calls
            .iter()
            .flat_map(|&call| functions.of_call(call).to_vec());
        let names: Vec<FrameText> = names.collect();
        assert!(
            names.iter().any(|(name, _, _)| name.contains("outer")),
            "{names:?}"
        );
        assert!(functions.of_calls(&calls).len() < names.len());
    }

    /// For example code that was compiled at run time, or from a deleted file.
    #[test]
    fn what_nothing_names_is_unknown() {
        let mut functions = Functions::default();
        assert_eq!(functions.of_calls(&[1]), [unknown(Path::new(""))]);
        let object = Object {
            path: "/no/such/file (deleted)".into(),
            bias: 0,
            parts: iter::once(100..200).collect(),
        };
        functions.objects.push(object);
        let expected = unknown(Path::new("/no/such/file (deleted)"));
        assert_eq!(functions.of_call(150), [expected]);
    }
}
