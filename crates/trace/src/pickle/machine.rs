//! The stack machine.

use std::borrow::Cow;

use hashbrown::HashMap;

use super::heap::{Dict, Heap, Reference, Value};
use super::opcodes::{code_name, data as op, foreign_name};
use super::strings::Strings;
use super::{callables, calls};
use crate::budget::{Budget, Density};
use crate::error::{ErrorKind, Result, TraceError};
use crate::source::Input;

/// The most containers under construction at once. A snapshot needs eight.
const NESTING_MAX: usize = 1000;

/// The longest string. Names of C++ functions have some kilobytes.
pub(super) const STRING_BYTES_MAX: u64 = 16 << 20;

/// The most characters of a wrong text in a message.
const SHOWN_LETTERS: usize = 40;

/// A container of at least this many values is checked against the memory limit before it is built.
const MANY_VALUES: usize = 4096;

/// Sees every dict when it is complete, and may replace it by a record.
pub(crate) trait Recogniser {
    /// Replaces a recognised dict.
    type Record: Copy;

    /// Returns the record for a dict of `items`, keys and values in turn; `None` to keep the dict.
    ///
    /// # Errors
    ///
    /// If the dict is of a known kind but has wrong contents.
    fn recognise(
        &mut self,
        heap: &mut Heap<Self::Record>,
        items: &[Value],
    ) -> Result<Option<Self::Record>>;

    /// Returns about how many bytes of memory the records take.
    fn retained_bytes(&self) -> u64;
}

/// Executes one pickle.
pub(crate) struct Machine<'m, 'r, R: Recogniser> {
    input: &'m mut Input<'r>,
    recogniser: &'m mut R,
    heap: Heap<R::Record>,
    stack: Vec<Value>,
    /// The heights of the stack at which containers began, ascending.
    marks: Vec<usize>,
    /// The objects memoized under 0, 1, 2, …
    memo: Vec<Reference>,
    /// The objects memoized under other numbers: some writers leave gaps.
    sparse_memo: HashMap<u32, Reference>,
    /// The offset of the next check of the memory taken. Between two checks it can grow only by the effects of
    /// [`CHECK_EVERY_BYTES`] of opcodes.
    check_at: u64,
}

const CHECK_EVERY_BYTES: u64 = 64 << 10;

impl<'m, 'r, R: Recogniser> Machine<'m, 'r, R> {
    /// Returns the value of the pickle in `input`, and the heap with the objects that it refers to.
    ///
    /// `strings` holds the strings whose numbers the recogniser relies on.
    pub(crate) fn run(
        input: &'m mut Input<'r>,
        recogniser: &'m mut R,
        strings: Strings,
    ) -> Result<(Value, Heap<R::Record>)> {
        let mut machine = Machine {
            input,
            recogniser,
            heap: Heap::new(strings),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Vec::new(),
            sparse_memo: HashMap::new(),
            check_at: 0,
        };
        loop {
            let offset = machine.input.offset();
            if offset >= machine.check_at {
                machine.check_at = offset + CHECK_EVERY_BYTES;
                machine
                    .check_memory(0)
                    .map_err(|error| error.at_byte(offset))?;
            }
            let (opcode, operand) = machine.input.head()?;
            if opcode == op::STOP {
                machine.input.advance(1)?;
                let value = machine.pop().map_err(|error| error.at_byte(offset))?;
                return Ok((value, machine.heap));
            }
            machine
                .step(opcode, operand)
                .map_err(|error| error.at_byte(offset))?;
        }
    }

