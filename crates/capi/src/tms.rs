//! The C interface of torch_memory_saver 0.0.10, implemented with lowtide's regions.
//!
//! There, several calls together describe a thread's requests. This module stores what each call sets, and enters
//! a region once the description is complete. Functions without a result print the reason of a failure to
//! standard error.

pub(crate) mod process;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;

use lowtide_core::Bytes;
use lowtide_region::BackupKind;

use crate::boundary::{lowtide_last_error, path_from_c, run, run_and_report, text_from_c};
use crate::error::{Error, Status};
use crate::pluggable::{lowtide_free, lowtide_malloc};
use crate::pointers::address_of;
use crate::regions::{
    self, Backup, backups, lowtide_pause, lowtide_region_enter, lowtide_region_leave,
    lowtide_resume, lowtide_retain_backups, table,
};

use process::{BACKENDS, ENVIRONMENT, Settings, report, set_backup_directory, start};

thread_local! {
    /// Never dropped, so that it can be used while the thread ends. This leaks a few bytes for each thread.
    static THREAD: RefCell<ManuallyDrop<Thread>> = RefCell::new(ManuallyDrop::new(Thread::new()));
}

/// What a thread's calls have set for its requests, and where it is because of them.
struct Thread {
    settings: Settings,
    /// The place of its requests until a call sets another.
    at_first: Place,
    /// The places that the thread has entered because of these calls and has not left, innermost last. Regions
    /// from `lowtide_region_enter` may lie between and after these.
    entered: Vec<Entry>,
}

/// A region's tag and backup, or none.
type Place = Option<(CString, Option<BackupKind>)>;

/// A place that a thread has entered.
struct Entry {
    place: Place,
    /// The thread's nesting depth after entering.
    depth: usize,
}

impl Thread {
    /// A new thread is in the process's region, if `TMS_INIT_ENABLE` requests one.
    fn new() -> Thread {
        let mut thread = Thread {
            settings: ENVIRONMENT.clone(),
            at_first: None,
            entered: Vec::new(),
        };
        thread.at_first = thread.place();
        thread
    }

    /// Returns the place of the thread's requests, by what its calls have set.
    fn place(&self) -> Place {
        let settings = &self.settings;
        let place = || (settings.tag.clone(), settings.backup());
        settings.is_interesting.then(place)
    }

    /// Enters the current place of the thread's requests, and leaves the one that it entered before for that. If
    /// the calls set the same place as before the thread entered one of lowtide's regions, the thread is in that
    /// place again.
    fn enter(&mut self) -> Result<(), Error> {
        let (place, depth) = (self.place(), table::depth());
        self.entered.retain(|entry| entry.depth <= depth);
        if self.entered.pop_if(|entry| entry.depth == depth).is_some() {
            succeed(lowtide_region_leave())?;
        }
        let around = self.entered.last().map(|entry| &entry.place);
        if *around.unwrap_or(&self.at_first) == place {
            return Ok(());
        }
        let (tag, backup) = match &place {
            Some((tag, backup)) => (tag.as_ptr(), *backup),
            None => (ptr::null(), None),
        };
        // SAFETY: it is null, or ends with a zero byte.
        succeed(unsafe { lowtide_region_enter(tag, Backup::of(backup) as c_int) })?;
        let depth = table::depth();
        self.entered.push(Entry { place, depth });
        Ok(())
    }
}

/// Puts this thread in a region, or takes it out.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_interesting_region(is_interesting: bool) {
    change(|settings| settings.is_interesting = is_interesting);
}

/// Returns whether this thread is in a region.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_interesting_region() -> bool {
    look(|settings| settings.is_interesting)
}

/// Sets the tag of this thread's region.
///
/// # Safety
///
/// `tag` is null or ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_set_current_tag(tag: *const c_char) {
    // SAFETY: it ends with a zero byte, by the contract of this function.
    if let Some(tag) = unsafe { owned("tag", tag) } {
        change(|settings| settings.tag = tag);
    }
}

/// Returns the tag of this thread's region. Valid until the thread sets another.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_current_tag() -> *const c_char {
    look(|settings| settings.tag.as_ptr())
}

/// Sets whether contents of this thread's region are saved in host memory. This takes precedence over disk.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_enable_cpu_backup(keeps: bool) {
    change(|settings| settings.keeps_on_cpu = keeps);
}

/// Returns whether contents of this thread's region are saved in host memory.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_enable_cpu_backup() -> bool {
    look(|settings| settings.keeps_on_cpu)
}

/// Sets whether contents of this thread's region are saved on disk.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_enable_disk_backup(keeps: bool) {
    change(|settings| settings.keeps_on_disk = keeps);
}

/// Returns whether contents of this thread's region are saved on disk.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_enable_disk_backup() -> bool {
    look(|settings| settings.keeps_on_disk)
}

/// Sets the kind of host memory for backups, "pinned" or "mmap". It is stored and has no effect. Any other text
/// is reported on standard error and not stored.
///
/// # Safety
///
/// `backend` is null or ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_set_cpu_backup_backend(backend: *const c_char) {
    // SAFETY: it ends with a zero byte, by the contract of this function.
    let Some(backend) = (unsafe { owned("backend", backend) }) else {
        return;
    };
    report(|| {
        if !BACKENDS.contains(&backend.as_c_str()) {
            let text = format_args!("a backend is pinned or mmap, not {backend:?}");
            return Err(Error::new(Status::InvalidArgument, text));
        }
        THREAD.with_borrow_mut(|thread| thread.settings.backend = backend);
        Ok(())
    });
}

