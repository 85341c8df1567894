//! The C interface of torch_memory_saver 0.0.10: its regions are lowtide's.
//!
//! What a thread's requests are is said there by several calls, so this keeps them, and enters a region when they
//! are complete. Functions that return nothing write to standard error why they failed.

pub(crate) mod process;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;

use lowtide_core::Bytes;
use lowtide_region::BackupKind;

use crate::boundary::{path_from_c, run, run_and_report, text_from_c};
use crate::error::{Error, Status};
use crate::pluggable::{lowtide_free, lowtide_malloc};
use crate::pointers::address_of;
use crate::regions::{
    self, Backup, keeper, lowtide_pause, lowtide_region_enter, lowtide_region_leave,
    lowtide_resume, lowtide_retain_backups, table,
};

use process::{BACKENDS, ENVIRONMENT, backup, report, set_backup_directory, start};

thread_local! {
    /// Never dropped, so that it can be asked for while the thread ends: a few bytes of each thread that does.
    static THREAD: RefCell<ManuallyDrop<Thread>> = RefCell::new(ManuallyDrop::new(Thread::new()));
}

/// What a thread has said of its requests.
struct Thread {
    is_interesting: bool,
    tag: CString,
    keeps_on_cpu: bool,
    keeps_on_disk: bool,
    /// Noted, and without effect.
    backend: CString,
    /// Where its requests go as long as it has said nothing.
    at_first: Place,
    /// What it has entered because of this and not left, the innermost last. What `lowtide_region_enter` was
    /// called for may lie between and after these.
    entered: Vec<Entry>,
}

/// A region's tag and backup, or none.
type Place = Option<(CString, Option<BackupKind>)>;

/// A place that a thread has entered.
struct Entry {
    place: Place,
    /// How much the thread had entered with it.
    depth: usize,
}

impl Thread {
    /// A new thread is in the region of the process, if `TMS_INIT_ENABLE` asks for one.
    fn new() -> Thread {
        let mut thread = Thread {
            is_interesting: ENVIRONMENT.is_interesting,
            tag: c"default".to_owned(),
            keeps_on_cpu: ENVIRONMENT.keeps_on_cpu,
            keeps_on_disk: ENVIRONMENT.keeps_on_disk,
            backend: ENVIRONMENT.backend.to_owned(),
            at_first: None,
            entered: Vec::new(),
        };
        thread.at_first = thread.place();
        thread
    }

    /// Returns where the thread's requests are to go, by what it has said.
    fn place(&self) -> Place {
        let place = || {
            (
                self.tag.clone(),
                backup(self.keeps_on_cpu, self.keeps_on_disk),
            )
        };
        self.is_interesting.then(place)
    }

    /// Enters what the thread's requests are to come from now, and leaves what it entered last for that. Where it
    /// has said what it had said before it entered a region of lowtide's, it is in that region again.
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
    change(|thread| thread.is_interesting = is_interesting);
}

/// Returns whether this thread is in a region.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_interesting_region() -> bool {
    look(|thread| thread.is_interesting)
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
        change(|thread| thread.tag = tag);
    }
}

/// Returns the tag of this thread's region, which is valid until the thread sets another.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_current_tag() -> *const c_char {
    look(|thread| thread.tag.as_ptr())
}

/// Has contents of this thread's region kept in the host's memory, or not. It goes before disk.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_enable_cpu_backup(keeps: bool) {
    change(|thread| thread.keeps_on_cpu = keeps);
}

/// Returns whether contents of this thread's region are kept in the host's memory.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_enable_cpu_backup() -> bool {
    look(|thread| thread.keeps_on_cpu)
}

/// Has contents of this thread's region kept on disk, or not.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_enable_disk_backup(keeps: bool) {
    change(|thread| thread.keeps_on_disk = keeps);
}

/// Returns whether contents of this thread's region are kept on disk.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_enable_disk_backup() -> bool {
    look(|thread| thread.keeps_on_disk)
}

/// Notes which kind of host memory backups are to be in, "pinned" or "mmap", which changes nothing. Any other is told on
/// standard error, and not noted.
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
        THREAD.with_borrow_mut(|thread| thread.backend = backend);
        Ok(())
    });
}

