//! Variables of the environment that are 0 or 1.

use std::sync::OnceLock;

use crate::{boundary, registry};

/// One of them, as it was when somebody first asked.
#[derive(Debug)]
pub(crate) struct Switch {
    name: &'static str,
    default: bool,
    value: OnceLock<bool>,
}

impl Switch {
    pub(crate) const fn new(name: &'static str, default: bool) -> Switch {
        Switch {
            name,
            default,
            value: OnceLock::new(),
        }
    }

    /// Returns whether the variable is 1 or, where it is not set, the default. What is neither 1 nor 0 is told on
    /// standard error, once, and is the default, too: no program is to end for it.
    pub(crate) fn is_on(&self) -> bool {
        *self.value.get_or_init(|| {
            let text = registry::variable(self.name).unwrap_or_default();
            match text.as_str() {
                "0" => false,
                "1" => true,
                "" => self.default,
                _ => {
                    let default = u8::from(self.default);
                    boundary::say(format_args!(
                        "{} is '{text}', and can be 0 or 1; it is taken for {default}",
                        self.name
                    ));
                    self.default
                }
            }
        })
    }
}
