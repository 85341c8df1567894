//! The processes of a test, and the commands that they follow.

use std::env;
use std::ffi::{c_int, c_void};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio, exit};
use std::ptr;

use lowtide::*;

use super::common::{Fake, Live, TIDE, allocate, check, command, fill, last_error};

/// The variable with the role of a process.
const ROLE: &str = "LOWTIDE_TEST_ROLE";
pub(crate) const EXPANDABLE: (&str, &str) = ("LOWTIDE_CONF", "expandable_segments:True");
/// Segments that the driver shares whole, by `cuIpcGetMemHandle`.
pub(crate) const PLAIN: (&str, &str) = ("LOWTIDE_CONF", "");
pub(crate) const KINDS: [(&str, &str); 3] = [EXPANDABLE, PLAIN, TIDE];
/// Those whose handles cross as file descriptors.
pub(crate) const MAPPED: [(&str, &str); 2] = [EXPANDABLE, TIDE];
pub(crate) const MIB: usize = 1 << 20;

pub(crate) type Role = fn(&Fake);

/// Plays the role that this process was started for. If it has none, it calls `direct`, which controls the
/// others.
pub(crate) fn play(roles: &[(&str, Role)], direct: impl FnOnce()) {
    let Some(role) = env::var_os(ROLE) else {
        return direct();
    };
    let (_, play) = roles.iter().find(|(name, _)| *name == role).unwrap();
    play(&Fake::load());
    exit(0);
}

/// Another process of the test.
pub(crate) struct Other {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Other {
    pub(crate) fn start(test: &str, role: &str, variables: &[(&str, &str)]) -> Other {
        let mut child = command(test)
            .env(ROLE, role)
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Other {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    /// Returns the next line from the process.
    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some(said) = line.strip_prefix("@ ") {
                return said.trim_end().to_owned();
            }
            line.clear();
        }
        let mut errors = String::new();
        let stderr = self.child.stderr.take().unwrap();
        BufReader::new(stderr).read_to_string(&mut errors).unwrap();
        panic!("it ended: {errors}");
    }

    pub(crate) fn send(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Sends a line to the process and returns the answer.
    pub(crate) fn ask(&mut self, line: &str) -> String {
        self.send(line);
        self.hear()
    }

    /// Waits until the process ends by itself. Returns its standard error.
    pub(crate) fn finish(mut self) -> String {
        drop(self.input.take());
        let output = self.child.wait_with_output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{errors}");
        errors
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Sends a line to the controlling process.
pub(crate) fn say(text: &str) {
    let mut output = std::io::stdout();
    // The test harness may be in the middle of a line.
    writeln!(output, "\n@ {text}").unwrap();
    output.flush().unwrap();
}

/// Returns the next line from the controlling process, `None` at the end.
pub(crate) fn received() -> Option<String> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    (!line.is_empty()).then(|| line.trim_end().to_owned())
}

/// Shares memory. Returns the bytes as hexadecimal text, and the offset.
pub(crate) fn share(memory: *mut c_void) -> Result<(String, usize), Status> {
    let (mut bytes, mut length, mut offset) = (ptr::dangling_mut(), 77, 78);
    // SAFETY: all three may be written to.
    let status = unsafe { lowtide_share(memory, &raw mut bytes, &raw mut length, &raw mut offset) };
    if status != Status::Ok {
        assert_eq!((bytes, length, offset), (ptr::dangling_mut(), 77, 78));
        return Err(status);
    }
    let mut text = String::new();
    // SAFETY: `length` bytes are valid until they are released.
    for byte in unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), length) } {
        write!(text, "{byte:02x}").unwrap();
    }
    // SAFETY: they come from `lowtide_share`.
    unsafe { lowtide_release_bytes(bytes) };
    Ok((text, usize::try_from(offset).unwrap()))
}

pub(crate) fn attach(text: &str, device: c_int) -> Result<*mut c_void, Status> {
    let digits = text.as_bytes().chunks_exact(2);
    let byte = |digits: &[u8]| u8::from_str_radix(str::from_utf8(digits).unwrap(), 16).unwrap();
    let bytes: Vec<u8> = digits.map(byte).collect();
    let untouched = ptr::dangling_mut::<c_void>();
    let mut memory = untouched;
    let start = bytes.as_ptr().cast();
    // SAFETY: the bytes may be read, and `memory` written to.
    match unsafe { lowtide_attach(device, start, bytes.len(), &raw mut memory) } {
        Status::Ok => Ok(memory),
        status => {
            assert_eq!(memory, untouched, "a failure leaves it as it was");
            Err(status)
        }
    }
}

