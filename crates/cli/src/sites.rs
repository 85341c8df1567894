//! Call sites, as text and as JSON.

pub(crate) mod frames;

use std::collections::HashMap;

use lowtide_core::{Bytes, Stream};
use lowtide_history::{Block, History, Site, StepSource, Steps, stream_text};
use lowtide_trace::{Frame, RecordedStr, RecordedText, StackId, StackTable};
use serde::Serialize;

use crate::format;

/// The requested sizes of each size class and stream, for requests without a stack. One call site has a whole
/// class.
#[derive(Debug)]
pub(crate) struct Sizes {
    ranges: HashMap<(Bytes, Stream), (Bytes, Bytes)>,
}

impl Sizes {
    /// Collects the sizes in `histories`: of blocks without stacks or, if blocks are compared `by_size`, of all.
    /// Linear time.
    pub(crate) fn new(histories: &[History], by_size: bool) -> Sizes {
        let mut ranges: HashMap<(Bytes, Stream), (Bytes, Bytes)> = HashMap::new();
        let blocks = histories
            .iter()
            .flat_map(|history| history.blocks.iter().map(move |block| (history, block)));
        for (history, block) in blocks.filter(|(_, it)| by_size || it.stack == StackId::NONE) {
            let without_stack = Block {
                stack: StackId::NONE,
                ..*block
            };
            if let Site::Size { size_max, stream } = Site::of(&without_stack, history) {
                let asked = block.requested;
                let (least, most) = ranges.entry((size_max, stream)).or_insert((asked, asked));
                *least = asked.min(*least);
                *most = asked.max(*most);
            }
        }
        Sizes { ranges }
    }

    /// Returns the smallest and the largest request of a class.
    fn range(&self, size_max: Bytes, stream: Stream) -> (Bytes, Bytes) {
        let range = self.ranges.get(&(size_max, stream)).copied();
        range.unwrap_or((size_max, size_max))
    }
}

/// A call site in JSON: a stack or, without one, a size and a stream.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum SiteRow<'a> {
    Stack {
        /// Innermost first.
        stack: Vec<FrameRow<'a>>,
    },
    Size {
        /// The smallest and the largest request.
        size_min_bytes: u64,
        size_max_bytes: u64,
        stream: String,
    },
}

/// A frame of a stack.
#[derive(Debug, Serialize)]
pub(crate) struct FrameRow<'a> {
    function: RecordedStr<'a>,
    file: RecordedStr<'a>,
    line: u32,
}

/// A job's steps in JSON.
#[derive(Debug, Serialize)]
pub(crate) struct StepsRow<'a> {
    count: usize,
    /// `annotation`, `period` or `parts`. With `parts` no steps were found, and the recording is cut into equal
    /// parts.
    found_by: &'static str,
    annotation: Option<&'a RecordedText>,
    /// The share of the kinds of requests that repeat from step to step.
    repeated_share: Option<f64>,
}

impl<'a> SiteRow<'a> {
    pub(crate) fn new(site: Site, stacks: &'a StackTable, sizes: &Sizes) -> SiteRow<'a> {
        match site {
            Site::Stack(stack) => SiteRow::Stack {
                stack: stacks.frames(stack).map(FrameRow::new).collect(),
            },
            Site::Size { size_max, stream } => {
                let (least, most) = sizes.range(size_max, stream);
                SiteRow::Size {
                    size_min_bytes: least.get(),
                    size_max_bytes: most.get(),
                    stream: stream_text(stream),
                }
            }
        }
    }
}

impl<'a> FrameRow<'a> {
    pub(crate) fn new(frame: Frame<'a>) -> FrameRow<'a> {
        FrameRow {
            function: frame.name,
            file: frame.filename,
            line: frame.line,
        }
    }
}

impl<'a> StepsRow<'a> {
    pub(crate) fn new(steps: &'a Steps) -> StepsRow<'a> {
        let (found_by, annotation, repeated_share) = match &steps.source {
            StepSource::Annotation(name) => ("annotation", Some(name), None),
            StepSource::Period(share) => ("period", None, Some(*share)),
            StepSource::Parts => ("parts", None, None),
        };
        StepsRow {
            count: steps.len(),
            found_by,
            annotation,
            repeated_share,
        }
    }
}

/// Returns a sentence about the steps, without a full stop.
pub(crate) fn steps_text(steps: &Steps) -> String {
    let count = format::counted(steps.len() as u64, "step");
    match &steps.source {
        StepSource::Annotation(name) => {
            format!("{count}, by the program's own mark `{name}`")
        }
        StepSource::Period(share) => format!(
            "{count}, by the period of the allocations: {:.0} % of their kinds repeat",
            100.0 * share
        ),
        StepSource::Parts => {
            let parts = steps.len();
            format!("its steps were not found; {parts} equal parts stand for them")
        }
    }
}

/// Returns for each of `sites` the lines that describe the call site, innermost function first. The lines of any
/// two sites differ.
pub(crate) fn site_texts(sites: &[(Site, &StackTable)], sizes: &Sizes) -> Vec<String> {
    let stacks = sites.iter().map(|&(site, stacks)| stack_of(site, stacks));
    let stacks: Vec<Vec<Frame<'_>>> = stacks.collect();
    let size_texts = sites.iter().map(|&(site, _)| match site {
        Site::Stack(_) => None,
        Site::Size { size_max, stream } => {
            let texts = size_texts(sizes, size_max, stream);
            Some(texts.map(|text| format!("    {text} (no stack is recorded)\n")))
        }
    });
    let size_texts: Vec<Option<[String; 2]>> = size_texts.collect();
    let mut alike: HashMap<String, usize> = HashMap::new();
    for [short, _] in size_texts.iter().flatten() {
        *alike.entry(short.clone()).or_default() += 1;
    }
    let texts = frames::texts(&stacks).into_iter().zip(size_texts);
    let text = |(text, of_size): (String, Option<[String; 2]>)| match of_size {
        None => text,
        Some([short, _]) if alike[&short] == 1 => short,
        Some([_, exact]) => exact,
    };
    texts.map(text).collect()
}

/// Returns a call site in one line, without its callers.
pub(crate) fn site_line(site: Site, stacks: &StackTable, sizes: &Sizes) -> String {
    match site {
        Site::Stack(_) => {
            let stack = stack_of(site, stacks);
            let function = stack.first().map(|frame| frame.name.to_string());
            frames::line(&stack).or(function).unwrap_or_default()
        }
        Site::Size { size_max, stream } => {
            let [short, _] = size_texts(sizes, size_max, stream);
            short
        }
    }
}

/// Returns a text for the requests of a class, in short and exact to the byte.
fn size_texts(sizes: &Sizes, size_max: Bytes, stream: Stream) -> [String; 2] {
    let (least, most) = sizes.range(size_max, stream);
    let exact = |size: Bytes| format!("{} bytes", format::count(size.get()));
    let texts = [
        (least.to_string(), most.to_string()),
        (exact(least), exact(most)),
    ];
    texts.map(|(least_text, most_text)| {
        let size = if least_text != most_text {
            format!("{least_text} to {most_text}")
        } else if least == most {
            most_text
        } else {
            format!("about {most_text}")
        };
        let stream = stream_text(stream);
        format!("requests of {size} in stream {stream}")
    })
}

/// Returns the frames of a call site, innermost first; empty if it has no stack.
pub(crate) fn stack_of(site: Site, stacks: &StackTable) -> Vec<Frame<'_>> {
    match site {
        Site::Stack(stack) => stacks.frames(stack).collect(),
        Site::Size { .. } => Vec::new(),
    }
}
