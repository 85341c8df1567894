//! Environment variables that are 0 or 1.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{boundary, environment};

/// One such variable.
#[derive(Debug)]
pub(crate) struct Switch {
    name: &'static str,
    default: bool,
    has_reported: AtomicBool,
}

impl Switch {
    pub(crate) const fn new(name: &'static str, default: bool) -> Switch {
        Switch {
            name,
            default,
            has_reported: AtomicBool::new(false),
        }
    }

    /// Returns whether the variable is 1 now; the default if it is not set. A value that is neither 1 nor 0 is
    /// reported once on standard error and counts as the default, because no program should end for it.
    pub(crate) fn is_on(&self) -> bool {
        let text = environment::variable(self.name).unwrap_or_default();
        match text.as_str() {
            "0" => false,
            "1" => true,
            "" => self.default,
            _ => {
                self.report(&text);
                self.default
            }
        }
    }

    #[cold]
    fn report(&self, text: &str) {
        if !self.has_reported.swap(true, Ordering::Relaxed) {
            let (name, default) = (self.name, u8::from(self.default));
            boundary::say(format_args!(
                "{name} is '{text}', and can be 0 or 1; it is taken for {default}"
            ));
        }
    }
}
