//! `lowtide doctor`: checks the driver and the cards, and says what to do about missing parts.
//!
//! `python -m lowtide doctor` reads these checks as JSON and adds those that need Python.

use std::fmt::Write as _;
use std::fs;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use lowtide_core::DriverError;
use lowtide_cuda::{Attribute, Device, Library, LoadError};
use lowtide_trace::RecordedText;
use serde::Serialize;

use crate::args::DoctorArgs;
use crate::{json, output, python};

/// One check and its result.
#[derive(Serialize, PartialEq, Eq, Debug)]
struct Check {
    name: String,
    state: State,
    /// The result, with text from the driver and the loader, such as a path.
    found: RecordedText,
    /// What to do if something is missing.
    advice: Option<&'static str>,
}

#[derive(Clone, Copy, Serialize, PartialEq, Eq, Debug)]
#[serde(rename_all = "lowercase")]
enum State {
    /// Everything works.
    Ok,
    /// lowtide works, with some features missing.
    Limited,
    /// lowtide does not work.
    Missing,
}

#[derive(Serialize)]
struct Report<'a> {
    works: bool,
    checks: &'a [Check],
}

/// Runs `lowtide doctor`: by the Python that has lowtide's package, if there is one. The exit code is 1 if lowtide does not work here.
///
/// # Errors
///
/// If standard output cannot be written to.
pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode> {
    let json = if args.json { &["--json"][..] } else { &[] };
    if !args.without_python
        && let Ok(not_run) = python::become_package(&[&["doctor"], json].concat())
    {
        return Ok(not_run);
    }
    let checks = examine(Library::load());
    let works = checks.iter().all(|check| check.state != State::Missing);
    output::print(&if args.json {
        let checks = &checks;
        json::line(&Report { works, checks })?
    } else {
        text(&checks)
    })?;
    Ok(ExitCode::from(u8::from(!works)))
}

fn examine(library: Result<Arc<Library>, LoadError>) -> Vec<Check> {
    let library = match library {
        Ok(library) => library,
        Err(error) => return vec![Check::ok("driver", &error).but(State::Missing, cure(&error))],
    };
    let mut checks = vec![Check::ok("driver", driver_found(&library))];
    let cards = cards(&library, &mut checks).and_then(|cards| {
        for card in &cards {
            checks.extend(virtual_memory(card)?);
        }
        checks.extend(peers(&cards)?);
        Ok(())
    });
    if let Err(error) = cards {
        checks.push(Check::ok("cards", &error).but(State::Missing, SEE_NVIDIA_SMI));
    }
    checks
}

const SEE_NVIDIA_SMI: &str = "see whether nvidia-smi shows the cards; where it does not, the driver \
                              needs help, which a restart of the machine often is";

/// Returns what to do about a driver that cannot be loaded.
fn cure(error: &LoadError) -> &'static str {
    match error {
        LoadError::NotFound { .. } => {
            "install NVIDIA's driver; a container must be started with the cards (`--gpus all`)"
        }
        LoadError::TooOld { .. } => "install a newer driver",
        LoadError::NoDevice => "unset CUDA_VISIBLE_DEVICES, or name cards that are there",
        LoadError::MissingFunction { .. } => {
            "see which libcuda.so.1 LD_LIBRARY_PATH leads to: it is not NVIDIA's"
        }
        _ => SEE_NVIDIA_SMI,
    }
}

fn driver_found(library: &Library) -> String {
    let cuda = library.version();
    // Only the kernel module has the driver's version number. A container may hide it.
    match fs::read_to_string("/sys/module/nvidia/version") {
        Ok(version) => format!("{}, for CUDA up to {cuda}", version.trim()),
        Err(_) => format!("for CUDA up to {cuda}"),
    }
}

/// Returns the cards, and adds a check for each.
fn cards(library: &Arc<Library>, checks: &mut Vec<Check>) -> Result<Vec<Device>, DriverError> {
    let cards: Vec<Device> = (0..library.device_count()?)
        .map(|ordinal| library.device(ordinal))
        .collect::<Result<_, _>>()?;
    for card in &cards {
        let found = format!(
            "{}, {}, compute capability {}.{}",
            card.name()?,
            card.total_memory()?,
            card.attribute(Attribute::ComputeCapabilityMajor)?,
            card.attribute(Attribute::ComputeCapabilityMinor)?
        );
        checks.push(Check::ok(format!("card {}", card.ordinal()), found));
    }
    Ok(cards)
}

