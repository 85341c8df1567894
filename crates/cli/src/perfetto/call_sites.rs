//! The texts of call sites, each made once.

use std::collections::HashMap;
use std::slice;

use lowtide_history::{History, Site};
use lowtide_trace::{StackTable, Trace};

use crate::sites::{self, Sizes};

/// A call site as text.
pub(super) struct CallSite {
    /// The call site in one line.
    pub(super) line: String,
    /// The functions of its stack, innermost first, without those of Python and of compiled code.
    pub(super) stack: Vec<String>,
}

/// The call sites of a device.
pub(super) struct CallSites<'a> {
    stacks: &'a StackTable,
    sizes: Sizes,
    texts: HashMap<Site, CallSite>,
}

impl<'a> CallSites<'a> {
    /// Returns the call sites of `trace`, whose history this is. Linear time.
    pub(super) fn new(trace: &'a Trace, history: &History) -> CallSites<'a> {
        CallSites {
            stacks: &trace.stacks,
            sizes: Sizes::new(slice::from_ref(history), false),
            texts: HashMap::new(),
        }
    }

    /// Returns a call site's texts.
    pub(super) fn get(&mut self, site: Site) -> &CallSite {
        let (stacks, sizes) = (self.stacks, &self.sizes);
        self.texts.entry(site).or_insert_with(|| CallSite {
            line: sites::site_line(site, stacks, sizes),
            stack: stack_lines(site, stacks, sizes),
        })
    }
}

/// Returns a line for each function of a call site's stack.
fn stack_lines(site: Site, stacks: &StackTable, sizes: &Sizes) -> Vec<String> {
    if matches!(site, Site::Size { .. }) {
        return Vec::new();
    }
    let texts = sites::site_texts(&[(site, stacks)], sizes).concat();
    texts.lines().map(|line| line.trim().to_owned()).collect()
}
