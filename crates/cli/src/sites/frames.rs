//! Chooses the frames of a stack to show: first the call site, the innermost frame of the program's own code, with what it
//! called; then its callers. Frames of Python and of compiled code are left out.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use lowtide_history::{Owner, operator_of};
use lowtide_trace::{Frame, RecordedStr};
use serde::Serialize;

use crate::format;

/// The number of frames shown, enough for most stacks. The JSON has all frames.
const FRAMES_MAX: usize = 8;

/// Returns whether a function belongs to a library and not to the program.
fn is_library(frame: Frame<'_>) -> bool {
    Owner::of(frame) != Owner::Program
}

/// Returns for each of `stacks`, innermost frame first, the lines that describe it. The lines of different stacks
/// differ.
pub(crate) fn texts(stacks: &[Vec<Frame<'_>>]) -> Vec<String> {
    let sites: Vec<Option<CallSite>> = stacks.iter().map(|stack| CallSite::of(stack)).collect();
    let with_sites = || stacks.iter().zip(&sites);
    let mut shown: Vec<BTreeSet<usize>> = with_sites()
        .map(|(stack, site)| chosen(stack, site.as_ref()))
        .collect();
    loop {
        let texts = with_sites().zip(&shown);
        let texts = texts.map(|((stack, site), shown)| text(stack, site.as_ref(), shown));
        let texts: Vec<String> = texts.collect();
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

/// Returns the call site of a stack in one line, without its callers; `None` if no frame shows one.
pub(crate) fn line(stack: &[Frame<'_>]) -> Option<String> {
    if let Some(site) = CallSite::of(stack) {
        return Some(site.line(stack));
    }
    let functions = stack.iter().rev().map(|frame| frame.name.raw());
    let mut operators: Vec<&str> = functions.filter_map(operator_of).collect();
    // What backward calls, from the outermost to the innermost.
    let innermost = operators.pop()?;
    operators.truncate(1);
    operators.push(innermost);
    operators.dedup();
    Some(operators.join(" › "))
}

/// The innermost frame of the program's own code in a stack, or else of a package; and what tells its allocations apart.
#[derive(Debug)]
struct CallSite {
    own: usize,
    /// The innermost frame of a package that was called from there, or else of PyTorch's Python code.
    library: Option<usize>,
    /// The operator that the innermost Python frame called.
    operator: Option<usize>,
}

impl CallSite {
    /// Returns the call site of a stack; `None` if no frame is the program's or a package's.
    fn of(stack: &[Frame<'_>]) -> Option<CallSite> {
        let owners: Vec<Owner> = stack.iter().copied().map(Owner::of).collect();
        let first = |owner| owners.iter().position(|&of_frame| of_frame == owner);
        let own = first(Owner::Program).or(first(Owner::Package))?;
        let called = |owner| first(owner).filter(|&frame| frame < own);
        let library = called(Owner::Package).or_else(|| called(Owner::PyTorch));
        let is_python =
            |owner: &Owner| matches!(owner, Owner::Program | Owner::Package | Owner::PyTorch);
        let python = owners.iter().position(is_python).unwrap_or(own);
        let operator = owners[..python]
            .iter()
            .rposition(|&owner| owner == Owner::Operator);
        Some(CallSite {
            own,
            library,
            operator,
        })
    }

    /// Returns the line of the call site: what it called follows, and the frames inside of it that are `shown`.
    fn text(&self, stack: &[Frame<'_>], shown: &BTreeSet<usize>) -> String {
        let more = shown.range(..self.own).copied();
        let called: BTreeSet<usize> = more.chain(self.library).chain(self.operator).collect();
        let own = frame_text(stack[self.own]);
        let outermost_first = called.iter().rev();
        outermost_first.fold(own, |text, &called| {
            format!("{text} › {}", place_text(stack[called]))
        })
    }

    /// Returns the line of the call site, with short paths.
    fn line(&self, stack: &[Frame<'_>]) -> String {
        let frames = [Some(self.own), self.library, self.operator];
        let places = frames
            .into_iter()
            .flatten()
            .map(|frame| place_text(stack[frame]));
        places.collect::<Vec<_>>().join(" › ")
    }

    fn contains(&self, frame: usize) -> bool {
        frame == self.own || self.library == Some(frame) || self.operator == Some(frame)
    }
}

/// Returns the frames to show of a stack besides its call site, without regard to others: the callers in the program and in
/// packages; or, without a call site, what is neither Python's nor compiled, or else all.
fn chosen(stack: &[Frame<'_>], site: Option<&CallSite>) -> BTreeSet<usize> {
    let begin = site.map_or(0, |site| site.own + 1);
    let is_shown = |&frame: &usize| match Owner::of(stack[frame]) {
        Owner::Program | Owner::Package => true,
        Owner::PyTorch | Owner::Operator => site.is_none(),
        Owner::Runtime => false,
    };
    let found: BTreeSet<usize> = (begin..stack.len())
        .filter(is_shown)
        .take(FRAMES_MAX)
        .collect();
    if site.is_none() && found.is_empty() {
        return (0..stack.len()).take(FRAMES_MAX).collect();
    }
    found
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

fn text(stack: &[Frame<'_>], site: Option<&CallSite>, shown: &BTreeSet<usize>) -> String {
    let mut text = String::new();
    if let Some(site) = site {
        let _ = writeln!(text, "    {}", site.text(stack, shown));
    }
    let is_in_site = |frame: usize| site.is_some_and(|site| site.contains(frame));
    let begin = site.map_or(0, |site| site.own + 1);
    for &frame in shown.range(begin..).filter(|&&frame| frame < stack.len()) {
        let _ = writeln!(text, "    {}", frame_text(stack[frame]));
    }
    let hidden = (0..stack.len()).filter(|&frame| !is_in_site(frame) && !shown.contains(&frame));
    text + &skipped(hidden.count())
}

fn skipped(frames: usize) -> String {
    match frames {
        0 => String::new(),
        _ => format!(
            "    … {} left out\n",
            format::counted(frames as u64, "frame")
        ),
    }
}

/// Returns a frame as a line of a stack shows it.
fn frame_text(frame: Frame<'_>) -> String {
    format!("{}  {}:{}", frame.name, frame.filename, frame.line)
}

/// Returns a frame in short: an operator's name; else its function, and its file with one directory.
fn place_text(frame: Frame<'_>) -> String {
    if let Some(operator) = operator_of(frame.name.raw()) {
        return operator.to_owned();
    }
    let file = frame.filename.to_string();
    let short = match file.rmatch_indices('/').nth(1) {
        Some((slash, _)) => &file[slash + 1..],
        None => &file,
    };
    format!("{} ({short}:{})", frame.name, frame.line)
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
    fn the_call_site_comes_first_and_then_its_callers() {
        let [text] = &*texts(&[deep(20, 7)]) else {
            panic!("one text");
        };
        let expected = "    forward  /app/model.py:7 › _call_impl (modules/module.py:0)\n    \
                        main  /app/train.py:1\n    … 19 frames left out\n";
        assert_eq!(*text, expected);
        let only = stack(&[("main", "train.py", 1)]);
        assert_eq!(texts(&[only]), ["    main  train.py:1\n"]);
    }

    /// As PyTorch records them without arguments: C++ and Python mixed.
    #[test]
    fn compiled_code_is_left_out_but_for_the_operator() {
        let layer = "/venv/lib/python3.12/site-packages/models/layer.py";
        let inner = [
            ("torch::unwind::unwind()", "??", 0),
            ("at::_ops::empty_like::call(at::Tensor const&)", "??", 0),
            ("at::_ops::gelu::call(at::Tensor const&)", "??", 0),
            (
                "cfunction_call",
                "/usr/src/Python-3.12.3/Objects/methodobject.c",
                542,
            ),
        ];
        let outer = [
            ("main", "/app/train.py", 1),
            ("_PyEval_EvalFrameDefault", "../Python/ceval.c", 4769),
            ("<module>", "/app/train.py", 9),
        ];
        let of = |called: &[(&'static str, &'static str, u32)]| {
            stack(&[&inner[..], called, &outer[..]].concat())
        };
        let texts = texts(&[
            of(&[]),
            of(&[("_call_impl", TORCH, 5)]),
            of(&[("_call_impl", TORCH, 5), ("forward", layer, 3)]),
        ]);
        let rest = "\n    <module>  /app/train.py:9\n    … 4 frames left out\n";
        assert_eq!(texts[0], format!("    main  /app/train.py:1 › gelu{rest}"));
        let of_torch = "    main  /app/train.py:1 › _call_impl (modules/module.py:5) › gelu";
        assert_eq!(texts[1], format!("{of_torch}{rest}"));
        let of_package = "    main  /app/train.py:1 › forward (models/layer.py:3) › gelu";
        assert_eq!(
            texts[2],
            format!("{of_package}{}", rest.replace("… 4", "… 5"))
        );
    }

    /// The backward pass runs in a thread of PyTorch's own.
    #[test]
    fn without_a_call_site_operators_are_shown() {
        let backward = "torch::autograd::generated::MmBackward0::apply(x&&)";
        let frames = [
            ("torch::unwind::unwind()", "??", 0),
            ("at::_ops::mm::call(at::Tensor const&)", "??", 0),
            (backward, "??", 0),
            ("clone", "??", 0),
        ];
        let expected = format!(
            "    at::_ops::mm::call(at::Tensor const&)  ??:0\n    {backward}  ??:0\n    … 2 frames left out\n"
        );
        assert_eq!(texts(&[stack(&frames)]), [expected]);
        let compiled = stack(&[("clone", "??", 0)]);
        assert_eq!(texts(&[compiled]), ["    clone  ??:0\n"]);
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
            text.ends_with("    f  /app/a.py:8\n    … 2 frames left out\n"),
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
        assert!(texts[1].contains("module.py:900)"), "{}", texts[1]);
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
