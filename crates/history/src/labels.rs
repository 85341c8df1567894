//! What the program itself said of its blocks, as `lowtide.categorize` makes it say.
//!
//! Two texts say something of a block: the user metadata of the thread that made it, and the last annotation of the block.
//! Each is a JSON object with some of these keys:
//!
//! | key | value |
//! |---|---|
//! | `category` | the name of a [`Category`] |
//! | `phase` | `forward`, `backward` or `optimizer`: what ran |
//! | `module` | the path of an `nn.Module`, such as `layers.0.attn` |
//!
//! Other texts, and other keys, say nothing here.

use hashbrown::HashMap;
use lowtide_trace::{NoteId, RecordedStr, Trace};
use serde::Deserialize;

use crate::history::{Block, History};

/// What a text says. Values of other kinds than expected say nothing.
#[derive(Clone, Default, Debug, Deserialize)]
#[serde(default)]
pub(crate) struct Label {
    pub(crate) category: Option<String>,
    pub(crate) phase: Option<String>,
    pub(crate) module: Option<String>,
}

/// The labels of a recording's events and blocks.
#[derive(Debug)]
pub(crate) struct Labels {
    by_note: HashMap<NoteId, Label>,
    /// By the numbers of a history's annotations.
    annotations: Vec<Label>,
    /// The instant of the first event with a label. Later events without one are outside of modules and optimizers.
    start: Option<u32>,
}

impl Label {
    pub(crate) fn parse(text: &str) -> Label {
        serde_json::from_str(text).unwrap_or_default()
    }

    /// Returns whether it says what ran.
    pub(crate) fn says_what_ran(&self) -> bool {
        self.phase.is_some() || self.module.is_some()
    }
}

impl Labels {
    /// Returns the labels in `trace`, whose history this is. Linear time.
    pub(crate) fn of(trace: &Trace, history: &History) -> Labels {
        let mut by_note = HashMap::new();
        let mut start = None;
        for (instant, event) in (1..).zip(&trace.events) {
            let label = by_note.entry(event.note).or_insert_with(|| {
                let text = trace.stacks.note(event.note).user_metadata;
                text.map(RecordedStr::raw)
                    .map(Label::parse)
                    .unwrap_or_default()
            });
            if start.is_none() && label.says_what_ran() {
                start = Some(instant);
            }
        }
        let annotations = history.annotations.iter();
        Labels {
            by_note,
            annotations: annotations.map(|text| Label::parse(text)).collect(),
            start,
        }
    }

    /// Returns what the program said of an event; `None` if it said nothing, at any time before or then.
    pub(crate) fn of_event(&self, instant: u32, note: NoteId) -> Option<&Label> {
        let is_labelled = self.start.is_some_and(|start| start <= instant);
        is_labelled.then(|| &self.by_note[&note])
    }

    /// Returns whether there are any.
    pub(crate) fn exist(&self) -> bool {
        let is_empty = |label: &Label| label.category.is_none() && !label.says_what_ran();
        self.start.is_some() || !self.annotations.iter().all(is_empty)
    }

    /// Returns whether the program said of any block that it has this category.
    pub(crate) fn have(&self, category: &str) -> bool {
        let mut annotations = self.annotations.iter();
        annotations.any(|label| label.category.as_deref() == Some(category))
    }

    /// Returns what the program said of a block after it was made. It is empty if it said nothing.
    pub(crate) fn of_block(&self, block: &Block) -> &Label {
        &self.annotations[block.annotation as usize]
    }
}
