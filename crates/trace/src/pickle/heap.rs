//! The values of a pickle, and the containers that they refer to by number.

use hashbrown::HashMap;

use super::callables::{Callable, NumberType};
use super::strings::{StringId, Strings};
use crate::budget::vector_bytes;
use crate::error::{ErrorKind, Result, TraceError};

/// The most keys of a dict in which keys are looked up, so that a look-up takes constant time. A snapshot has about
/// twenty keys in one dict. A dict of snapshots, or one that a user extended, may have any number.
const KEYS_MAX: usize = 64;

/// A value of a pickle. Containers and strings are in the [`Heap`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Value {
    /// Python's `None`. Also the value of a key that a dict does not have.
    None,
    Bool(bool),
    Int(i64),
    /// An integer that fits only a `u64`.
    Natural(u64),
    Float(f64),
    String(StringId),
    List(u32),
    Dict(u32),
    Tuple(u32),
    /// A short byte string: each character of the string is one byte.
    Bytes(StringId),
    /// An object of Python's that the pickle refers to.
    Callable(Callable),
    /// A numpy type.
    NumberType(NumberType),
    /// A value that no field of a recording has: a long byte string, or an integer of more than 64 bits. Its
    /// contents are not kept.
    Opaque,
}

/// A reference to a value: eight bytes, because a pickle memoizes millions of them.
#[derive(Clone, Copy)]
pub(super) enum Reference {
    String(StringId),
    List(u32),
    Dict(u32),
    Tuple(u32),
    /// A value of another kind, in `Heap::scalars`. No known writer memoizes any.
    Scalar(u32),
}

/// The contents of a dict. `R` is the recogniser's record.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Dict<R> {
    Empty,
    /// Keys and values in turn: the index in `Heap::pairs`.
    Pairs(u32),
    Record(R),
}

/// The contents of a list.
enum List {
    Items(Vec<Value>),
    /// The recogniser has read it. The number replaces its items.
    Sealed(u32),
}

/// The containers and strings of a pickle.
pub(crate) struct Heap<R> {
    pub(crate) strings: Strings,
    lists: Vec<List>,
    dicts: Vec<Dict<R>>,
    pairs: Vec<Vec<Value>>,
    tuples: Vec<Box<[Value]>>,
    /// Pairs of integers, each stored once: every event of newer recordings has one (its pool).
    integer_pairs: HashMap<(i64, i64), u32>,
    scalars: Vec<Value>,
    /// The bytes of memory that the items of the lists, dicts and tuples take.
    items_bytes: u64,
}

impl<R: Copy> Heap<R> {
    pub(crate) fn new(strings: Strings) -> Heap<R> {
        Heap {
            strings,
            lists: Vec::new(),
            dicts: Vec::new(),
            pairs: Vec::new(),
            tuples: Vec::new(),
            integer_pairs: HashMap::new(),
            scalars: Vec::new(),
            items_bytes: 0,
        }
    }

    pub(crate) fn into_strings(self) -> Strings {
        self.strings
    }

    #[inline]
    pub(super) fn reference(&mut self, value: Value) -> Reference {
        match value {
            Value::String(string) => Reference::String(string),
            Value::List(list) => Reference::List(list),
            Value::Dict(dict) => Reference::Dict(dict),
            Value::Tuple(tuple) => Reference::Tuple(tuple),
            _ => {
                self.scalars.push(value);
                Reference::Scalar(index(self.scalars.len() - 1))
            }
        }
    }

    #[inline]
    pub(super) fn value(&self, reference: Reference) -> Value {
        match reference {
            Reference::String(string) => Value::String(string),
            Reference::List(list) => Value::List(list),
            Reference::Dict(dict) => Value::Dict(dict),
            Reference::Tuple(tuple) => Value::Tuple(tuple),
            Reference::Scalar(scalar) => self.scalars[scalar as usize],
        }
    }

    pub(crate) fn new_list(&mut self) -> Value {
        self.lists.push(List::Items(Vec::new()));
        Value::List(index(self.lists.len() - 1))
    }

    pub(crate) fn new_dict(&mut self) -> Value {
        self.dicts.push(Dict::Empty);
        Value::Dict(index(self.dicts.len() - 1))
    }