/// Returns the stored kind of host memory. Valid until the thread sets another.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_cpu_backup_backend() -> *const c_char {
    look(|settings| settings.backend.as_ptr())
}

/// Like `lowtide_set_backup_directory`, and creates the directory and its parents if necessary. From then on
/// the directory has a file name for each saved block. All names of a region are links to one file.
///
/// # Safety
///
/// `path` is null or ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_set_disk_backup_dir(path: *const c_char) {
    report(|| {
        // SAFETY: it ends with a zero byte, by the contract of this function.
        let path = unsafe { path_from_c(path) }.ok_or_else(|| Error::null("path"))?;
        set_backup_directory(path)
    });
}

/// Like `lowtide_retain_backups`: retained backups can be read after a resume.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_retain_cpu_backup(retain: bool) {
    report(|| {
        start();
        succeed(lowtide_retain_backups(retain))
    });
}

/// Returns the value that `tms_set_retain_cpu_backup` set, or else that of `TMS_RETAIN_CPU_BACKUP`.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_retain_cpu_backup() -> bool {
    start();
    backups::retains()
}

/// Like `lowtide_set_memory_margin`.
#[unsafe(no_mangle)]
pub extern "C" fn set_memory_margin_bytes(bytes: u64) {
    report(|| succeed(regions::lowtide_set_memory_margin(bytes)));
}

/// Like `lowtide_pause`, but does nothing for a tag that was never entered, and takes the empty tag for null.
/// Returns 0 on success.
///
/// # Safety
///
/// `tag` is null or ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_pause(tag: *const c_char) -> c_int {
    // SAFETY: by the contract of this function.
    unsafe { with_known(tag, lowtide_pause) }
}

/// Like `lowtide_resume`, but does nothing for a tag that was never entered, and takes the empty tag for null.
/// Returns 0 on success.
///
/// # Safety
///
/// `tag` is null or ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_resume(tag: *const c_char) -> c_int {
    // SAFETY: by the contract of this function.
    unsafe { with_known(tag, lowtide_resume) }
}

/// Returns the address of the host's copy of `size` bytes at `memory`, which lie within a block; null if there is
/// no copy. A copy exists while the block's region is paused. If `tms_set_retain_cpu_backup` retained it, it also
/// exists after a resume, until the region's next pause.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_cpu_backup_pointer(memory: *const u8, size: u64) -> *const u8 {
    let start = address_of(memory.cast_mut().cast());
    let mut copy = None;
    // Callers pass any memory here: outside of regions, or not allocated at all.
    let _ = run(|| {
        copy = regions::find_copy(start, Bytes(size))?;
        Ok(())
    });
    copy.map_or(ptr::null(), ptr::with_exposed_provenance)
}

/// Like `lowtide_malloc`. A `torch.cuda.MemPool` of an allocator with this function gets its segments from a
/// region.
#[unsafe(no_mangle)]
pub extern "C" fn tms_torch_malloc(size: usize, device: c_int, stream: *mut c_void) -> *mut c_void {
    lowtide_malloc(size, device, stream)
}

/// Like `lowtide_free`.
#[unsafe(no_mangle)]
pub extern "C" fn tms_torch_free(
    memory: *mut c_void,
    size: usize,
    device: c_int,
    stream: *mut c_void,
) {
    lowtide_free(memory, size, device, stream);
}

/// Returns a part of what this thread's calls have set.
fn look<R>(look: impl FnOnce(&Settings) -> R) -> R {
    start();
    THREAD.with_borrow(|thread| look(&thread.settings))
}

/// Changes what this thread's calls have set, and enters the resulting region.
fn change(change: impl FnOnce(&mut Settings)) {
    start();
    report(|| {
        THREAD.with_borrow_mut(|thread| {
            change(&mut thread.settings);
            thread.enter()
        })
    });
}

/// Returns a copy of a text that the caller passed. If it is invalid, reports that and returns `None`.
///
/// # Safety
///
/// `text` is null, or ends with a zero byte and does not change meanwhile.
unsafe fn owned(name: &str, text: *const c_char) -> Option<CString> {
    let mut copy = None;
    report(|| {
        // SAFETY: by the contract of this function.
        let text = unsafe { text_from_c(name, text) }?.ok_or_else(|| Error::null(name))?;
        copy = CString::new(text).ok();
        Ok(())
    });
    copy
}

/// Calls `act` with the regions of a tag, if there are any.
///
/// # Safety
///
/// `tag` is null or ends with a zero byte, and does not change meanwhile.
unsafe fn with_known(
    tag: *const c_char,
    act: unsafe extern "C" fn(*const c_char) -> Status,
) -> c_int {
    let status = run_and_report(|| {
        // SAFETY: by the contract of this function.
        let named = unsafe { text_from_c("tag", tag) }?.filter(|tag| !tag.is_empty());
        match named {
            Some(named) if !table::is_known(named)? => Ok(()),
            // SAFETY: by the contract of this function.
            Some(_) => succeed(unsafe { act(tag) }),
            // SAFETY: null is every region.
            None => succeed(unsafe { act(ptr::null()) }),
        }
    });
    status as c_int
}

/// Returns the error of an exported function that failed.
fn succeed(status: Status) -> Result<(), Error> {
    if status == Status::Ok {
        return Ok(());
    }
    // SAFETY: the text is this thread's, in which no other call is under way.
    let text = unsafe { CStr::from_ptr(lowtide_last_error()) };
    Err(Error::new(status, text.to_string_lossy()))
}
