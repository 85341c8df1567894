//! Chooses the frames of a stack to show: the innermost, which allocate, and those of the program's own code, which
//! show why.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use lowtide_history::Owner;
use lowtide_trace::{Frame, RecordedStr};
use serde::Serialize;

use crate::format;

/// The number of frames shown, enough for most stacks. The JSON has all frames.
const FRAMES_MAX: usize = 8;

/// The number of innermost frames among them, if the program's own code lies further out.
const INNERMOST: usize = 3;

/// Returns whether a function belongs to a library and not to the program.
fn is_library(frame: Frame<'_>) -> bool {
    Owner::of(frame) != Owner::Program
}

/// Returns for each of `stacks`, innermost frame first, the lines that describe it. The lines of different stacks
/// differ.
pub(crate) fn texts(stacks: &[Vec<Frame<'_>>]) -> Vec<String> {
    let mut shown: Vec<BTreeSet<usize>> = stacks.iter().map(|stack| chosen(stack)).collect();
    loop {
        let chosen = stacks.iter().zip(&shown);
        let texts: Vec<String> = chosen.map(|(stack, shown)| text(stack, shown)).collect();
        let mut alike: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (index, text) in texts.iter().enumerate() {
            alike.entry(text).or_default().push(index);
        }
        let mut is_done = true;
        for group in alike.into_values() {
            let Some(frame) = first_difference(stacks, &group) else {
                continue;
            };
            for index in group {
                is_done &= !shown[index].insert(frame);
            }
        }
        // This ends: each round shows more frames, and stacks are finite.
        if is_done {
            return texts;
        }
    }
}

/// Returns the frames to show of a stack, without regard to others.
fn chosen(stack: &[Frame<'_>]) -> BTreeSet<usize> {
    let own = stack.iter().position(|&frame| !is_library(frame));
    let is_far = stack.len() > FRAMES_MAX;
    match own.filter(|&own| is_far && own > INNERMOST) {
        Some(own) => (0..INNERMOST)
            .chain((own..stack.len()).take(FRAMES_MAX - INNERMOST))
            .collect(),
        None => (0..stack.len()).take(FRAMES_MAX).collect(),
    }
}

/// Returns the innermost frame in which the stacks of a `group` differ, if they do.
fn first_difference(stacks: &[Vec<Frame<'_>>], group: &[usize]) -> Option<usize> {
    let (&first, others) = group.split_first()?;
    let longest = group.iter().map(|&index| stacks[index].len()).max()?;
    (0..longest).find(|&frame| {
        let of_first = stacks[first].get(frame);
        { others.iter() }.any(|&other| stacks[other].get(frame) != of_first)
    })
}

fn text(stack: &[Frame<'_>], shown: &BTreeSet<usize>) -> String {
    let mut text = String::new();
    let mut next = 0;
    for &index in shown.iter().filter(|&&index| index < stack.len()) {
        text += &skipped(index - next);
        let _ = writeln!(text, "    {}", frame_text(stack[index]));
        next = index + 1;
    }
    text + &skipped(stack.len() - next)
}

fn skipped(frames: usize) -> String {
    match frames {
        0 => String::new(),
        _ => format!("    … {}\n", format::counted(frames as u64, "more frame")),
    }
}

/// Returns a frame as a line of a stack shows it.
fn frame_text(frame: Frame<'_>) -> String {
    format!("{}  {}:{}", frame.name, frame.filename, frame.line)
}

/// The function that several stacks share.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Common<'a> {
    #[serde(rename = "function")]
    pub(crate) name: RecordedStr<'a>,
    pub(crate) file: RecordedStr<'a>,
    /// The line from which all stacks were called; `None` if they are at different lines of the function.
    pub(crate) line: Option<u32>,
}

/// Returns the innermost frame outside of libraries that all `stacks` share; `None` for fewer than two stacks.
pub(crate) fn common<'a>(stacks: &[Vec<Frame<'a>>]) -> Option<Common<'a>> {
    let [first, others @ ..] = stacks else {
        return None;
    };
    if others.is_empty() {
        return None;
    }
    let outermost = |stack: &[Frame<'a>], frame: usize| stack.iter().rev().nth(frame).copied();
    let is_shared = |&frame: &usize| {
        let of_first = outermost(first, frame);
        { others.iter() }.all(|stack| outermost(stack, frame) == of_first)
    };
    let shared = (0..first.len()).take_while(is_shared).count();
    let function_of = |stack: &[Frame<'a>]| {
        let frame = outermost(stack, shared)?;
        Some((frame.name, frame.filename))
    };
    let function = outermost(first, shared).filter(|&frame| {
        let is_same = |stack: &Vec<Frame<'a>>| function_of(stack) == function_of(first);
        !is_library(frame) && others.iter().all(is_same)
    });
    let mut callers = first[first.len() - shared..].iter().copied();
    let caller = callers.find(|&frame| !is_library(frame));
    let line = caller
        .filter(|_| function.is_none())
        .map(|frame| frame.line);
    function.or(caller).map(|frame| Common {
        name: frame.name,
        file: frame.filename,
        line,
    })
}

#[cfg(test)]
mod tests {
    use lowtide_trace::RecordedStr;

    use super::*;

    fn stack<'a>(frames: &[(&'a str, &'a str, u32)]) -> Vec<Frame<'a>> {
        let frame = |&(name, filename, line)| Frame {
            name: RecordedStr::from(name),
            filename: RecordedStr::from(filename),
            line,
        };
        frames.iter().map(frame).collect()
    }

    const TORCH: &str = "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py";

    /// Returns a stack of `depth` functions of PyTorch, called by the program.
    fn deep(depth: u32, model: u32) -> Vec<Frame<'static>> {
        let library = (0..depth).map(|line| ("_call_impl", TORCH, line));
        let own = [
            ("forward", "/app/model.py", model),
            ("main", "/app/train.py", 1),
        ];
        stack(&library.chain(own).collect::<Vec<_>>())
    }

    #[test]
    fn the_programs_own_code_is_seen() {
        let [text] = &*texts(&[deep(20, 7)]) else {
            panic!("one text");
        };
        let expected = format!(
            "    _call_impl  {TORCH}:0\n    _call_impl  {TORCH}:1\n    _call_impl  {TORCH}:2\n    \
             … 17 more frames\n    forward  /app/model.py:7\n    main  /app/train.py:1\n"
        );
        assert_eq!(*text, expected);
        assert_eq!(texts(&[deep(6, 7)])[0].lines().count(), 8);
        assert!(!texts(&[deep(6, 7)])[0].contains("more"));
    }

    #[test]
    fn where_all_is_the_programs_own_the_innermost_are_shown() {
        let own = stack(
            &(0..11)
                .map(|line| ("f", "/app/a.py", line))
                .collect::<Vec<_>>(),
        );
        let text = &texts(&[own])[0];
        assert!(text.starts_with("    f  /app/a.py:0\n"));
        assert!(
            text.ends_with("    f  /app/a.py:7\n    … 3 more frames\n"),
            "{text}"
        );
    }

    #[test]
    fn different_stacks_are_told_apart() {
        // Each differs in a frame that is not among its chosen ones; two stacks differ in the same frame.
        let mut stacks = [deep(20, 7), deep(20, 7), deep(20, 7), deep(20, 7)];
        stacks[1][10].line = 900;
        stacks[2][10].line = 901;
        stacks[3][15].line = 902;
        let texts = texts(&stacks);
        let distinct: BTreeSet<&String> = texts.iter().collect();
        assert_eq!(distinct.len(), 4, "{texts:#?}");
        assert!(texts[1].contains("module.py:900\n"), "{}", texts[1]);
        assert!(
            texts.iter().all(|text| text.lines().count() <= 10),
            "{texts:#?}"
        );
    }

    #[test]
    fn what_stacks_share_is_named() {
        let leak = |line, caller| {
            stack(&[
                ("empty", TORCH, 9),
                ("forward", "/app/a.py", line),
                ("step", "/app/b.py", caller),
                ("main", "/app/b.py", 1),
            ])
        };
        let named = |stacks: &[Vec<Frame<'static>>]| match common(stacks) {
            Some(Common { name, line, .. }) => match line {
                None => format!("in {name}"),
                Some(line) => format!("from {name}:{line}"),
            },
            None => "nothing".to_owned(),
        };
        assert_eq!(named(&[leak(1, 5), leak(2, 5)]), "in forward");
        assert_eq!(named(&[leak(1, 5), leak(1, 6)]), "in step");
        let mut other = leak(1, 5);
        other[1].name = "backward".into();
        assert_eq!(named(&[leak(1, 5), other]), "from step:5");
        assert_eq!(named(&[leak(1, 5)]), "nothing");
        let library = stack(&[("run", TORCH, 3)]);
        assert_eq!(named(&[library.clone(), library]), "nothing");
    }
}