/// Returns what was noted, which is valid until the thread sets another.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_cpu_backup_backend() -> *const c_char {
    look(|thread| thread.backend.as_ptr())
}

/// As `lowtide_set_backup_directory`, and makes the directory and those above it if need be; from then on there is a
/// file in it for each block that is kept there, by names of one file for all blocks of a region.
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

/// As `lowtide_retain_backups`: what is retained can be read after a resume.
#[unsafe(no_mangle)]
pub extern "C" fn tms_set_retain_cpu_backup(retain: bool) {
    report(|| {
        start();
        succeed(lowtide_retain_backups(retain))
    });
}

/// Returns what `tms_set_retain_cpu_backup` was told, or `TMS_RETAIN_CPU_BACKUP` says.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_retain_cpu_backup() -> bool {
    start();
    keeper::retains()
}

/// As `lowtide_set_memory_margin`.
#[unsafe(no_mangle)]
pub extern "C" fn set_memory_margin_bytes(bytes: u64) {
    report(|| succeed(regions::lowtide_set_memory_margin(bytes)));
}

/// As `lowtide_pause`; does nothing for a tag that was never entered, and takes the empty one for null.
/// Returns 0 if it was done.
///
/// # Safety
///
/// `tag` is null or ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_pause(tag: *const c_char) -> c_int {
    // SAFETY: by the contract of this function.
    unsafe { with_known(tag, lowtide_pause) }
}

/// As `lowtide_resume`; does nothing for a tag that was never entered, and takes the empty one for null.
/// Returns 0 if it was done.
///
/// # Safety
///
/// `tag` is null or ends with a zero byte. It is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tms_resume(tag: *const c_char) -> c_int {
    // SAFETY: by the contract of this function.
    unsafe { with_known(tag, lowtide_resume) }
}

/// Returns where the host's copy of `size` bytes at `memory`, within a block, is; null where there is none. There
/// is one while the block's region is paused, and after a resume where `tms_set_retain_cpu_backup` had it retained:
/// until the next pause of the region.
#[unsafe(no_mangle)]
pub extern "C" fn tms_get_cpu_backup_pointer(memory: *const u8, size: u64) -> *const u8 {
    let start = address_of(memory.cast_mut().cast());
    let mut copy = None;
    // It is asked of any memory: none of a region's, none that is held.
    let _ = run(|| {
        copy = regions::find_copy(start, Bytes(size))?;
        Ok(())
    });
    copy.map_or(ptr::null(), ptr::with_exposed_provenance)
}

/// As `lowtide_malloc`: a `torch.cuda.MemPool` of an allocator that has this has its segments from a region.
#[unsafe(no_mangle)]
pub extern "C" fn tms_torch_malloc(size: usize, device: c_int, stream: *mut c_void) -> *mut c_void {
    lowtide_malloc(size, device, stream)
}

/// As `lowtide_free`.
#[unsafe(no_mangle)]
pub extern "C" fn tms_torch_free(
    memory: *mut c_void,
    size: usize,
    device: c_int,
    stream: *mut c_void,
) {
    lowtide_free(memory, size, device, stream);
}

/// Returns something of what this thread has said.
fn look<R>(look: impl FnOnce(&Thread) -> R) -> R {
    start();
    THREAD.with_borrow(|thread| look(thread))
}

/// Changes what this thread has said, and enters the region that it is in then.
fn change(change: impl FnOnce(&mut Thread)) {
    start();
    report(|| {
        THREAD.with_borrow_mut(|thread| {
            change(thread);
            thread.enter()
        })
    });
}

/// Returns a text of the caller's, or tells what is wrong with it.
///
/// # Safety
///
/// `text` is null, or ends with a zero byte and is not changed meanwhile.
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

/// Does something with the regions of a tag, if there are any.
///
/// # Safety
///
/// `tag` is null or ends with a zero byte, and is not changed meanwhile.
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

/// Returns the error of an exported function.
fn succeed(status: Status) -> Result<(), Error> {
    if status == Status::Ok {
        return Ok(());
    }
    // SAFETY: the text is this thread's, in which no other call is under way.
    let text = unsafe { CStr::from_ptr(crate::lowtide_last_error()) };
    Err(Error::new(status, text.to_string_lossy()))
}
