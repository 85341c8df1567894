//! Function look-ups in both directions: finds the driver's function behind ours, and returns ours when a program
//! looks up the driver's.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::{MaybeUninit, transmute};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::mode::is_serving;
use super::stand_ins::STAND_INS;

/// The type of `dlsym`.
type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// A function of ours that replaces one of the driver's.
pub(super) struct StandIn {
    /// The function's name in the library.
    pub(super) name: &'static CStr,
    /// The function's name for `cuGetProcAddress`, from this version of CUDA on.
    pub(super) symbol: &'static str,
    pub(super) since: c_int,
    /// Whether its default stream is per thread.
    pub(super) is_per_thread: bool,
    /// Our function.
    pub(super) function: *const c_void,
    /// The driver's function; null until it was looked up.
    pub(super) real: AtomicPtr<c_void>,
}

// SAFETY: the one pointer that is not atomic points to a function and never changes.
unsafe impl Sync for StandIn {}

impl StandIn {
    /// Returns the driver's function, or null if the process has no driver.
    #[inline]
    pub(super) fn real(&self) -> *mut c_void {
        let known = self.real.load(Ordering::Relaxed);
        if known.is_null() { self.find() } else { known }
    }

    /// Looks first in the libraries after this one, where a driver that the program is linked with is, and then
    /// in a driver that the program has opened.
    #[cold]
    fn find(&self) -> *mut c_void {
        let dlsym = real_dlsym();
        // SAFETY: the name ends with a zero byte.
        let mut found = unsafe { dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        if found.is_null() || found.cast_const() == self.function {
            let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
            // SAFETY: opens nothing: the driver is there already, or the answer is null.
            let driver = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), flags) };
            found = if driver.is_null() {
                ptr::null_mut()
            } else {
                // SAFETY: the library was opened in the lines above, and is not closed.
                unsafe { dlsym(driver, self.name.as_ptr()) }
            };
        }
        self.note(found);
        found
    }

    /// Stores the driver's function, unless the function found is ours.
    fn note(&self, found: *mut c_void) {
        if found.cast_const() != self.function {
            self.real.store(found, Ordering::Relaxed);
        }
    }
}

/// Returns the result of a program's `cuGetProcAddress`: ours if it replaces what the driver found, else the
/// driver's.
pub(super) fn entry_point(
    symbol: &CStr,
    version: c_int,
    is_per_thread: bool,
    found: *mut c_void,
) -> *mut c_void {
    let symbol = symbol.to_bytes();
    let meant = STAND_INS.iter().filter(|known| {
        let is_named = known.symbol.as_bytes() == symbol && known.since <= version;
        is_named || known.name.to_bytes() == symbol
    });
    // Newer forms before older ones; most functions have no form for threads' own streams.
    let best = meant.max_by_key(|known| (known.is_per_thread == is_per_thread, known.since));
    best.map_or(found, |known| {
        known.note(found);
        known.function.cast_mut()
    })
}

/// Replaces the C library's `dlsym` for every library that was loaded with this one.
///
/// The C library's function depends on its caller's address for `RTLD_NEXT` and `RTLD_DEFAULT`. So this function
/// only chooses which function serves the call and jumps to it. That function sees the program's arguments and
/// return address.
///
/// # Safety
///
/// As for `dlsym`.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[cfg_attr(not(lowtide_tsan), unsafe(no_mangle))]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "mov rdx, [rsp + 16]",
        "sub rsp, 8",
        "call {choose}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        choose = sym choose,
    )
}

/// As above.
///
/// # Safety
///
/// As for `dlsym`.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[cfg_attr(not(lowtide_tsan), unsafe(no_mangle))]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "stp x29, x30, [sp, #-32]!",
        "stp x0, x1, [sp, #16]",
        "mov x2, x30",
        "bl {choose}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "br x16",
        choose = sym choose,
    )
}

