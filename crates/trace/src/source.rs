//! The bytes of a file: detects the compression, decompresses buffer by buffer, and counts bytes.
//!
//! Only one buffer of the decompressed data is in memory. [`Input`] stops a file that expands beyond
//! [`expanded_bytes_max`].

use std::cell::Cell;
use std::io::{self, BufReader, Read};
use std::rc::Rc;

use lzma_rust2::XzReader;

use crate::budget::{Density, too_long};
use crate::error::{ErrorKind, Result, TraceError};

/// The size of the buffer. Larger than any number or key in a recording, and small enough to stay in the
/// second-level cache together with the tables that are filled from it.
const BUFFER_BYTES: usize = 128 << 10;

/// The most memory of an xz decoder, in KiB: the dictionary, and what a decoder takes beside it. The dictionary is as
/// large as the window of zstd's `--ultra` levels, and twice that of `xz -9`.
const XZ_MEMORY_KIB: u32 = (128 << 10) + 1024;

/// How a file is compressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Compression {
    Zstd,
    Gzip,
    Xz,
    Bzip2,
}

impl Compression {
    /// The longest signature below, in bytes.
    const MAGIC_BYTES_MAX: usize = 6;

    /// Returns the compression of a file that starts with `bytes`; `None` if it has none of these.
    pub(crate) fn of(bytes: &[u8]) -> Option<Compression> {
        match bytes {
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Compression::Zstd),
            [0x1f, 0x8b, ..] => Some(Compression::Gzip),
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Some(Compression::Xz),
            [b'B', b'Z', b'h', b'1'..=b'9', ..] => Some(Compression::Bzip2),
            _ => None,
        }
    }

    /// Returns the name in messages, which is also that of the command that decompresses it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Compression::Zstd => "zstd",
            Compression::Gzip => "gzip",
            Compression::Xz => "xz",
            Compression::Bzip2 => "bzip2",
        }
    }
}

/// Returns the number of bytes to which a file may expand after `file_bytes` of it were read.
///
/// Recordings compress by a factor of 10 to 40. A factor of 1000 is a mistake or an attack.
fn expanded_bytes_max(file_bytes: u64) -> u64 {
    (64 << 20) + file_bytes.saturating_mul(1024)
}

/// The decompressed bytes of a file, one buffer at a time.
pub(crate) struct Input<'r> {
    reader: Box<dyn Read + 'r>,
    /// The encoding, for messages; empty if the file is not encoded.
    encoding: &'static str,
    /// Bytes read from the file itself, before decompression.
    file_bytes: Rc<Cell<u64>>,
    buffer: Box<[u8]>,
    /// The bytes not taken yet are `buffer[start..end]`.
    start: usize,
    end: usize,
    /// The offset of `buffer[0]` in the decompressed file.
    buffer_offset: u64,
}

impl<'r> Input<'r> {
    /// Returns the decompressed contents of `reader`. Its first bytes decide how it is compressed.
    pub(crate) fn open(mut reader: impl Read + 'r) -> Result<Input<'r>> {
        let mut magic = Vec::with_capacity(Compression::MAGIC_BYTES_MAX);
        let magic_bytes = Compression::MAGIC_BYTES_MAX as u64;
        reader.by_ref().take(magic_bytes).read_to_end(&mut magic)?;
        let compression = Compression::of(&magic);
        let file_bytes = Rc::new(Cell::new(0));
        let file = Counted {
            reader: io::Cursor::new(magic).chain(reader),
            bytes: Rc::clone(&file_bytes),
        };
        let Some(compression) = compression else {
            return Ok(Input::new(Box::new(file), "", file_bytes));
        };
        let file = BufReader::with_capacity(BUFFER_BYTES, file);
        let reader: Box<dyn Read + 'r> = match compression {
            Compression::Zstd => zstd_reader(file)?,
            Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
            Compression::Xz => Box::new(XzReader::new_mem_limit(file, true, XZ_MEMORY_KIB)),
            Compression::Bzip2 => Box::new(bzip2::bufread::MultiBzDecoder::new(file)),
        };
        Ok(Input::new(reader, compression.name(), file_bytes))
    }

