//! Computes the results of the constructors that a pickle refers to.
//!
//! Nothing is called. The result follows from the arguments: the dict of an `OrderedDict`, the number of a numpy
//! scalar.

use super::callables::{Callable, NumberType};
use super::heap::{Heap, Value};
use crate::error::{Result, TraceError};

/// Returns the result of `callable` for the tuple `arguments`.
///
/// # Errors
///
/// If `callable` is not a constructor, or the arguments do not fit it.
pub(super) fn result<R: Copy>(
    heap: &mut Heap<R>,
    callable: Value,
    arguments: Value,
) -> Result<Value> {
    let Value::Callable(callable) = callable else {
        return Err(TraceError::malformed("calls something that is no function"));
    };
    let items = match arguments {
        Value::Tuple(_) => heap.items(arguments),
        _ => None,
    };
    let items = items.ok_or_else(|| TraceError::malformed("arguments are not a tuple"))?;
    let first = items.first().copied();
    match callable {
        Callable::Dict => {
            let dict = items.iter().find(|item| matches!(item, Value::Dict(_)));
            Ok(dict.copied().unwrap_or_else(|| heap.new_dict()))
        }
        Callable::List => {
            let list = items.iter().find(|item| matches!(item, Value::List(_)));
            Ok(list.copied().unwrap_or_else(|| heap.new_list()))
        }
        Callable::First => first.ok_or_else(|| TraceError::malformed("an argument is missing")),
        Callable::Encode => Ok(match first {
            Some(Value::String(text)) => Value::Bytes(text),
            _ => Value::Opaque,
        }),
        Callable::NumberType => {
            let name = first.and_then(|name| heap.text(name));
            Ok(Value::NumberType(number_type(name.unwrap_or_default())))
        }
        Callable::Number => match *items {
            [Value::NumberType(kind), Value::Bytes(bytes)] => {
                let letters = heap.strings.get(bytes).chars();
                let bytes: Option<Vec<u8>> =
                    letters.map(|letter| u8::try_from(letter).ok()).collect();
                number(heap, kind, &bytes.unwrap_or_default())
            }
            _ => Ok(Value::Opaque),
        },
        Callable::Opaque => Ok(Value::Opaque),
    }
}

/// Checks the `state` of a numpy type. Its second item is the byte order.
///
/// # Errors
///
/// If the byte order is not that of CUDA's machines.
pub(super) fn check_number_type<R: Copy>(heap: &Heap<R>, state: Value) -> Result<()> {
    let order = heap.items(state).and_then(|items| items.get(1));
    match order.and_then(|&order| heap.text(order)) {
        Some("<" | "|" | "=") => Ok(()),
        _ => Err(TraceError::malformed(
            "a number's bytes are in an unknown order",
        )),
    }
}

fn number_type(name: &str) -> NumberType {
    match name {
        "i1" | "i2" | "i4" | "i8" => NumberType::Integer,
        "u1" | "u2" | "u4" | "u8" => NumberType::Natural,
        "f4" | "f8" => NumberType::Float,
        "b1" => NumberType::Truth,
        _ if name.starts_with('U') => NumberType::Text,
        _ => NumberType::Other,
    }
}

fn number<R: Copy>(heap: &mut Heap<R>, kind: NumberType, bytes: &[u8]) -> Result<Value> {
    let wrong = || TraceError::malformed("numpy's number does not have the bytes of its type");
    let natural = |bytes: &[u8]| {
        let mut padded = [0; 8];
        padded.get_mut(..bytes.len())?.copy_from_slice(bytes);
        (!bytes.is_empty()).then(|| u64::from_le_bytes(padded))
    };
    Ok(match kind {
        NumberType::Integer => {
            let value = natural(bytes).ok_or_else(wrong)?;
            let unused_bits = 64 - 8 * bytes.len();
            Value::Int(value.cast_signed() << unused_bits >> unused_bits)
        }
        NumberType::Natural => {
            let value = natural(bytes).ok_or_else(wrong)?;
            i64::try_from(value).map_or(Value::Natural(value), Value::Int)
        }
        NumberType::Float => match *bytes {
            [a, b, c, d] => Value::Float(f64::from(f32::from_le_bytes([a, b, c, d]))),
            _ => Value::Float(f64::from_le_bytes(bytes.try_into().map_err(|_| wrong())?)),
        },
        NumberType::Truth => Value::Bool(*bytes.first().ok_or_else(wrong)? != 0),
        NumberType::Text => {
            let letters = bytes
                .chunks(4)
                .map(|letter| natural(letter).map(u32::try_from));
            let letters = letters.map(|letter| char::from_u32(letter?.ok()?));
            let text: Option<String> = letters.collect();
            let text = text.ok_or_else(wrong)?;
            Value::String(heap.strings.intern(text.trim_end_matches('\0')))
        }
        NumberType::Other => Value::Opaque,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pickle::Strings;

    /// Returns the value of the numpy scalar with this type and these bytes.
    fn scalar(name: &str, bytes: &[u8]) -> Result<Value> {
        let mut heap: Heap<()> = Heap::new(Strings::default());
        number(&mut heap, number_type(name), bytes)
    }

    #[test]
    fn numbers_of_every_type() {
        let check = |name, bytes: &[u8], expected| {
            assert_eq!(scalar(name, bytes).unwrap(), expected, "{name}");
        };
        check("i1", &[0xff], Value::Int(-1));
        check("i4", &[0, 0, 0, 0x80], Value::Int(i64::from(i32::MIN)));
        check(
            "i8",
            &[0xfe; 8],
            Value::Int(0xfefe_fefe_fefe_fefe_u64.cast_signed()),
        );
        check("u2", &[1, 1], Value::Int(257));
        check("u8", &[0xff; 8], Value::Natural(u64::MAX));
        check("f4", &1.5f32.to_le_bytes(), Value::Float(1.5));
        check("f8", &0.25f64.to_le_bytes(), Value::Float(0.25));
        check("b1", &[1], Value::Bool(true));
        check("c16", &[0; 16], Value::Opaque);
        for (name, bytes) in [
            ("i8", &[0; 9][..]),
            ("u1", &[]),
            ("f8", &[0; 7]),
            ("b1", &[]),
        ] {
            assert!(scalar(name, bytes).unwrap_err().is_malformed(), "{name}");
        }
        assert!(scalar("U1", &[0, 0, 0, 0x80]).unwrap_err().is_malformed());
    }
}
