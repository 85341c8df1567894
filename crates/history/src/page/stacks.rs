//! The stacks and texts of a page, each stored once.

use hashbrown::HashMap;
use lowtide_trace::{Frame, StackId, StackTable};

use super::columns::Columns;
use crate::owner::Owner;

/// Texts by their numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct Strings {
    numbers: HashMap<String, u32>,
    texts: Vec<String>,
}

impl Strings {
    /// Returns the number of `text`: a new number if the text is new.
    pub(super) fn number(&mut self, text: &str) -> u32 {
        if let Some(&number) = self.numbers.get(text) {
            return number;
        }
        let number = u32::try_from(self.texts.len()).expect("fewer texts than a file has bytes");
        self.numbers.insert(text.to_owned(), number);
        self.texts.push(text.to_owned());
        number
    }

    /// Returns about how many bytes of a page the texts take.
    pub(super) fn page_bytes(&self) -> usize {
        let escaped = |text: &String| text.bytes().filter(|byte| b"<>&".contains(byte)).count() * 5;
        let texts = self.texts.iter();
        texts.map(|text| text.len() + 3 + escaped(text)).sum()
    }

    /// Returns the texts in the order of their numbers.
    pub(super) fn texts(&self) -> Vec<String> {
        self.texts.clone()
    }
}

/// The stacks of one trace's blocks and segments, numbered in order of appearance. The empty stack is 0.
pub(super) struct Stacks<'t> {
    table: &'t StackTable,
    numbers: HashMap<StackId, u32>,
    used: Vec<StackId>,
    recent: (StackId, u32),
}

impl<'t> Stacks<'t> {
    pub(super) fn new(table: &'t StackTable) -> Stacks<'t> {
        Stacks {
            table,
            numbers: HashMap::from_iter([(StackId::NONE, 0)]),
            used: vec![StackId::NONE],
            recent: (StackId::NONE, 0),
        }
    }

    /// Returns the number of a stack: a new number if the stack is new.
    pub(super) fn number(&mut self, stack: StackId) -> u32 {
        if self.recent.0 != stack {
            let next = u32::try_from(self.used.len()).expect("fewer stacks than events");
            let number = *self.numbers.entry(stack).or_insert(next);
            if number == next {
                self.used.push(stack);
            }
            self.recent = (stack, number);
        }
        self.recent.1
    }

    /// Returns whether any stack but the empty one has a number.
    pub(super) fn has_any(&self) -> bool {
        self.used.len() > 1
    }

    /// Adds the stacks and their frames.
    pub(super) fn add_to(self, prefix: &str, columns: &mut Columns, strings: &mut Strings) {
        let mut frame_numbers: HashMap<Frame<'_>, u32> = HashMap::new();
        let mut frames: Vec<Frame<'_>> = Vec::new();
        let mut of_stacks: Vec<u32> = Vec::new();
        let mut ends: Vec<u32> = Vec::with_capacity(self.used.len());
        let small = |number: usize| u32::try_from(number).expect("fewer frames than 2^32");
        for &stack in &self.used {
            for frame in self.table.frames(stack) {
                let next = small(frames.len());
                let number = *frame_numbers.entry(frame).or_insert(next);
                if number == next {
                    frames.push(frame);
                }
                of_stacks.push(number);
            }
            ends.push(small(of_stacks.len()));
        }
        columns.add_u32(format!("{prefix}stacks/ends"), ends.into_iter());
        columns.add_u32(format!("{prefix}stacks/frames"), of_stacks.into_iter());
        let functions = frames.iter().map(|frame| strings.number(frame.name.raw()));
        columns.add_u32(format!("{prefix}frames/function"), functions);
        let files = frames
            .iter()
            .map(|frame| strings.number(frame.filename.raw()));
        columns.add_u32(format!("{prefix}frames/file"), files);
        columns.add_u32(
            format!("{prefix}frames/line"),
            frames.iter().map(|frame| frame.line),
        );
        let owners = frames.iter().map(|&frame| match Owner::of(frame) {
            Owner::Program => 0,
            Owner::Package => 1,
            Owner::Runtime => 2,
        });
        columns.add_u32(format!("{prefix}frames/owner"), owners);
    }
}