    fn new(
        reader: Box<dyn Read + 'r>,
        encoding: &'static str,
        file_bytes: Rc<Cell<u64>>,
    ) -> Input<'r> {
        Input {
            reader,
            encoding,
            file_bytes,
            buffer: vec![0; BUFFER_BYTES].into(),
            start: 0,
            end: 0,
            buffer_offset: 0,
        }
    }

    /// Returns the decoded bytes before the next `end`. The file has them in `encoding`, which `decode` decodes.
    /// The new input shares this one's limit of memory.
    pub(crate) fn decoded_before<'i, D: Read + 'i>(
        &'i mut self,
        end: u8,
        encoding: &'static str,
        decode: impl FnOnce(Before<'i, 'r>) -> D,
    ) -> Input<'i> {
        let file_bytes = Rc::clone(&self.file_bytes);
        let encoded = Before { input: self, end };
        Input::new(Box::new(decode(encoded)), encoding, file_bytes)
    }

    /// Takes some of the next bytes into `buffer` and returns their number, which is 0 at the end of the file.
    pub(crate) fn take_some(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let ready = self.peek(1)?;
        let count = ready.len().min(buffer.len());
        buffer[..count].copy_from_slice(&ready[..count]);
        self.start += count;
        Ok(count)
    }

    /// Returns whether anything but white space follows. Damaged data does not count.
    pub(crate) fn has_more(&mut self) -> bool {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = self.take_some(&mut buffer) {
            if !buffer[..count].trim_ascii().is_empty() {
                return true;
            }
        }
        false
    }

    /// Returns the offset of the next byte in the decompressed file.
    pub(crate) fn offset(&self) -> u64 {
        self.buffer_offset + self.start as u64
    }

    /// Returns how much memory may be taken for the bytes read so far.
    pub(crate) fn retained_bytes_max(&self, density: Density) -> u64 {
        density.bytes_max(self.offset(), self.file_bytes.get())
    }

    /// Returns the bytes in the buffer: at least `count`, unless the file ends before.
    pub(crate) fn peek(&mut self, count: usize) -> Result<&[u8]> {
        while self.end - self.start < count && self.refill()? > 0 {}
        Ok(&self.buffer[self.start..self.end])
    }

    /// Returns the next byte, and the eight bytes after it as a little-endian number, without taking them. Beyond
    /// the end of the file the bytes are zeros.
    #[inline]
    pub(crate) fn head(&mut self) -> Result<(u8, u64)> {
        match self.buffer[self.start..self.end].first_chunk::<9>() {
            Some(&[first, ref next @ ..]) => Ok((first, u64::from_le_bytes(*next))),
            None => self.head_at_end(),
        }
    }

    #[cold]
    fn head_at_end(&mut self) -> Result<(u8, u64)> {
        let rest = self.peek(9)?;
        let count = rest.len().min(9);
        let mut head = [0; 9];
        head[..count].copy_from_slice(&rest[..count]);
        let [first, next @ ..] = head;
        Ok((first, u64::from_le_bytes(next)))
    }

    /// Takes `count` of the bytes that [`Input::head`] returned.
    #[inline]
    pub(crate) fn advance(&mut self, count: usize) -> Result<()> {
        if self.end - self.start < count {
            return Err(self.truncated());
        }
        self.start += count;
        Ok(())
    }

    /// Takes one byte.
    #[inline]
    pub(crate) fn byte(&mut self) -> Result<u8> {
        Ok(self.bytes(1)?[0])
    }

    /// Takes `N` bytes.
    #[inline]
    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    /// Takes `count` bytes. They must fit the buffer, so this is for counts of at most a few hundred.
    #[inline]
    pub(crate) fn bytes(&mut self, count: usize) -> Result<&[u8]> {
        assert!(count <= BUFFER_BYTES, "takes more than the buffer holds");
        if self.end - self.start < count {
            self.require(count)?;
        }
        let taken = self.start..self.start + count;
        self.start = taken.end;
        Ok(&self.buffer[taken])
    }

    /// Takes `count` bytes, at most `max`. Memory grows with the bytes that exist, not with the claimed length.
    pub(crate) fn long_bytes(&mut self, count: u64, max: u64) -> Result<Vec<u8>> {
        if count > max {
            return Err(self.fail(too_long(count, max)));
        }
        let mut taken = Vec::new();
        self.each_part(count, |part| taken.extend_from_slice(part))?;
        Ok(taken)
    }

    /// Skips `count` bytes.
    pub(crate) fn skip(&mut self, count: u64) -> Result<()> {
        self.each_part(count, |_| {})
    }

    /// Takes `count` bytes, buffer by buffer.
    fn each_part(&mut self, mut count: u64, mut take: impl FnMut(&[u8])) -> Result<()> {
        while count > 0 {
            let ready = self.peek(1)?;
            if ready.is_empty() {
                return Err(self.truncated());
            }
            let part = usize::try_from(count).map_or(ready.len(), |count| count.min(ready.len()));
            take(&ready[..part]);
            self.start += part;
            count -= part as u64;
        }
        Ok(())
    }

    /// Takes the bytes before the next line feed, and the line feed.
    pub(crate) fn line(&mut self) -> Result<Vec<u8>> {
        let mut line = Vec::new();
        loop {
            match self.byte()? {
                b'\n' => return Ok(line),
                _ if line.len() == BUFFER_BYTES => {
                    return Err(self.fail(TraceError::malformed("a line of text has no end")));
                }
                byte => line.push(byte),
            }
        }
    }

    /// Adds the position of the next byte to `error`.
    pub(crate) fn fail(&self, error: TraceError) -> TraceError {
        error.at_byte(self.offset())
    }

    /// Returns the error of a truncated file.
    pub(crate) fn truncated(&self) -> TraceError {
        let what = "the file ends in the middle: was it copied whole?";
        TraceError::new(ErrorKind::Truncated, what).at_byte(self.buffer_offset + self.end as u64)
    }

    #[cold]
    fn require(&mut self, count: usize) -> Result<()> {
        while self.end - self.start < count {
            if self.refill()? == 0 {
                return Err(self.truncated());
            }
        }
        Ok(())
    }

    /// Reads more bytes behind those not taken yet. Returns their number.
    fn refill(&mut self) -> Result<usize> {
        self.buffer.copy_within(self.start..self.end, 0);
        self.buffer_offset += self.start as u64;
        self.end -= self.start;
        self.start = 0;
        let count = loop {
            match self.reader.read(&mut self.buffer[self.end..]) {
                Ok(count) => break count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.read_failed(error)),
            }
        };
        self.end += count;
        let expanded = self.buffer_offset + self.end as u64;
        if expanded > expanded_bytes_max(self.file_bytes.get()) {
            let what = "the compressed file expands more than a thousandfold; no recording does";
            return Err(self.fail(TraceError::new(ErrorKind::Limit, what)));
        }
        Ok(count)
    }

    fn read_failed(&self, error: io::Error) -> TraceError {
        // The reader may decode another input, whose error is returned as it is.
        let error = match error.downcast::<TraceError>() {
            Ok(error) => return error,
            Err(error) => error,
        };
        match (self.encoding, error.kind()) {
            (_, io::ErrorKind::UnexpectedEof) => self.truncated(),
            ("", _) => self.fail(error.into()),
            (name, io::ErrorKind::OutOfMemory) => {
                let what = format!(
                    "the {name} data needs more than 128 MiB of memory; decompress it with {name} -d"
                );
                self.fail(TraceError::new(ErrorKind::Limit, what))
            }
            // A decoder reports damage as an i/o error without an error number of the operating system.
            (name, _) if error.raw_os_error().is_none() => {
                let what = format!("the {name} data is damaged: {error}");
                self.fail(TraceError::malformed(what))
            }
            _ => self.fail(error.into()),
        }
    }
}

