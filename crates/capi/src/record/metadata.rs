//! The text that a thread's events have in recordings, as PyTorch's `_set_memory_metadata` sets it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, Once, PoisonError};

use super::ring::METADATA_END;
use crate::boundary;

thread_local! {
    static CURRENT: RefCell<Current> = const { RefCell::new(Current { text: None, number: 0 }) };
}

/// A thread's text.
struct Current {
    text: Option<Arc<str>>,
    /// Its number; 0 before an event needs it.
    number: u32,
}

/// The texts that events have. They stay until the process ends, because events in the queue have their numbers.
static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Known {
    numbers: HashMap<Arc<str>, u32>,
    /// The text with number `n` is at `n - 1`.
    texts: Vec<Arc<str>>,
}

/// Sets the text of the thread's events from now on. An empty text means none.
pub(super) fn set(text: &str) {
    let text = Some(text).filter(|text| !text.is_empty());
    CURRENT.set(Current {
        text: text.map(Arc::from),
        number: 0,
    });
}

/// Returns the number of the thread's text; 0 if there is none.
#[inline]
pub(super) fn current() -> u32 {
    CURRENT.with_borrow_mut(|current| match &current.text {
        Some(text) if current.number == 0 => {
            current.number = number_of(text);
            current.number
        }
        _ => current.number,
    })
}

/// Returns the number of a text. Returns 0 if there are too many, which is reported once.
pub(super) fn number_of(text: &str) -> u32 {
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

/// Returns the text with this number; `None` for 0.
pub(super) fn text_of(number: u32) -> Option<Arc<str>> {
    let index = (number as usize).checked_sub(1)?;
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.texts.get(index).map(Arc::clone)
}

#[cold]
fn report_full() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let most = METADATA_END - 1;
        boundary::say(format!(
            "the program said {most} different texts of its memory; recordings have no later ones"
        ));
    });
}
