//! What the program itself said of its blocks, as `lowtide.categorize` makes it say.
//!
//! Two texts say something of a block: the user metadata of the thread that made it, and the last annotation of the block.
//! Each is a JSON object with some of these keys:
//!
//! | key | value |
//! |---|---|
//! | `category` | the name of a [`Category`] |
//! | `phase` | `program`, `backward` or `optimizer`: what ran, outside of modules |
//! | `module` | the path of an `nn.Module`, such as `layers.0.attn` |
//!
//! Other texts, and other keys, say nothing here.

use hashbrown::HashMap;
use lowtide_trace::{NoteId, RecordedStr, Trace};
use serde_json::{Map, Value};

use crate::history::{Block, History};
use crate::numbering::Numbering;

/// What a text says.
#[derive(Clone, Default, Debug)]
pub(crate) struct Label {
    pub(crate) category: Option<String>,
    pub(crate) phase: Option<String>,
    /// The number of the module's path in [`Labels::paths`]; 0 if there is none.
    pub(crate) module: u32,
}

/// The labels of a recording's events and blocks.
#[derive(Debug)]
pub(crate) struct Labels {
    by_note: HashMap<NoteId, Label>,
    /// By the numbers of a history's annotations.
    annotations: Vec<Label>,
    /// The paths of modules; the first is empty.
    pub(crate) paths: Vec<String>,
}

impl Label {
    /// Returns what a text says. Values of other kinds than expected say nothing.
    fn parse(text: &str, paths: &mut Numbering<String>) -> Label {
        let Ok(said) = serde_json::from_str::<Map<String, Value>>(text) else {
            return Label::default();
        };
        let text = |key: &str| said.get(key).and_then(Value::as_str).map(str::to_owned);
        Label {
            category: text("category"),
            phase: text("phase"),
            module: paths.number(text("module").unwrap_or_default()),
        }
    }

    /// Returns whether it says what ran.
    pub(crate) fn says_what_ran(&self) -> bool {
        self.phase.is_some() || self.module > 0
    }
}

/// Returns whether a text of the program is a label of what ran.
pub(crate) fn says_what_ran(text: &str) -> bool {
    let mut paths = Numbering::default();
    paths.number(String::new());
    Label::parse(text, &mut paths).says_what_ran()
}

impl Labels {
    /// Returns the labels in `trace`, whose history this is. Linear time.
    pub(crate) fn of(trace: &Trace, history: &History) -> Labels {
        let mut paths = Numbering::default();
        paths.number(String::new());
        let mut by_note = HashMap::new();
        for event in &trace.events {
            by_note.entry(event.note).or_insert_with(|| {
                let text = trace.stacks.note(event.note).user_metadata;
                Label::parse(text.map_or("", RecordedStr::raw), &mut paths)
            });
        }
        let annotations = history.annotations.iter();
        let annotations = annotations.map(|text| Label::parse(text, &mut paths));
        Labels {
            by_note,
            annotations: annotations.collect(),
            paths: paths.into_values(),
        }
    }

    /// Returns what the program said ran when it made or freed a block; `None` if it said nothing.
    pub(crate) fn of_event(&self, note: NoteId) -> Option<&Label> {
        let label = self.by_note.get(&note);
        label.filter(|label| label.says_what_ran())
    }

    /// Returns whether there are any.
    pub(crate) fn exist(&self) -> bool {
        let mut labels = self.by_note.values().chain(&self.annotations);
        labels.any(|label| label.category.is_some() || label.says_what_ran())
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
