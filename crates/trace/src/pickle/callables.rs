//! The Python objects that a pickle may refer to: a few constructors whose results are known without Python.

use crate::error::{ErrorKind, Result, TraceError};

/// The most characters of a name in a message.
const SHOWN_LETTERS: usize = 60;

/// The result of a constructor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Callable {
    /// The dict among its arguments, or an empty one.
    Dict,
    /// The list among its arguments, or an empty one.
    List,
    /// Its first argument.
    First,
    /// The bytes of a text: each character is one byte.
    Encode,
    /// A numpy type.
    NumberType,
    /// A numpy number, truth value or text, from its type and its bytes.
    Number,
    /// A value that no field of a recording has. Its contents are not kept.
    Opaque,
}

/// A kind of numpy type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NumberType {
    Integer,
    Natural,
    Float,
    Truth,
    Text,
    Other,
}

/// The known constructors, by module and name: those that snapshots have, and common ones that users add to them.
const CALLABLES: [(&str, &[&str], Callable); 15] = [
    (
        "collections",
        &["OrderedDict", "defaultdict", "Counter"],
        Callable::Dict,
    ),
    ("collections", &["deque"], Callable::List),
    ("builtins", &["dict"], Callable::Dict),
    ("builtins", &["list"], Callable::List),
    ("builtins", &["tuple"], Callable::First),
    (
        "builtins",
        &["set", "frozenset", "int", "float", "str", "bool"],
        Callable::Opaque,
    ),
    ("torch", &["Size"], Callable::First),
    ("torch", &["device"], Callable::Opaque),
    ("torch.torch_version", &["TorchVersion"], Callable::First),
    (
        "datetime",
        &["datetime", "date", "time", "timedelta", "timezone"],
        Callable::Opaque,
    ),
    ("pathlib", &["PosixPath", "PurePosixPath"], Callable::Opaque),
    ("_codecs", &["encode"], Callable::Encode),
    ("numpy", &["dtype"], Callable::NumberType),
    ("numpy.core.multiarray", &["scalar"], Callable::Number),
    ("numpy._core.multiarray", &["scalar"], Callable::Number),
];

/// Returns the constructor `module.name`.
///
/// # Errors
///
/// If it is not one of [`CALLABLES`].
pub(super) fn find(module: &str, name: &str) -> Result<Callable> {
    let module = match module {
        // Python 2's name, which protocols up to 2 keep.
        "__builtin__" => "builtins",
        "pathlib._local" => "pathlib",
        other => other,
    };
    let mut known = CALLABLES.iter();
    let found = known.find(|(of, names, _)| *of == module && names.contains(&name));
    let (.., callable) = found.ok_or_else(|| refuse(module, name))?;
    Ok(*callable)
}

#[cold]
fn refuse(module: &str, name: &str) -> TraceError {
    let full: Vec<char> = module.chars().chain(['.']).chain(name.chars()).collect();
    let shown: String = full.iter().take(SHOWN_LETTERS).collect();
    let is_cut = full.len() > SHOWN_LETTERS;
    let more = if is_cut { "…" } else { "" };
    let what = format!(
        "this pickle wants to run code (`{shown}{more}`); lowtide reads data only: if you trust it, load it in Python \
         and dump it again as dicts, lists, texts and numbers"
    );
    TraceError::new(ErrorKind::Code, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shown_in_part() {
        let message = refuse(&"m".repeat(100_000), "system").to_string();
        assert!(
            message.contains("mmm…`") && message.len() < 300,
            "{message}"
        );
        assert!(find("os", "system").unwrap_err().is_code());
        assert!(find("builtins", "eval").unwrap_err().is_code());
        assert_eq!(find("__builtin__", "dict").unwrap(), Callable::Dict);
    }
}