/// Returns the function that serves a call of `dlsym`. Allocates no memory, because libraries that replace
/// `malloc` look up the next one from inside theirs.
unsafe extern "C" fn choose(
    handle: *mut c_void,
    name: *const c_char,
    caller: *const c_void,
) -> Dlsym {
    if name.is_null() || !is_serving() {
        return real_dlsym();
    }
    // SAFETY: it is not null, and a name ends with a zero byte.
    let name = unsafe { CStr::from_ptr(name) };
    let Some(known) = stand_in(name) else {
        return real_dlsym();
    };
    // Look-ups by lowtide get the driver's function. So do look-ups by one part of the driver in another: with
    // Windows' subsystem for Linux, our function would call itself otherwise.
    if image_of(caller) == image_of(choose as *const c_void) || is_drivers(caller) {
        return real_dlsym();
    }
    match handle {
        // The C library finds ours for these, as for a program that is linked with the driver.
        libc::RTLD_DEFAULT | libc::RTLD_NEXT if is_visible(known, caller) => real_dlsym(),
        libc::RTLD_DEFAULT | libc::RTLD_NEXT => find_behind,
        _ => find_for_program,
    }
}

/// Returns whether a caller that names no library would find a function without lowtide: if it is linked with the
/// driver, or if the driver was opened with `RTLD_GLOBAL`.
fn is_visible(known: &StandIn, caller: *const c_void) -> bool {
    let is_others = |found: *mut c_void| !found.is_null() && found.cast_const() != known.function;
    let name = known.name.as_ptr();
    // SAFETY: the name ends with a zero byte.
    let find = |handle| unsafe { real_dlsym()(handle, name) };
    if [libc::RTLD_NEXT, libc::RTLD_DEFAULT]
        .into_iter()
        .any(|scope| is_others(find(scope)))
    {
        return true;
    }
    let Some(image) = image(caller).filter(|image| !image.dli_fname.is_null()) else {
        return false;
    };
    let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
    // SAFETY: 1. the loader's names end with a zero byte. 2. It opens nothing: the caller is there.
    let own = unsafe { libc::dlopen(image.dli_fname, flags) };
    if own.is_null() {
        return false;
    }
    let is_linked = is_others(find(own));
    // SAFETY: it was opened above; the caller stays.
    unsafe { libc::dlclose(own) };
    is_linked
}

/// Returns what the libraries after this one define by a name. Sets the error for `dlerror` if there is nothing.
unsafe extern "C" fn find_behind(_: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the name is that of a call of `dlsym`.
    let found = unsafe { real_dlsym()(libc::RTLD_NEXT, name) };
    // The C library reads this call's return address, which must lie in this library, so the call must not become
    // a tail call.
    std::hint::black_box(found)
}

/// Returns what a library defines by a name; ours if that is the driver's function.
unsafe extern "C" fn find_for_program(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the arguments are those of a call of `dlsym`.
    let found = unsafe { real_dlsym()(handle, name) };
    // SAFETY: `choose` has read the name.
    let name = unsafe { CStr::from_ptr(name) };
    match stand_in(name) {
        Some(known) if is_drivers(found) => {
            known.note(found);
            known.function.cast_mut()
        }
        _ => found,
    }
}

fn stand_in(name: &CStr) -> Option<&'static StandIn> {
    if !name.to_bytes().starts_with(b"cu") {
        return None;
    }
    STAND_INS.iter().find(|known| known.name == name).copied()
}

/// Returns whether an address lies in NVIDIA's driver. Other libraries may have functions of the same names.
fn is_drivers(address: *const c_void) -> bool {
    let Some(image) = image(address) else {
        return false;
    };
    if image.dli_fname.is_null() {
        return false;
    }
    // SAFETY: it is not null, and the loader's names end with a zero byte and last as long as the library.
    let path = unsafe { CStr::from_ptr(image.dli_fname) }.to_bytes();
    let file = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    file.starts_with(b"libcuda.so")
}

/// Returns the start of the library that contains an address; null if there is none.
fn image_of(address: *const c_void) -> *mut c_void {
    image(address).map_or(ptr::null_mut(), |image| image.dli_fbase)
}

fn image(address: *const c_void) -> Option<libc::Dl_info> {
    let mut image = MaybeUninit::uninit();
    // SAFETY: any address may be asked for; the answer is written to `image`.
    let is_known = unsafe { libc::dladdr(address, image.as_mut_ptr()) } != 0;
    // SAFETY: it was written, as the call succeeded.
    is_known.then(|| unsafe { image.assume_init() })
}

