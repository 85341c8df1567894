//! What a pickle may refer to in Python, beyond plain data: few constructors, whose results are known without Python.

use crate::error::{ErrorKind, TraceError};

/// How much of a name goes into a message.
const SHOWN_LETTERS: usize = 60;

/// What a constructor makes of its arguments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Callable {
    /// The dict among them, or an empty one.
    Dict,
    /// The list among them, or an empty one.
    List,
    /// The first.
    First,
    /// The bytes of a text, of which each letter stands for one.
    Encode,
    /// A type of numpy's.
    NumberType,
    /// A number, truth value or text of numpy's, from its type and its bytes.
    Number,
    /// Something that no field of a recording holds, and that is only carried along.
    Opaque,
}

/// A type of numpy's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NumberType {
    Integer,
    Natural,
    Float,
    Truth,
    Text,
    Other,
}

/// What is understood, by module and name: what snapshots have, and what their owners add to them.
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

/// Returns what `module.name` is.
///
/// # Errors
///
/// If it is not one of the few that are understood.
pub(super) fn find(module: &str, name: &str) -> Result<Callable, TraceError> {
    let module = match module {
        // The name of Python 2, which protocols up to 2 keep.
        "__builtin__" => "builtins",
        "pathlib._local" => "pathlib",
        other => other,
    };
    let found = CALLABLES
        .iter()
        .find(|(of, names, _)| *of == module && names.contains(&name));
    found
        .map(|&(.., callable)| callable)
        .ok_or_else(|| refuse(module, name))
}

#[cold]
fn refuse(module: &str, name: &str) -> TraceError {
    let full: Vec<char> = module.chars().chain(['.']).chain(name.chars()).collect();
    let shown: String = full.iter().take(SHOWN_LETTERS).collect();
    let more = if full.len() > SHOWN_LETTERS {
        "…"
    } else {
        ""
    };
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
