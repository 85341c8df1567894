//! Detects the format of a recording, and the container around it.

use base64::engine::general_purpose::STANDARD;
use base64::read::DecoderReader;

use crate::error::{ErrorKind, Result, TraceError};
use crate::model::Snapshot;
use crate::pickle::opcode;
use crate::source::{Compression, Input};
use crate::{compact, snapshot};

/// The text before a snapshot in a page of PyTorch's viewer, and the most bytes before that text.
const PAGE_SNAPSHOT: &[u8] = b"\"base64\": \"";
const PAGE_HEAD_BYTES: usize = 64 << 10;

const ZIP_MAGIC: &[u8] = b"PK\x03\x04";

/// The first bytes of a file by `torch.save` up to torch 1.5, or later with its old format on request. They pickle
/// a magic number.
const OLD_SAVE: &[u8] = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";

/// Returns the recording in `input`, in whichever format it is.
pub(crate) fn read(input: &mut Input<'_>) -> Result<Snapshot> {
    if compact::is_compact(input)? {
        return compact::read(input);
    }
    let start = input.peek(OLD_SAVE.len())?;
    if start.starts_with(OLD_SAVE) {
        return Err(TraceError::foreign(
            "written by torch.save in its old form; load it in Python and write it by pickle.dump",
        ));
    }
    if let Some(compression) = Compression::of(start) {
        let what = format!("compressed twice; undo one by `{} -d`", compression.name());
        return Err(TraceError::foreign(what));
    }
    if start.starts_with(ZIP_MAGIC) {
        return read_archive(input);
    }
    let text = start.trim_ascii_start();
    match (start.first().copied(), text.first().copied()) {
        (None, _) => Err(TraceError::new(ErrorKind::Truncated, "the file is empty")),
        (Some(opcode::PROTO | opcode::MARK | opcode::EMPTY_DICT | opcode::EMPTY_LIST), _) => {
            alone(snapshot::read(input)?, input)
        }
        (_, Some(b'<')) => read_page(input),
        (_, Some(b'{' | b'[')) => alone(snapshot::read_json(input)?, input),
        _ => Err(TraceError::foreign(
            "neither a pickle nor a recording of lowtide's; expected what torch.cuda.memory._dump_snapshot writes",
        )),
    }
}

/// Reads a snapshot by `torch.save`: an archive whose first file is an uncompressed pickle.
fn read_archive(input: &mut Input<'_>) -> Result<Snapshot> {
    const STORED: [u8; 2] = [0, 0];
    let [.., name_low, name_high, more_low, more_high] = {
        let header: [u8; 30] = input.array()?;
        if header[8..10] != STORED {
            return Err(archive());
        }
        header
    };
    let name_bytes = u16::from_le_bytes([name_low, name_high]);
    let more_bytes = u16::from_le_bytes([more_low, more_high]);
    let name = input.bytes(usize::from(name_bytes))?;
    if !name.ends_with(b"/data.pkl") {
        return Err(archive());
    }
    input.bytes(usize::from(more_bytes))?;
    snapshot::read(input)
}

fn archive() -> TraceError {
    TraceError::foreign("an archive; unpack it (unzip) and name the recording in it")
}

/// Reads a snapshot from a page of PyTorch's viewer.
fn read_page(input: &mut Input<'_>) -> Result<Snapshot> {
    let head = input.peek(PAGE_HEAD_BYTES)?;
    let has = |text: &[u8]| position(head, text).is_some();
    let Some(start) = position(head, PAGE_SNAPSHOT) else {
        return Err(TraceError::foreign(if has(b"<title>lowtide re") {
            "a page that lowtide wrote; name the recording that it was made from"
        } else if has(b"<title>GPU Memory Timeline") {
            snapshot::PROFILE
        } else {
            "a page without a snapshot in it; expected what torch.cuda.memory._dump_snapshot writes"
        }));
    };
    input.bytes(start + PAGE_SNAPSHOT.len())?;
    let mut decoded = input.decoded_before(b'"', "base64", |encoded| {
        DecoderReader::new(encoded, &STANDARD)
    });
    snapshot::read(&mut decoded)
}

/// The note on a file that continues after its pickle or JSON value.
const MORE: &str = "the file goes on behind the first snapshot; write each snapshot to a file of its own, or one list of \
     them";

/// Returns the snapshot, with a note if the file continues after it.
fn alone(mut snapshot: Snapshot, input: &mut Input<'_>) -> Result<Snapshot> {
    if input.has_more() {
        snapshot.left_out.push(MORE.to_owned());
    }
    Ok(snapshot)
}

fn position(bytes: &[u8], of: &[u8]) -> Option<usize> {
    bytes.windows(of.len()).position(|window| window == of)
}