/// Returns the C library's `dlsym`.
#[inline]
fn real_dlsym() -> Dlsym {
    let known = REAL_DLSYM.load(Ordering::Relaxed);
    if known.is_null() {
        return find_dlsym();
    }
    // SAFETY: only `dlsym` is stored there.
    unsafe { transmute::<*mut c_void, Dlsym>(known) }
}

static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// The versions of `dlsym` in C libraries: since it moved into `libc.so.6`, and before that by processor.
const DLSYM_VERSIONS: [&CStr; 3] = [c"GLIBC_2.34", c"GLIBC_2.17", c"GLIBC_2.2.5"];

#[cold]
fn find_dlsym() -> Dlsym {
    for version in DLSYM_VERSIONS {
        // A version cannot be asked for in a library that has none, such as this one: it is never ours.
        // SAFETY: both texts end with a zero byte.
        let found = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
        if !found.is_null() {
            REAL_DLSYM.store(found, Ordering::Relaxed);
            // SAFETY: that is what the function of this name is.
            return unsafe { transmute::<*mut c_void, Dlsym>(found) };
        }
    }
    finds_nothing
}

/// Serves calls if the C library has no `dlsym`.
unsafe extern "C" fn finds_nothing(_: *mut c_void, _: *const c_char) -> *mut c_void {
    ptr::null_mut()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the name of the function that replaces the one that the driver found.
    fn meant(symbol: &CStr, version: c_int, is_per_thread: bool) -> &'static str {
        let found = ptr::without_provenance_mut(0x1000);
        let meant = entry_point(symbol, version, is_per_thread, found);
        if meant == found {
            return "the driver's";
        }
        let known = STAND_INS
            .iter()
            .find(|known| known.function == meant.cast_const());
        known.unwrap().name.to_str().unwrap()
    }

    #[test]
    fn a_name_means_what_it_meant_in_that_version() {
        assert_eq!(meant(c"cuMemAlloc", 12080, false), "cuMemAlloc_v2");
        assert_eq!(
            meant(c"cuMemAlloc", 3010, false),
            "the driver's",
            "of 32 bits"
        );
        assert_eq!(meant(c"cuMemAllocHost", 12080, false), "the driver's");
        assert_eq!(meant(c"cuMemFree", 12080, true), "cuMemFree_v2");
        assert_eq!(meant(c"cuMemFreeAsync", 11020, false), "cuMemFreeAsync");
        assert_eq!(meant(c"cuMemFreeAsync", 11020, true), "cuMemFreeAsync_ptsz");
        assert_eq!(meant(c"cuGetProcAddress", 11080, false), "cuGetProcAddress");
        assert_eq!(
            meant(c"cuGetProcAddress", 12000, false),
            "cuGetProcAddress_v2"
        );
        assert_eq!(
            meant(c"cuGetProcAddress", 13000, true),
            "cuGetProcAddress_v2_ptsz"
        );
        assert_eq!(meant(c"cuMemGetInfo_v2", 3000, false), "cuMemGetInfo_v2");
    }

    #[test]
    fn dlsym_is_the_c_librarys() {
        // The test program contains this library's `dlsym`; the C library's is behind it.
        assert_ne!(real_dlsym() as *const c_void, dlsym as *const c_void);
        // SAFETY: the name ends with a zero byte.
        let found = unsafe { dlsym(libc::RTLD_DEFAULT, c"getpid".as_ptr()) };
        assert_eq!(found.cast_const(), libc::getpid as *const c_void);
    }

    #[test]
    fn only_the_drivers_functions_are_replaced() {
        assert!(stand_in(c"cuMemAlloc_v2").is_some());
        assert!(stand_in(c"cuMemAlloc").is_none(), "of 32 bits");
        assert!(stand_in(c"cudaMalloc").is_none());
        assert!(!is_drivers(libc::getpid as *const c_void));
        assert!(!is_drivers(ptr::null()));
    }
}
