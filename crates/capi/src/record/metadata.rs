//! The text that a thread's events have in recordings, as PyTorch's `_set_memory_metadata` sets it.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use super::ring::METADATA_END;
use crate::boundary;

thread_local! {
    /// The number of the thread's text; 0 if there is none.
    static CURRENT: Cell<u32> = const { Cell::new(0) };
}

/// The texts of this process. They stay until it ends, because events in the queue have their numbers.
static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Known {
    numbers: HashMap<Arc<str>, u32>,
    /// The text with number `n` is at `n - 1`.
    texts: Vec<Arc<str>>,
}

/// Sets the text of the thread's events from now on. An empty text means none.
pub(super) fn set(text: &str) {
    CURRENT.set(number_of(text));
}

/// Returns the number of the thread's text; 0 if there is none.
#[inline]
pub(super) fn current() -> u32 {
    CURRENT.get()
}

/// Returns the text with this number; `None` for 0.
pub(super) fn text_of(number: u32) -> Option<Arc<str>> {
    let index = (number as usize).checked_sub(1)?;
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.texts.get(index).map(Arc::clone)
}

fn number_of(text: &str) -> u32 {
    if text.is_empty() {
        return 0;
    }
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&number) = known.numbers.get(text) {
        return number;
    }
    let number = u32::try_from(known.texts.len() + 1).unwrap_or(METADATA_END);
    if number >= METADATA_END {
        drop(known);
        report_full();
        return 0;
    }
    let text: Arc<str> = text.into();
    known.texts.push(Arc::clone(&text));
    known.numbers.insert(text, number);
    number
}

/// Reports once that later events have no text.
#[cold]
fn report_full() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let most = METADATA_END - 1;
        boundary::say(&format!(
            "the program set {most} different texts as memory metadata; recordings have no later ones"
        ));
    });
}