/// The bytes of an input before the next `end`.
pub(crate) struct Before<'i, 'r> {
    input: &'i mut Input<'r>,
    end: u8,
}

impl Read for Before<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let ready = self.input.peek(1).map_err(io::Error::other)?;
        if ready.is_empty() && !buffer.is_empty() {
            return Err(io::Error::other(self.input.truncated()));
        }
        let before = ready.iter().position(|&byte| byte == self.end);
        let count = before.unwrap_or(ready.len()).min(buffer.len());
        self.input
            .take_some(&mut buffer[..count])
            .map_err(io::Error::other)
    }
}

#[cfg(feature = "zstd")]
fn zstd_reader<'r>(file: impl io::BufRead + 'r) -> Result<Box<dyn Read + 'r>> {
    let mut decoder = zstd::stream::read::Decoder::with_buffer(file)?;
    // 128 MiB: the largest window of zstd's default and `--ultra` levels.
    decoder.window_log_max(27)?;
    Ok(Box::new(decoder))
}

#[cfg(not(feature = "zstd"))]
fn zstd_reader<'r>(_file: impl Read + 'r) -> Result<Box<dyn Read + 'r>> {
    let what = "the file is compressed with zstd, which this build leaves out; run `zstd -d` on it";
    Err(TraceError::foreign(what))
}

/// A reader that counts the bytes read through it.
struct Counted<R> {
    reader: R,
    bytes: Rc<Cell<u64>>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.reader.read(buffer)?;
        self.bytes.set(self.bytes.get() + count as u64);
        Ok(count)
    }
}