    /// Executes the opcodes that recordings mainly consist of. `operand` is the eight bytes after the opcode,
    /// lowest first. If the operand is shorter, the higher bytes are not part of it.
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "takes the lower bytes of the operand"
    )]
    fn step(&mut self, opcode: u8, operand: u64) -> Result<()> {
        match opcode {
            op::BINGET => {
                self.input.advance(2)?;
                self.get(u32::from(operand as u8))
            }
            op::LONG_BINGET => {
                self.input.advance(5)?;
                self.get(operand as u32)
            }
            op::MEMOIZE => {
                self.input.advance(1)?;
                self.memoize()
            }
            op::LONG1 if matches!(operand as u8, 1..=7) => {
                let count = operand as u8;
                self.input.advance(2 + usize::from(count))?;
                let unused_bits = 64 - 8 * u32::from(count);
                let value = (operand >> 8).cast_signed() << unused_bits >> unused_bits;
                self.push(Value::Int(value))
            }
            op::BININT1 => {
                self.input.advance(2)?;
                self.push(Value::Int(i64::from(operand as u8)))
            }
            op::BININT2 => {
                self.input.advance(3)?;
                self.push(Value::Int(i64::from(operand as u16)))
            }
            op::BININT => {
                self.input.advance(5)?;
                self.push(Value::Int(i64::from(operand as i32)))
            }
            op::SHORT_BINUNICODE => {
                self.input.advance(2)?;
                let text = utf8(self.input.bytes(usize::from(operand as u8))?)?;
                let id = self.heap.strings.intern(&text);
                self.push(Value::String(id))
            }
            op::EMPTY_DICT => {
                self.input.advance(1)?;
                let dict = self.heap.new_dict();
                self.push(dict)
            }
            op::MARK => {
                self.input.advance(1)?;
                self.mark()
            }
            op::SETITEMS => {
                self.input.advance(1)?;
                let height = self.unmark()?;
                self.set_items(height)
            }
            _ => {
                self.input.advance(1)?;
                self.step_rare(opcode)
            }
        }
    }

    /// Executes the opcodes that occur at most once per container.
    fn step_rare(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            op::PROTO => self.protocol(),
            op::FRAME => self.input.array::<8>().map(|_length| ()),
            op::BINPUT => {
                let index = self.input.byte()?;
                self.put(u32::from(index))
            }
            op::LONG_BINPUT => {
                let index = u32::from_le_bytes(self.input.array()?);
                self.put(index)
            }
            op::EMPTY_LIST => {
                let list = self.heap.new_list();
                self.push(list)
            }
            op::EMPTY_TUPLE => self.tuple(self.stack.len()),
            op::TUPLE1 => self.tuple_of(1),
            op::TUPLE2 => self.tuple_of(2),
            op::TUPLE3 => self.tuple_of(3),
            op::TUPLE => {
                let height = self.unmark()?;
                self.tuple(height)
            }
            op::APPEND => self.append(self.height_below(1)?),
            op::APPENDS => {
                let height = self.unmark()?;
                self.append(height)
            }
            op::SETITEM => self.set_items(self.height_below(2)?),
            op::LIST => {
                let height = self.unmark()?;
                let list = self.heap.new_list();
                self.stack.insert(height, list);
                self.append(height + 1)
            }
            op::DICT => {
                let height = self.unmark()?;
                let dict = self.heap.new_dict();
                self.stack.insert(height, dict);
                self.set_items(height + 1)
            }
            op::POP => self.pop().map(|_value| ()),
            op::POP_MARK => {
                let height = self.unmark()?;
                self.drop_above(height);
                Ok(())
            }
            op::DUP => {
                let value = *self.stack.last().ok_or_else(stack_is_empty)?;
                self.push(value)
            }
            op::REDUCE | op::NEWOBJ => {
                let height = self.height_below(2)?;
                let (callable, arguments) = (self.stack[height], self.stack[height + 1]);
                self.stack.truncate(height);
                let value = calls::result(&mut self.heap, callable, arguments)?;
                self.push(value)
            }
            op::BUILD => self.build(),
            _ => {
                let value = self.scalar(opcode)?;
                self.push(value)
            }
        }
    }

    /// Reads the plain values that are rare in a file, and the text forms of protocol 0.
    fn scalar(&mut self, opcode: u8) -> Result<Value> {
        Ok(match opcode {
            op::NONE => Value::None,
            op::NEWTRUE => Value::Bool(true),
            op::NEWFALSE => Value::Bool(false),
            op::BINFLOAT => Value::Float(f64::from_be_bytes(self.input.array()?)),
            op::LONG1 => {
                let count = self.input.byte()?;
                integer(self.input.bytes(usize::from(count))?)
            }
            op::LONG4 => {
                let count = u32::from_le_bytes(self.input.array()?);
                match count {
                    0..=9 => integer(self.input.bytes(count as usize)?),
                    _ => self.skip(u64::from(count))?,
                }
            }
            op::BINUNICODE | op::BINSTRING => {
                let count = u32::from_le_bytes(self.input.array()?);
                self.string(u64::from(count))?
            }
            op::BINUNICODE8 => {
                let count = u64::from_le_bytes(self.input.array()?);
                self.string(count)?
            }
            op::SHORT_BINSTRING => {
                let count = self.input.byte()?;
                self.string(u64::from(count))?
            }
            op::SHORT_BINBYTES => {
                let count = self.input.byte()?;
                let letters = self.input.bytes(usize::from(count))?.iter().copied();
                let text: String = letters.map(char::from).collect();
                Value::Bytes(self.heap.strings.intern(&text))
            }
            op::BINBYTES => {
                let count = u32::from_le_bytes(self.input.array()?);
                self.skip(u64::from(count))?
            }
            op::BINBYTES8 => {
                let count = u64::from_le_bytes(self.input.array()?);
                self.skip(count)?
            }
            op::GLOBAL => {
                let (module, name) = (self.input.line()?, self.input.line()?);
                Value::Callable(callables::find(&utf8(&module)?, &utf8(&name)?)?)
            }
            op::STACK_GLOBAL => {
                let (name, module) = (self.pop()?, self.pop()?);
                let names = self.heap.text(module).zip(self.heap.text(name));
                let no_text = || TraceError::malformed("a name in Python is not a text");
                let (module, name) = names.ok_or_else(no_text)?;
                Value::Callable(callables::find(module, name)?)
            }
            op::INT | op::LONG | op::FLOAT | op::STRING | op::UNICODE => self.text(opcode)?,
            op::GET | op::PUT => return self.text_memo(opcode),
            _ => return Err(refuse(opcode)),
        })
    }

    fn protocol(&mut self) -> Result<()> {
        match self.input.byte()? {
            0..=5 => Ok(()),
            version => Err(TraceError::malformed(format!(
                "pickle protocol {version} is not known; up to 5 is"
            ))),
        }
    }

    #[inline]
    fn push(&mut self, value: Value) -> Result<()> {
        self.stack.push(value);
        Ok(())
    }

    #[inline]
    fn pop(&mut self) -> Result<Value> {
        let height = self.height_below(1)?;
        let value = self.stack[height];
        self.stack.truncate(height);
        Ok(value)
    }

    /// Returns the index of the first of the topmost `count` values. They must be above the last mark.
    fn height_below(&self, count: usize) -> Result<usize> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len().checked_sub(count) {
            Some(height) if height >= floor => Ok(height),
            _ => Err(stack_is_empty()),
        }
    }

    #[inline]
    fn mark(&mut self) -> Result<()> {
        if self.marks.len() == NESTING_MAX {
            let what = format!("containers are nested deeper than {NESTING_MAX}");
            return Err(TraceError::new(ErrorKind::Limit, what));
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    #[inline]
    fn unmark(&mut self) -> Result<usize> {
        self.marks
            .pop()
            .ok_or_else(|| TraceError::malformed("a container ends that never began"))
    }

    #[inline]
    fn get(&mut self, index: u32) -> Result<()> {
        match self.memo.get(index as usize) {
            Some(&reference) => self.push(self.heap.value(reference)),
            None => self.get_sparse(index),
        }
    }

    #[cold]
    fn get_sparse(&mut self, index: u32) -> Result<()> {
        match self.sparse_memo.get(&index) {
            Some(&reference) => self.push(self.heap.value(reference)),
            None => Err(TraceError::malformed(format!(
                "refers to object {index}, which is not there"
            ))),
        }
    }

    #[inline]
    fn memoize(&mut self) -> Result<()> {
        let value = *self.stack.last().ok_or_else(stack_is_empty)?;
        let reference = self.heap.reference(value);
        self.memo.push(reference);
        Ok(())
    }

    fn put(&mut self, index: u32) -> Result<()> {
        if index as usize == self.memo.len() {
            return self.memoize();
        }
        let value = *self.stack.last().ok_or_else(stack_is_empty)?;
        let reference = self.heap.reference(value);
        match self.memo.get_mut(index as usize) {
            Some(place) => *place = reference,
            None => self.put_sparse(index, reference)?,
        }
        Ok(())
    }

    #[cold]
    fn put_sparse(&mut self, index: u32, reference: Reference) -> Result<()> {
        if self.sparse_memo.len() == self.sparse_memo.capacity() {
            // The table doubles its size, and both tables exist meanwhile.
            self.check_memory(2 * self.sparse_memo.allocation_size() as u64)?;
        }
        self.sparse_memo.insert(index, reference);
        Ok(())
    }

    /// Appends the values from `height` up to the list below them.
    fn append(&mut self, height: usize) -> Result<()> {
        self.make_room(height)?;
        let items = self.stack.get(height..).ok_or_else(stack_is_empty)?;
        let floor = self.marks.last().copied().unwrap_or(0);
        let below = height.checked_sub(1).filter(|&below| below >= floor);
        let Some(Value::List(list)) = below.map(|below| self.stack[below]) else {
            let what = "appends to something that is no list";
            return Err(TraceError::malformed(what));
        };
        if !self.heap.extend_list(list, items) {
            return Err(TraceError::malformed("a stack grows after it was used"));
        }
        self.drop_above(height);
        Ok(())
    }

    /// Returns an error if the memory limit does not allow a container of the values from `height` up.
    #[inline]
    fn make_room(&mut self, height: usize) -> Result<()> {
        match self.stack.len().saturating_sub(height) {
            many @ MANY_VALUES.. => self.check_memory((many * size_of::<Value>()) as u64),
            _ => Ok(()),
        }
    }

    /// Drops the values from `height` up, and releases their memory if they were many.
    #[inline]
    fn drop_above(&mut self, height: usize) {
        let is_many = self.stack.len() >= height + MANY_VALUES;
        self.stack.truncate(height);
        if is_many {
            self.shrink_stack();
        }
    }

    /// Adds the keys and values from `height` up to the dict below them.
    #[inline]
    fn set_items(&mut self, height: usize) -> Result<()> {
        self.make_room(height)?;
        let items = self.stack.get(height..).ok_or_else(stack_is_empty)?;
        let below = height.checked_sub(1).map(|below| self.stack[below]);
        let Some(Value::Dict(dict)) = below else {
            let what = "sets an item of something that is no dict";
            return Err(TraceError::malformed(what));
        };
        if !items.len().is_multiple_of(2) {
            return Err(TraceError::malformed("a dict has a key without a value"));
        }
        if !set_items(&mut self.heap, self.recogniser, dict, items)? {
            let what = "a record changes after it was complete";
            return Err(TraceError::malformed(what));
        }
        self.drop_above(height);
        Ok(())
    }

    #[cold]
    fn shrink_stack(&mut self) {
        let height = self.stack.len();
        if self.stack.capacity() > 4 * height.max(MANY_VALUES) {
            self.stack.shrink_to(2 * height);
        }
    }

    fn tuple_of(&mut self, count: usize) -> Result<()> {
        self.tuple(self.height_below(count)?)
    }

    fn tuple(&mut self, height: usize) -> Result<()> {
        self.make_room(height)?;
        let items = self.stack.get(height..).ok_or_else(stack_is_empty)?;
        let tuple = self.heap.new_tuple(items);
        self.drop_above(height);
        self.push(tuple)
    }

    /// Reads the state of a numpy type. The state of any other object is refused.
    fn build(&mut self) -> Result<()> {
        let state = self.pop()?;
        match self.stack[self.height_below(1)?] {
            Value::NumberType(_) => calls::check_number_type(&self.heap, state),
            _ => Err(refuse(op::BUILD)),
        }
    }

    fn string(&mut self, count: u64) -> Result<Value> {
        let bytes = self.input.long_bytes(count, STRING_BYTES_MAX)?;
        Ok(Value::String(self.heap.strings.intern(&utf8(&bytes)?)))
    }

    fn skip(&mut self, count: u64) -> Result<Value> {
        self.input.skip(count)?;
        Ok(Value::Opaque)
    }

    fn text(&mut self, opcode: u8) -> Result<Value> {
        let line = self.input.line()?;
        let line = &*utf8(&line)?;
        let not_a_number = || {
            let shown: String = line.chars().take(SHOWN_LETTERS).collect();
            TraceError::malformed(format!("`{shown}` is not a number"))
        };
        Ok(match opcode {
            op::INT if line == "00" => Value::Bool(false),
            op::INT if line == "01" => Value::Bool(true),
            op::INT | op::LONG => {
                let digits = line.trim_end_matches('L');
                match (digits.parse(), digits.parse()) {
                    (Ok(value), _) => Value::Int(value),
                    (_, Ok(value)) => Value::Natural(value),
                    _ => return Err(not_a_number()),
                }
            }
            op::FLOAT => Value::Float(line.parse().map_err(|_| not_a_number())?),
            op::STRING => {
                let text = line.trim_matches(['\'', '"']);
                Value::String(self.heap.strings.intern(text))
            }
            _ => Value::String(self.heap.strings.intern(line)),
        })
    }

    fn text_memo(&mut self, opcode: u8) -> Result<Value> {
        let line = self.input.line()?;
        let index = utf8(&line)?
            .parse()
            .map_err(|_| TraceError::malformed("an object's number is not a number"))?;
        match opcode {
            op::GET => self.get(index)?,
            _ => self.put(index)?,
        }
        self.pop()
    }

    /// Returns an error if `coming_bytes` more would exceed the memory limit.
    #[cold]
    fn check_memory(&self, coming_bytes: u64) -> Result<()> {
        let references =
            self.memo.len() * size_of::<Reference>() + self.sparse_memo.allocation_size();
        let mut budget = Budget::new(self.input.retained_bytes_max(Density::Pickle));
        budget.take(self.stack.len(), size_of::<Value>() as u64)?;
        budget.take(references, 1)?;
        budget.take(1, self.heap.retained_bytes())?;
        budget.take(1, self.recogniser.retained_bytes())?;
        budget.check(coming_bytes)
    }
}

/// Returns the little-endian two's complement integer in `bytes`.
fn integer(bytes: &[u8]) -> Value {
    match bytes.len() {
        0 => Value::Int(0),
        count @ 1..=8 => {
            let mut padded = if bytes[count - 1] < 0x80 {
                [0; 8]
            } else {
                [0xff; 8]
            };
            padded[..count].copy_from_slice(bytes);
            Value::Int(i64::from_le_bytes(padded))
        }
        9 if bytes[8] == 0 => {
            let mut natural = [0; 8];
            natural.copy_from_slice(&bytes[..8]);
            Value::Natural(u64::from_le_bytes(natural))
        }
        _ => Value::Opaque,
    }
}

/// Adds `items`, keys and values in turn, to a dict, or replaces the dict by the record of its first items. Returns
/// `false` if it is a record already.
///
/// # Errors
///
/// Like [`Recogniser::recognise`].
#[inline]
pub(crate) fn set_items<R: Recogniser>(
    heap: &mut Heap<R::Record>,
    recogniser: &mut R,
    dict: u32,
    items: &[Value],
) -> Result<bool> {
    if let Dict::Empty = heap.dict(dict)
        && let Some(record) = recogniser.recognise(heap, items)?
    {
        heap.set_record(dict, record);
        return Ok(true);
    }
    Ok(heap.extend_dict(dict, items))
}

#[inline]
fn utf8(bytes: &[u8]) -> Result<Cow<'_, str>> {
    match str::from_utf8(bytes) {
        Ok(text) => Ok(text.into()),
        Err(_) => without_surrogates(bytes.to_vec()).map(Cow::Owned),
    }
}

/// Returns a text with U+FFFD for each surrogate. Python has surrogates in file names that are not UTF-8, and
/// pickles them like letters.
#[cold]
fn without_surrogates(mut bytes: Vec<u8>) -> Result<String> {
    for start in 0..bytes.len() {
        if let Some([0xed, 0xa0..=0xbf, 0x80..=0xbf]) = bytes.get(start..start + 3) {
            bytes[start..start + 3].copy_from_slice("\u{fffd}".as_bytes());
        }
    }
    String::from_utf8(bytes).map_err(|_| TraceError::malformed("a string is not UTF-8"))
}

#[cold]
fn stack_is_empty() -> TraceError {
    TraceError::malformed("the pickle takes a value that is not there")
}

#[cold]
fn refuse(opcode: u8) -> TraceError {
    if let Some(name) = code_name(opcode) {
        let what =
            format!("this pickle wants to run code (opcode {name}); lowtide reads data only");
        return TraceError::new(ErrorKind::Code, what);
    }
    TraceError::malformed(match foreign_name(opcode) {
        Some(name) => format!("opcode {name} is for data that no recording holds"),
        None => format!("{opcode:#04x} is not an opcode of a pickle"),
    })
}
