//! `lowtide top`: the processes of this machine that run on lowtide, and their memory.

mod process;
mod sample;
mod screen;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use crate::args::TopArgs;
use crate::{json, output};
use process::Process;
use screen::History;

/// Shows the processes once, or repeatedly until the user ends the command.
///
/// # Errors
///
/// If standard output cannot be written to.
pub(crate) fn run(args: &TopArgs) -> anyhow::Result<ExitCode> {
    let interval = Duration::from_secs_f64(args.interval);
    let mut before = look();
    if args.once || args.json {
        // Rates need two readings.
        thread::sleep(interval);
        let processes = after(&before, interval);
        let text = if args.json {
            json::text(&processes)?
        } else {
            screen::table(&processes, &BTreeMap::new())
        };
        output::print(&text)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut history = History::new();
    loop {
        let begin = Instant::now();
        thread::sleep(interval);
        let processes = after(&before, begin.elapsed());
        screen::add(&mut history, &processes);
        screen::show(&screen::table(&processes, &history))?;
        before = processes;
    }
}

/// Returns every process, the one with the most reserved memory first.
fn look() -> Vec<Process> {
    let mut processes: Vec<Process> = sample::all().iter().map(Process::of).collect();
    processes.sort_by_key(|process| (Reverse(process.reserved_bytes()), process.pid));
    processes
}

/// Returns every process, with its rates since `before`.
fn after(before: &[Process], elapsed: Duration) -> Vec<Process> {
    let mut processes = look();
    for process in &mut processes {
        let earlier = before.iter().find(|earlier| earlier.name == process.name);
        if let Some(earlier) = earlier {
            process.count_since(earlier, elapsed);
        }
    }
    processes
}
