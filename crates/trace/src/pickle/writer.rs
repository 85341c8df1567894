//! Writes pickles of plain data, in the few opcodes that PyTorch's viewer understands.

use std::io::{self, Write};

use hashbrown::HashMap;

use super::machine::STRING_BYTES_MAX;
use super::opcodes::data as op;

/// The number of a memoized object, which writes it again in a few bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memo(u32);

/// A pickle (protocol 2) being written. The caller nests the calls as the data nests.
pub(crate) struct PickleWriter<W> {
    out: W,
    memo_count: u32,
    strings: HashMap<Box<str>, Memo>,
}

impl<W: Write> PickleWriter<W> {
    pub(crate) fn new(mut out: W) -> io::Result<PickleWriter<W>> {
        out.write_all(&[op::PROTO, 2])?;
        Ok(PickleWriter::continued(out))
    }

    /// Continues a pickle that another program wrote, up to its end. The new part must not refer to objects that
    /// were memoized before, because it uses their numbers again.
    pub(crate) fn continued(out: W) -> PickleWriter<W> {
        PickleWriter {
            out,
            memo_count: 0,
            strings: HashMap::new(),
        }
    }

    /// Ends the pickle and returns the output.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.out.write_all(&[op::STOP])?;
        Ok(self.out)
    }

    pub(crate) fn begin_dict(&mut self) -> io::Result<()> {
        self.out.write_all(&[op::EMPTY_DICT])?;
        self.begin_items()
    }

    pub(crate) fn end_dict(&mut self) -> io::Result<()> {
        self.out.write_all(&[op::SETITEMS])
    }

    /// Writes an empty list. The values written between [`begin_items`](Self::begin_items) and
    /// [`end_items`](Self::end_items) are appended to it. This may be repeated.
    pub(crate) fn list(&mut self) -> io::Result<()> {
        self.out.write_all(&[op::EMPTY_LIST])
    }

    pub(crate) fn begin_items(&mut self) -> io::Result<()> {
        self.out.write_all(&[op::MARK])
    }

    pub(crate) fn end_items(&mut self) -> io::Result<()> {
        self.out.write_all(&[op::APPENDS])
    }

    /// Combines the two values written last into a tuple.
    pub(crate) fn pair(&mut self) -> io::Result<()> {
        self.out.write_all(&[op::TUPLE2])
    }

    pub(crate) fn boolean(&mut self, value: bool) -> io::Result<()> {
        self.out
            .write_all(&[if value { op::NEWTRUE } else { op::NEWFALSE }])
    }

    pub(crate) fn float(&mut self, value: f64) -> io::Result<()> {
        self.out.write_all(&[op::BINFLOAT])?;
        self.out.write_all(&value.to_be_bytes())
    }

    pub(crate) fn natural(&mut self, value: u64) -> io::Result<()> {
        match i64::try_from(value) {
            Ok(value) => self.integer(value),
            Err(_) => {
                // A ninth byte, for the sign.
                self.out.write_all(&[op::LONG1, 9])?;
                self.out.write_all(&value.to_le_bytes())?;
                self.out.write_all(&[0])
            }
        }
    }

    pub(crate) fn integer(&mut self, value: i64) -> io::Result<()> {
        if let Ok(value) = u8::try_from(value) {
            self.out.write_all(&[op::BININT1, value])
        } else if let Ok(value) = u16::try_from(value) {
            self.out.write_all(&[op::BININT2])?;
            self.out.write_all(&value.to_le_bytes())
        } else if let Ok(value) = i32::try_from(value) {
            self.out.write_all(&[op::BININT])?;
            self.out.write_all(&value.to_le_bytes())
        } else {
            self.out.write_all(&[op::LONG1, 8])?;
            self.out.write_all(&value.to_le_bytes())
        }
    }

    /// Writes a string. From the second time on, writes a reference to the first.
    pub(crate) fn string(&mut self, text: &str) -> io::Result<()> {
        if let Some(&memo) = self.strings.get(text) {
            return self.again(memo);
        }
        let count = u32::try_from(text.len()).ok();
        let count = count.filter(|&count| u64::from(count) <= STRING_BYTES_MAX);
        let count = count.ok_or_else(|| {
            let bytes = text.len();
            let what = format!("a text has {bytes} bytes, more than those of recordings");
            io::Error::new(io::ErrorKind::InvalidInput, what)
        })?;
        self.out.write_all(&[op::BINUNICODE])?;
        self.out.write_all(&count.to_le_bytes())?;
        self.out.write_all(text.as_bytes())?;
        let memo = self.memoize()?;
        self.strings.insert(text.into(), memo);
        Ok(())
    }

    /// Memoizes the value written last. A list or dict must be complete.
    pub(crate) fn memoize(&mut self) -> io::Result<Memo> {
        let memo = Memo(self.memo_count);
        self.memo_count += 1;
        self.memo([op::BINPUT, op::LONG_BINPUT], memo)?;
        Ok(memo)
    }

    /// Writes a memoized value again.
    pub(crate) fn again(&mut self, memo: Memo) -> io::Result<()> {
        self.memo([op::BINGET, op::LONG_BINGET], memo)
    }

    /// Writes the opcode for a small number or that for any number, and the number.
    fn memo(&mut self, [small, long]: [u8; 2], Memo(memo): Memo) -> io::Result<()> {
        match u8::try_from(memo) {
            Ok(memo) => self.out.write_all(&[small, memo]),
            Err(_) => {
                self.out.write_all(&[long])?;
                self.out.write_all(&memo.to_le_bytes())
            }
        }
    }
}