    pub(crate) fn new_tuple(&mut self, items: &[Value]) -> Value {
        if let [Value::Int(first), Value::Int(second)] = *items {
            let next = index(self.tuples.len());
            let id = *self.integer_pairs.entry((first, second)).or_insert(next);
            if id == next {
                self.items_bytes += items_bytes(2, 2);
                self.tuples.push(items.into());
            }
            return Value::Tuple(id);
        }
        self.items_bytes += items_bytes(items.len(), items.len());
        self.tuples.push(items.into());
        Value::Tuple(index(self.tuples.len() - 1))
    }

    /// Adds items. Returns `false` if the list is sealed.
    pub(crate) fn extend_list(&mut self, list: u32, items: &[Value]) -> bool {
        let List::Items(list) = &mut self.lists[list as usize] else {
            return false;
        };
        extend(list, items, &mut self.items_bytes);
        true
    }

    /// Adds keys and values in turn. Returns `false` if the dict is a record.
    #[inline(never)]
    pub(crate) fn extend_dict(&mut self, dict: u32, items: &[Value]) -> bool {
        let pairs = match self.dicts[dict as usize] {
            Dict::Record(_) => return false,
            Dict::Pairs(pairs) => pairs,
            Dict::Empty => {
                self.pairs.push(Vec::new());
                let pairs = index(self.pairs.len() - 1);
                self.dicts[dict as usize] = Dict::Pairs(pairs);
                pairs
            }
        };
        let pairs = &mut self.pairs[pairs as usize];
        extend(pairs, items, &mut self.items_bytes);
        true
    }

    /// Returns the items of a list or tuple; `None` if `value` is neither, or is sealed.
    pub(crate) fn items(&self, value: Value) -> Option<&[Value]> {
        match value {
            Value::List(list) => match &self.lists[list as usize] {
                List::Items(items) => Some(items),
                List::Sealed(_) => None,
            },
            Value::Tuple(tuple) => Some(&self.tuples[tuple as usize]),
            _ => None,
        }
    }

    /// Returns the seal of the list `value`; `None` if it is not a sealed list.
    pub(crate) fn seal(&self, value: Value) -> Option<u32> {
        match value {
            Value::List(list) => match self.lists[list as usize] {
                List::Items(_) => None,
                List::Sealed(seal) => Some(seal),
            },
            _ => None,
        }
    }

    /// Replaces the items of the list `value` by `seal`.
    pub(crate) fn seal_list(&mut self, value: Value, seal: u32) {
        if let Value::List(list) = value {
            let old = std::mem::replace(&mut self.lists[list as usize], List::Sealed(seal));
            if let List::Items(items) = old {
                self.items_bytes -= items_bytes(items.len(), items.capacity());
            }
        }
    }

    pub(crate) fn dict(&self, dict: u32) -> Dict<R> {
        self.dicts[dict as usize]
    }

    /// Replaces the keys and values of a dict by `record`.
    #[inline]
    pub(crate) fn set_record(&mut self, dict: u32, record: R) {
        let old = std::mem::replace(&mut self.dicts[dict as usize], Dict::Record(record));
        if let Dict::Pairs(pairs) = old {
            let pairs = std::mem::take(&mut self.pairs[pairs as usize]);
            self.items_bytes -= items_bytes(pairs.len(), pairs.capacity());
        }
    }

    /// Returns `value`, unless it is a dict with more than [`KEYS_MAX`] keys.
    ///
    /// # Errors
    ///
    /// If it is: no dict of a snapshot has so many keys.
    pub(crate) fn kept(&self, value: Value) -> Result<Value> {
        if self.all_pairs(value).len() > 2 * KEYS_MAX {
            Err(too_many_keys())
        } else {
            Ok(value)
        }
    }

    /// Returns the keys and values of a dict, in turn. Returns none if `value` is a record, is not a dict, or has
    /// more than [`KEYS_MAX`] keys.
    pub(crate) fn pairs(&self, value: Value) -> &[Value] {
        let pairs = self.all_pairs(value);
        if pairs.len() > 2 * KEYS_MAX {
            &[]
        } else {
            pairs
        }
    }

    /// Returns the keys and values of a dict, in turn, however many it has.
    pub(crate) fn all_pairs(&self, value: Value) -> &[Value] {
        match value {
            Value::Dict(dict) => match self.dicts[dict as usize] {
                Dict::Pairs(pairs) => &self.pairs[pairs as usize],
                Dict::Empty | Dict::Record(_) => &[],
            },
            _ => &[],
        }
    }

