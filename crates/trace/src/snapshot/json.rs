//! Reads a snapshot in JSON into the same values as from a pickle.

use std::cell::Cell;
use std::fmt;
use std::io::{self, Read};

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use super::records::{Record, Records, known_strings};
use crate::budget::{Budget, Density};
use crate::error::{Result, TraceError};
use crate::pickle::{Heap, Recogniser as _, Value, set_items};
use crate::source::Input;

/// The longest text or number. A snapshot's texts are names and settings.
const TOKEN_BYTES_MAX: u64 = 16 << 20;

/// The error for a page or a JSON file by torch.profiler.
pub(crate) const PROFILE: &str = "torch.profiler wrote it, which records sums and no allocations; record with \
     torch.cuda.memory._record_memory_history() and write with torch.cuda.memory._dump_snapshot()";

/// The error for a list of lists.
const LISTS: &str = "a list of lists, as torch.profiler writes its timelines, which have no allocations; record \
     with torch.cuda.memory._record_memory_history(), and of what ranks gathered write a list or a dict of snapshots";

/// The number of bytes between two checks of the memory taken.
const CHECK_EVERY_BYTES: u64 = 64 << 10;

/// The number of keys and values that are added to a dict at once.
const ITEMS_AT_ONCE: usize = 4096;

/// Returns the first value in the JSON of `input`, and the heap with the objects that it refers to.
pub(super) fn read(input: &mut Input<'_>, records: &mut Records) -> Result<(Value, Heap<Record>)> {
    let progress = Progress::default();
    let mut builder = Builder {
        heap: Heap::new(known_strings()),
        records,
        progress: &progress,
        check_at: 0,
        error: None,
    };
    let bytes = JsonBytes {
        input,
        progress: &progress,
    };
    let mut json = serde_json::Deserializer::from_reader(bytes);
    let item = Item {
        builder: &mut builder,
        place: Place::Root,
    };
    let root = item.deserialize(&mut json);
    match (root, builder.error) {
        (Ok(root), None) => Ok((root, builder.heap)),
        (_, Some(error)) => Err(error),
        (Err(error), None) => Err(json_error(error)),
    }
}

fn json_error(error: serde_json::Error) -> TraceError {
    if error.is_io() {
        let error = io::Error::from(error);
        return error
            .downcast::<TraceError>()
            .unwrap_or_else(TraceError::from);
    }
    TraceError::malformed(format!("no JSON of a snapshot: {error}"))
}

/// How many bytes have been read, and how much memory they justify.
#[derive(Default)]
struct Progress {
    read_bytes: Cell<u64>,
    /// The position of the last text, number, list or dict.
    seen_at: Cell<u64>,
    memory_max: Cell<u64>,
}

/// The bytes of an input, for the parser.
struct JsonBytes<'j, 'i, 'r> {
    input: &'i mut Input<'r>,
    progress: &'j Progress,
}

impl Read for JsonBytes<'_, '_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let progress = self.progress;
        if progress.read_bytes.get() - progress.seen_at.get() > TOKEN_BYTES_MAX {
            let error = TraceError::malformed("a text has no end");
            return Err(io::Error::other(self.input.fail(error)));
        }
        let count = self.input.take_some(buffer).map_err(io::Error::other)?;
        if count == 0 && !buffer.is_empty() {
            return Err(io::Error::other(self.input.truncated()));
        }
        let read_bytes = progress.read_bytes.get() + count as u64;
        progress.read_bytes.set(read_bytes);
        let memory_max = self.input.retained_bytes_max(Density::Pickle);
        progress.memory_max.set(memory_max);
        Ok(count)
    }
}

/// Builds the values.
struct Builder<'b> {
    heap: Heap<Record>,
    records: &'b mut Records,
    progress: &'b Progress,
    check_at: u64,
    /// An error that the parser does not know.
    error: Option<TraceError>,
}

impl Builder<'_> {
    /// Records that a value was read. Returns an error if all values together take too much memory.
    fn see<E: serde::de::Error>(&mut self) -> Result<(), E> {
        self.check_memory().map_err(|error| self.fail(error))
    }

    fn check_memory(&mut self) -> Result<()> {
        let offset = self.progress.read_bytes.get();
        self.progress.seen_at.set(offset);
        if offset < self.check_at {
            return Ok(());
        }
        self.check_at = offset + CHECK_EVERY_BYTES;
        let mut budget = Budget::new(self.progress.memory_max.get());
        budget.take(1, self.heap.retained_bytes())?;
        budget.take(1, self.records.retained_bytes())
    }

    /// Adds `items`, keys and values in turn, to a dict.
    fn set_items(&mut self, dict: Value, items: &[Value]) -> Result<()> {
        let Value::Dict(dict) = dict else {
            return Ok(());
        };
        // Further items of a dict that is already a record are not part of it.
        set_items(&mut self.heap, self.records, dict, items).map(drop)
    }

    /// Keeps `error`, and returns an error for the parser.
    fn fail<E: serde::de::Error>(&mut self, error: TraceError) -> E {
        self.error = Some(error);
        E::custom("it is said elsewhere")
    }
}

/// The place of a value in the file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Root,
    /// In the list that is the whole file.
    RootList,
    Inside,
}

/// Reads the next value.
struct Item<'a, 'b> {
    builder: &'a mut Builder<'b>,
    place: Place,
}

impl Item<'_, '_> {
    fn scalar<E: serde::de::Error>(self, value: Value) -> Result<Value, E> {
        self.builder.see()?;
        Ok(value)
    }
}

impl<'de> DeserializeSeed<'de> for Item<'_, '_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Item<'_, '_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value of a snapshot")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Value, E> {
        self.scalar(Value::None)
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Value, E> {
        self.scalar(Value::Bool(value))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Value, E> {
        self.scalar(Value::Int(value))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Value, E> {
        self.scalar(i64::try_from(value).map_or(Value::Natural(value), Value::Int))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        self.scalar(Value::Float(value))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Value, E> {
        self.builder.see()?;
        Ok(Value::String(self.builder.heap.strings.intern(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let builder = self.builder;
        let place = match self.place {
            Place::Root => Place::RootList,
            // A list of lists: a timeline of times and sums, or events that are lists.
            Place::RootList => return Err(builder.fail(TraceError::foreign(LISTS))),
            Place::Inside => Place::Inside,
        };
        builder.see()?;
        let list = builder.heap.new_list();
        while let Some(item) = items.next_element_seed(Item {
            builder: &mut *builder,
            place,
        })? {
            if let Value::List(list) = list {
                builder.heap.extend_list(list, &[item]);
            }
        }
        Ok(list)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let Item { builder, place } = self;
        builder.see()?;
        let dict = builder.heap.new_dict();
        let mut items = Vec::new();
        while let Some(key) = entries.next_key_seed(Item {
            builder: &mut *builder,
            place: Place::Inside,
        })? {
            let is_profile = matches!(
                builder.heap.text(key),
                Some("traceEvents" | "schemaVersion")
            );
            if place == Place::Root && is_profile {
                return Err(builder.fail(TraceError::foreign(PROFILE)));
            }
            let item = Item {
                builder: &mut *builder,
                place: Place::Inside,
            };
            items.extend([key, entries.next_value_seed(item)?]);
            if items.len() >= ITEMS_AT_ONCE {
                builder
                    .set_items(dict, &items)
                    .map_err(|error| builder.fail(error))?;
                items.clear();
            }
        }
        builder
            .set_items(dict, &items)
            .map_err(|error| builder.fail(error))?;
        Ok(dict)
    }
}
