//! The stacks and texts of a page, each stored once.

use lowtide_trace::{Frame, RecordedText, StackId, StackTable};

use super::columns::Columns;
use crate::numbering::Numbering;
use crate::owner::Owner;

/// Texts by their numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct Strings(Numbering<RecordedText>);

impl Strings {
    /// Returns the number of `text`: a new number if the text is new.
    pub(super) fn number(&mut self, text: &str) -> u32 {
        self.0.number(text.into())
    }

    /// Returns about how many bytes of a page the texts take.
    pub(super) fn page_bytes(&self) -> usize {
        let escaped = |text: &str| text.bytes().filter(|byte| b"<>&".contains(byte)).count() * 5;
        let texts = self.0.values().iter().map(RecordedText::raw);
        texts.map(|text| text.len() + 3 + escaped(text)).sum()
    }

    /// Returns the texts in the order of their numbers.
    pub(super) fn texts(&self) -> Vec<RecordedText> {
        self.0.values().to_vec()
    }
}

/// The stacks of one trace's blocks and segments, numbered in order of appearance. The empty stack is 0.
pub(super) struct Stacks<'t> {
    table: &'t StackTable,
    used: Numbering<StackId>,
}

impl<'t> Stacks<'t> {
    pub(super) fn new(table: &'t StackTable) -> Stacks<'t> {
        let mut used = Numbering::default();
        used.number(StackId::NONE);
        Stacks { table, used }
    }

    /// Returns the number of a stack: a new number if the stack is new.
    pub(super) fn number(&mut self, stack: StackId) -> u32 {
        self.used.number(stack)
    }

    /// Returns whether any stack but the empty one has a number.
    pub(super) fn has_any(&self) -> bool {
        self.used.values().len() > 1
    }

    /// Adds the stacks and their frames.
    pub(super) fn add_to(self, columns: &mut Columns, strings: &mut Strings) {
        let mut frames: Numbering<Frame<'_>> = Numbering::default();
        let mut of_stacks: Vec<u32> = Vec::new();
        let mut ends: Vec<u32> = Vec::with_capacity(self.used.values().len());
        for &stack in self.used.values() {
            let numbers = self.table.frames(stack).map(|frame| frames.number(frame));
            of_stacks.extend(numbers);
            ends.push(u32::try_from(of_stacks.len()).expect("fewer frames than 2^32"));
        }
        columns.add_u32("stacks/ends", ends.into_iter());
        columns.add_u32("stacks/frames", of_stacks.into_iter());
        let frames = frames.values();
        let functions = frames.iter().map(|frame| frame.name.raw());
        columns.add_u32(
            "frames/function",
            functions.map(|name| strings.number(name)),
        );
        let files = frames.iter().map(|frame| frame.filename.raw());
        columns.add_u32("frames/file", files.map(|file| strings.number(file)));
        columns.add_u32("frames/line", frames.iter().map(|frame| frame.line));
        let owners = frames.iter().map(|&frame| match Owner::of(frame) {
            Owner::Program => 0,
            Owner::Package => 1,
            Owner::PyTorch => 2,
            Owner::Operator => 3,
            Owner::Runtime => 4,
        });
        columns.add_u32("frames/owner", owners);
    }
}