/// Returns the checks of a card's features beyond plain allocations.
fn virtual_memory(card: &Device) -> Result<Vec<Check>, DriverError> {
    let check = |what, attribute, can, cannot, advice| {
        let name = format!("card {} {what}", card.ordinal());
        Ok(if card.attribute(attribute)? != 0 {
            Check::ok(name, can)
        } else {
            Check::ok(name, cannot).but(State::Limited, advice)
        })
    };
    let virtual_memory = check(
        "virtual memory",
        Attribute::VirtualMemory,
        "yes",
        "no",
        "leave expandable_segments off: the other settings and strategies do without",
    )?;
    if virtual_memory.state != State::Ok {
        return Ok(vec![virtual_memory]);
    }
    Ok(vec![
        virtual_memory,
        check(
            "sharing",
            Attribute::PosixFileDescriptors,
            "file descriptors of virtual memory",
            "no file descriptors of virtual memory",
            "leave expandable_segments off where processes share tensors",
        )?,
        check(
            "GPUDirect RDMA",
            Attribute::GpuDirectRdma,
            "with virtual memory",
            "not with virtual memory",
            "leave expandable_segments off where network cards read and write tensors",
        )?,
    ])
}

/// Returns a check of which cards can access each other's memory; `None` for fewer than two cards.
fn peers(cards: &[Device]) -> Result<Option<Check>, DriverError> {
    let mut apart = Vec::new();
    for card in cards {
        for other in cards {
            if card.ordinal() != other.ordinal() && !card.can_access(other)? {
                apart.push(format!("{} and {}", card.ordinal(), other.ordinal()));
            }
        }
    }
    Ok(match (cards, &*apart) {
        ([] | [_], _) => None,
        (_, []) => Some(Check::ok("peers", "every card reaches every other")),
        (_, apart) => Some(
            Check::ok("peers", format!("not between {}", apart.join(", "))).but(
                State::Limited,
                "nothing: copies between these cards go through the host, as without lowtide",
            ),
        ),
    })
}

/// Returns one line for each check, and another for what to do.
fn text(checks: &[Check]) -> String {
    let width = checks.iter().map(|check| check.name.len()).max();
    let mut text = String::new();
    for check in checks {
        let (state, width) = (check.state.word(), width.unwrap_or(0));
        let _ = writeln!(text, "{state:7}  {:width$}  {}", check.name, check.found);
        if let Some(advice) = check.advice {
            let _ = writeln!(text, "{:7}  {:width$}  → {advice}", "", "");
        }
    }
    text
}

impl Check {
    fn ok(name: impl Into<String>, found: impl ToString) -> Check {
        Check {
            name: name.into(),
            state: State::Ok,
            found: found.to_string().into(),
            advice: None,
        }
    }

    /// Returns the check with another state, and what to do about it.
    fn but(self, state: State, advice: &'static str) -> Check {
        Check {
            state,
            advice: Some(advice),
            ..self
        }
    }
}

impl State {
    fn word(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Limited => "limited",
            State::Missing => "missing",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_has_its_cure() {
        let message = "libcuda.so.1: no such file".to_owned();
        let checks = examine(Err(LoadError::NotFound { message }));
        assert_eq!(
            text(&checks),
            "missing  driver  NVIDIA's driver cannot be loaded: libcuda.so.1: no such file\n\
             \x20                → install NVIDIA's driver; a container must be started with the cards \
             (`--gpus all`)\n"
        );
        let no_device = examine(Err(LoadError::NoDevice));
        assert!(
            no_device[0]
                .advice
                .unwrap()
                .contains("CUDA_VISIBLE_DEVICES")
        );
        let start = LoadError::Start(DriverError::OutOfMemory);
        assert_eq!(cure(&start), SEE_NVIDIA_SMI);
    }

    #[test]
    fn names_are_one_column() {
        let checks = [
            Check::ok("driver", "new"),
            Check::ok("card 0 sharing", "no").but(State::Limited, "do without"),
        ];
        assert_eq!(
            text(&checks),
            "ok       driver          new\n\
             limited  card 0 sharing  no\n\
             \x20                        → do without\n"
        );
    }
}