pub(crate) fn behind(memory: *mut c_void, offset: usize) -> *mut c_void {
    memory.wrapping_byte_add(offset)
}

/// The exporter: allocates a block for each size and fills its ends with its index. Sends `bytes offset` for each, then
/// answers `ok` to every command until the end.
pub(crate) fn export(fake: &Fake) {
    let _ = fake;
    let sizes = received().unwrap();
    let sizes = sizes.split(' ').map(|size| size.parse().unwrap());
    let blocks: Vec<(*mut c_void, usize)> = sizes
        .map(|size| (allocate(size, 0).unwrap(), size))
        .collect();
    for (seed, &(memory, size)) in blocks.iter().enumerate() {
        // For large blocks, a few pages are enough: the first and the last.
        for offset in [0, size - size.min(MIB)] {
            fill(behind(memory, offset), size.min(MIB), seed);
        }
        let (bytes, offset) = share(memory).unwrap_or_else(|_| panic!("{}", last_error()));
        say(&format!("{bytes} {offset}"));
    }
    while let Some(line) = received() {
        match line.as_str() {
            // Checks that the importer wrote to the blocks.
            "check" => {
                for (seed, &(memory, size)) in blocks.iter().enumerate() {
                    check(memory, size.min(MIB), seed + 100);
                }
            }
            "free" => {
                for &(memory, _) in &blocks {
                    assert_eq!(lowtide_deallocate(memory), Status::Ok);
                }
                assert_eq!(lowtide_reset(), Status::Ok);
            }
            _ => unreachable!(),
        }
        say("ok");
    }
}

/// Starts an exporter of blocks of these sizes. Returns the process, and bytes and offset of each block.
pub(crate) fn exporter(
    test: &str,
    kind: (&str, &str),
    sizes: &[usize],
) -> (Other, Vec<(String, usize)>) {
    let mut other = Other::start(test, "export", &[kind, ("FAKECUDA_DEVICES", "2")]);
    let text: Vec<String> = sizes.iter().map(usize::to_string).collect();
    other.send(&text.join(" "));
    let shared = sizes.iter().map(|_| {
        let line = other.hear();
        let (bytes, offset) = line.split_once(' ').unwrap();
        (bytes.to_owned(), offset.parse().unwrap())
    });
    let shared = shared.collect();
    (other, shared)
}

/// The importer. Commands: `attach DEVICE BYTES`, `detach ADDRESS`, `check ADDRESS SIZE SEED`, `fill ADDRESS SIZE
/// SEED`, `live`. Answers with the address, `ok`, or the status and the last error.
pub(crate) fn import(fake: &Fake) {
    while let Some(line) = received() {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |index: usize| words[index].parse::<usize>().unwrap();
        let memory = |index: usize| ptr::with_exposed_provenance_mut::<c_void>(number(index));
        let status = match words[0] {
            "attach" => match attach(words.get(2).unwrap_or(&""), words[1].parse().unwrap()) {
                Ok(memory) => {
                    say(&memory.expose_provenance().to_string());
                    continue;
                }
                Err(status) => status,
            },
            "detach" => lowtide_detach(memory(1)),
            "check" => {
                check(memory(1), number(2), number(3));
                Status::Ok
            }
            "fill" => {
                fill(memory(1), number(2), number(3));
                Status::Ok
            }
            "live" => {
                say(&described(&fake.live()));
                continue;
            }
            _ => unreachable!(),
        };
        match status {
            Status::Ok => say("ok"),
            status => say(&format!("{status:?} {}", last_error())),
        }
    }
}

/// Returns a description of the driver objects that exist.
pub(crate) fn described(live: &Live) -> String {
    format!(
        "{} allocations, {} reservations, {} handles, {} mappings",
        live.allocations, live.reservations, live.handles, live.mappings
    )
}

pub(crate) const NOTHING: &str = "0 allocations, 0 reservations, 0 handles, 0 mappings";
pub(crate) const ROLES: [(&str, Role); 2] = [("export", export), ("import", import)];

pub(crate) fn importer(test: &str, variables: &[(&str, &str)]) -> Other {
    let mut all = vec![("FAKECUDA_DEVICES", "2")];
    all.extend_from_slice(variables);
    Other::start(test, "import", &all)
}