    /// Returns the text of a string; `None` if `value` is not a string.
    pub(crate) fn text(&self, value: Value) -> Option<&str> {
        match value {
            Value::String(id) => Some(self.strings.get(id)),
            _ => None,
        }
    }

    /// Returns about how many bytes of memory the heap takes.
    pub(crate) fn retained_bytes(&self) -> u64 {
        let containers = self.lists.len() * size_of::<List>()
            + self.dicts.len() * size_of::<Dict<R>>()
            + self.pairs.len() * size_of::<Vec<Value>>()
            + self.tuples.len() * size_of::<Box<[Value]>>()
            + self.integer_pairs.allocation_size()
            + self.scalars.len() * size_of::<Value>();
        containers as u64 + self.items_bytes + self.strings.retained_bytes()
    }
}

/// Appends `items` to `to`, and adds their memory to `bytes`.
#[inline]
fn extend(to: &mut Vec<Value>, items: &[Value], bytes: &mut u64) {
    *bytes -= items_bytes(to.len(), to.capacity());
    to.extend_from_slice(items);
    *bytes += items_bytes(to.len(), to.capacity());
}

fn items_bytes(len: usize, capacity: usize) -> u64 {
    vector_bytes(len, capacity, size_of::<Value>())
}

#[cold]
fn too_many_keys() -> TraceError {
    let what = format!("a dict has more than {KEYS_MAX} keys; none of a recording does");
    TraceError::new(ErrorKind::Limit, what)
}

/// Returns the number of a container. A file reaches its memory limit long before 2^32 of them.
fn index(position: usize) -> u32 {
    u32::try_from(position).expect("the budget of a file ends before 2^32 containers")
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNT: usize = 10_000;

    /// Checks that each object that `add` adds counts as `bytes`, or up to twice that.
    #[track_caller]
    fn check_counted(bytes: usize, add: impl Fn(&mut Heap<()>, i64)) {
        let mut heap = Heap::new(Strings::default());
        let before = heap.retained_bytes();
        for number in 0..COUNT {
            add(&mut heap, i64::try_from(number).expect("it is small"));
        }
        let counted = heap.retained_bytes() - before;
        let taken = (COUNT * bytes) as u64;
        assert!(
            (taken..=2 * taken).contains(&counted),
            "{counted} of {taken}"
        );
    }

    #[test]
    fn every_container_counts() {
        let value = size_of::<Value>();
        let vector = size_of::<Vec<Value>>();
        let (list, dict) = (size_of::<List>(), size_of::<Dict<()>>());
        let tuple = size_of::<Box<[Value]>>();
        check_counted(list, |heap, _| {
            heap.new_list();
        });
        check_counted(list + 20 * value, |heap, _| {
            let Value::List(list) = heap.new_list() else {
                return;
            };
            assert!(heap.extend_list(list, &[Value::None; 20]));
        });
        check_counted(dict, |heap, _| {
            heap.new_dict();
        });
        check_counted(dict + vector + 20 * value, |heap, _| {
            let Value::Dict(dict) = heap.new_dict() else {
                return;
            };
            assert!(heap.extend_dict(dict, &[Value::None; 20]));
        });
        check_counted(tuple + 20 * value, |heap, _| {
            heap.new_tuple(&[Value::None; 20]);
        });
        let pair = size_of::<((i64, i64), u32)>();
        check_counted(tuple + 2 * value + pair, |heap, number| {
            heap.new_tuple(&[Value::Int(number), Value::Int(1)]);
        });
        check_counted(value, |heap, number| {
            heap.reference(Value::Int(number));
        });
    }

    /// Items that a heap has dropped do not count.
    #[test]
    fn what_is_dropped_does_not_count() {
        let mut heap = Heap::new(Strings::default());
        let (list, dict) = (heap.new_list(), heap.new_dict());
        let (Value::List(number), Value::Dict(dict)) = (list, dict) else {
            panic!("they are what they are");
        };
        let before = heap.retained_bytes();
        heap.extend_list(number, &[Value::None; 1000]);
        heap.seal_list(list, 0);
        assert_eq!(heap.retained_bytes(), before);
        heap.extend_dict(dict, &[Value::None; 100]);
        heap.set_record(dict, ());
        let left = heap.retained_bytes() - before;
        assert_eq!(left, size_of::<Vec<Value>>() as u64);
    }
}
