//! Common parts of every exported function: it is counted, and can be made to fail.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::process;
use crate::sys::CUresult;

/// The result of an exported function's body.
pub(crate) type Outcome = Result<(), CUresult>;

/// Defines exported functions, and `CALLS`, the list of their names and addresses.
macro_rules! driver_calls {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$attribute])*
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $kind),*) -> $crate::sys::CUresult {
                $crate::calls::enter(stringify!($name), || -> $crate::calls::Outcome { $body })
            }
        )*

        /// The exported functions of this file, with their names.
        pub(crate) const CALLS: &[(&str, *const std::ffi::c_void)] =
            &[$((stringify!($name), $name as *const std::ffi::c_void)),*];
    };
}
pub(crate) use driver_calls;

/// Makes one call: runs `body`, unless the driver cannot be called now or the call is to fail.
pub(crate) fn enter(name: &'static str, body: impl FnOnce() -> Outcome) -> CUresult {
    // The manual forbids CUDA calls in host functions, and defines this code for them.
    if SERVES_A_STREAM.get() {
        return CUresult::NOT_PERMITTED;
    }
    let outcome = process::check(name)
        .and_then(|()| read_faults())
        .and_then(|()| count(name))
        .and_then(|()| body());
    match outcome {
        Ok(()) => CUresult::SUCCESS,
        Err(code) => code,
    }
}

thread_local! {
    static SERVES_A_STREAM: Cell<bool> = const { Cell::new(false) };
}

/// Makes every later call from this thread fail.
pub(crate) fn forbid_on_this_thread() {
    SERVES_A_STREAM.set(true);
}

/// A failure to inject into one call of `name`.
#[derive(Debug)]
pub(crate) struct Fault {
    name: String,
    /// The number of calls until then; 1 is the next call.
    countdown: u64,
    code: CUresult,
}

impl Fault {
    /// Returns a failure of the `nth` call of `name` from now, counted from 1. Without a code, calls whose names
    /// begin with `cuMem` fail with `OUT_OF_MEMORY`, and others with `UNKNOWN`.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if `nth` is 0 or the code means success.
    pub(crate) fn new(name: &str, nth: u64, code: Option<CUresult>) -> Result<Self, CUresult> {
        if nth == 0 || code == Some(CUresult::SUCCESS) {
            return Err(CUresult::INVALID_VALUE);
        }
        let default = if name.starts_with("cuMem") {
            CUresult::OUT_OF_MEMORY
        } else {
            CUresult::UNKNOWN
        };
        Ok(Self {
            name: name.into(),
            countdown: nth,
            code: code.unwrap_or(default),
        })
    }

    /// Parses `name:n` or `name:n:code`.
    pub(crate) fn parse(text: &str) -> Result<Self, CUresult> {
        let mut parts = text.trim().split(':');
        let name = parts.next().unwrap_or_default();
        let number = |part: &str| part.parse::<u32>().map_err(|_| CUresult::INVALID_VALUE);
        let nth = number(parts.next().unwrap_or_default())?;
        let code = parts.next().map(number).transpose()?;
        if parts.next().is_some() {
            return Err(CUresult::INVALID_VALUE);
        }
        Self::new(name, nth.into(), code.map(CUresult))
    }
}

/// Random failures.
#[derive(Debug)]
struct Chance {
    /// The state of the random generator, a xorshift.
    random: u64,
    per_million: u64,
}

/// Calls that need no resource, and calls that programs make once before all others.
const NEVER_AT_RANDOM: [&str; 5] = [
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
    "cuInit",
];

impl Chance {
    /// Returns the error code if this call is to fail.
    fn strike(&mut self, name: &str) -> Option<CUresult> {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let fails = self.random % 1_000_000 < self.per_million;
        if !fails || NEVER_AT_RANDOM.contains(&name) {
            return None;
        }
        let is_short = name.starts_with("cuMem") && self.random >> 40 & 1 == 0;
        Some(if is_short {
            CUresult::OUT_OF_MEMORY
        } else {
            CUresult::UNKNOWN
        })
    }
}

#[derive(Debug)]
struct Book {
    counts: BTreeMap<&'static str, u64>,
    faults: Vec<Fault>,
    chance: Option<Chance>,
}

impl Book {
    const EMPTY: Book = Book {
        counts: BTreeMap::new(),
        faults: Vec::new(),
        chance: None,
    };
}

static BOOK: Mutex<Book> = Mutex::new(Book::EMPTY);

fn book() -> MutexGuard<'static, Book> {
    BOOK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads the failures of `FAKECUDA_FAIL`, once per process, before the first call is counted.
///
/// # Errors
///
/// `INVALID_VALUE` if the variable cannot be parsed.
fn read_faults() -> Outcome {
    static READ: OnceLock<Outcome> = OnceLock::new();
    *READ.get_or_init(|| {
        let faults = std::env::var("FAKECUDA_FAIL").unwrap_or_default();
        for text in faults.split(',').filter(|text| !text.is_empty()) {
            let fault = Fault::parse(text);
            add_fault(fault.inspect_err(|_| {
                eprintln!("fakecuda: FAKECUDA_FAIL: `{text}` is not call:n or call:n:code");
            })?);
        }
        Ok(())
    })
}

/// Counts a call.
///
/// # Errors
///
/// The code of a failure that is due, or of a random one. The call must then do nothing.
fn count(name: &'static str) -> Outcome {
    let mut book = book();
    *book.counts.entry(name).or_default() += 1;
    for fault in book.faults.iter_mut().filter(|fault| fault.name == name) {
        fault.countdown -= 1;
    }
    // Several failures may be due at this call, which fails once.
    let mut due = book.faults.extract_if(.., |fault| fault.countdown == 0);
    let first = due.next().map(|fault| fault.code);
    due.for_each(drop);
    let chance = book.chance.as_mut();
    let struck = || chance.and_then(|chance| chance.strike(name));
    first.or_else(struck).map_or(Ok(()), Err)
}

/// Returns how often `name` was called since the last reset, including failed calls. An empty name means all functions.
pub(crate) fn calls_of(name: &str) -> u64 {
    let book = book();
    if name.is_empty() {
        return book.counts.values().sum();
    }
    book.counts.get(name).copied().unwrap_or(0)
}

pub(crate) fn add_fault(fault: Fault) {
    book().faults.push(fault);
}

/// Returns the name of each call that is to fail, and the number of calls of it until then.
pub(crate) fn faults() -> Vec<(String, u64)> {
    let named = |fault: &Fault| (fault.name.clone(), fault.countdown);
    book().faults.iter().map(named).collect()
}

/// Makes `per_million` of a million calls fail from now on, chosen at random by a seed.
pub(crate) fn fail_at_random(seed: u64, per_million: u64) {
    // A xorshift stays at zero, and its first numbers resemble its seed.
    let random = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    book().chance = Some(Chance {
        random,
        per_million,
    });
}

/// Removes every failure that has not happened yet.
pub(crate) fn clear_faults() {
    let mut book = book();
    book.faults.clear();
    book.chance = None;
}

/// Resets every count, and removes every failure that has not happened yet.
pub(crate) fn clear() {
    *book() = Book::EMPTY;
}
