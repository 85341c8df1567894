//! The pickle opcodes, with the names of Python's `pickletools`.
//!
//! [`code_name`] lists those that can call into Python. They are never executed. `calls.rs` computes the results of
//! the few other opcodes that refer to Python.

/// The opcodes that the machine handles.
pub(crate) mod data {
    pub(crate) const MARK: u8 = b'(';
    pub(crate) const STOP: u8 = b'.';
    pub(crate) const POP: u8 = b'0';
    pub(crate) const POP_MARK: u8 = b'1';
    pub(crate) const DUP: u8 = b'2';
    pub(crate) const FLOAT: u8 = b'F';
    pub(crate) const INT: u8 = b'I';
    pub(crate) const BININT: u8 = b'J';
    pub(crate) const BININT1: u8 = b'K';
    pub(crate) const LONG: u8 = b'L';
    pub(crate) const BININT2: u8 = b'M';
    pub(crate) const NONE: u8 = b'N';
    pub(crate) const STRING: u8 = b'S';
    pub(crate) const BINSTRING: u8 = b'T';
    pub(crate) const SHORT_BINSTRING: u8 = b'U';
    pub(crate) const UNICODE: u8 = b'V';
    pub(crate) const BINUNICODE: u8 = b'X';
    pub(crate) const APPEND: u8 = b'a';
    pub(crate) const DICT: u8 = b'd';
    pub(crate) const EMPTY_DICT: u8 = b'}';
    pub(crate) const APPENDS: u8 = b'e';
    pub(crate) const GET: u8 = b'g';
    pub(crate) const BINGET: u8 = b'h';
    pub(crate) const LONG_BINGET: u8 = b'j';
    pub(crate) const LIST: u8 = b'l';
    pub(crate) const EMPTY_LIST: u8 = b']';
    pub(crate) const PUT: u8 = b'p';
    pub(crate) const BINPUT: u8 = b'q';
    pub(crate) const LONG_BINPUT: u8 = b'r';
    pub(crate) const SETITEM: u8 = b's';
    pub(crate) const TUPLE: u8 = b't';
    pub(crate) const EMPTY_TUPLE: u8 = b')';
    pub(crate) const SETITEMS: u8 = b'u';
    pub(crate) const BINFLOAT: u8 = b'G';
    pub(crate) const PROTO: u8 = 0x80;
    pub(crate) const TUPLE1: u8 = 0x85;
    pub(crate) const TUPLE2: u8 = 0x86;
    pub(crate) const TUPLE3: u8 = 0x87;
    pub(crate) const NEWTRUE: u8 = 0x88;
    pub(crate) const NEWFALSE: u8 = 0x89;
    pub(crate) const LONG1: u8 = 0x8a;
    pub(crate) const LONG4: u8 = 0x8b;
    pub(crate) const BINBYTES: u8 = b'B';
    pub(crate) const SHORT_BINBYTES: u8 = b'C';
    pub(crate) const SHORT_BINUNICODE: u8 = 0x8c;
    pub(crate) const BINUNICODE8: u8 = 0x8d;
    pub(crate) const BINBYTES8: u8 = 0x8e;
    pub(crate) const MEMOIZE: u8 = 0x94;
    pub(crate) const FRAME: u8 = 0x95;
    // Opcodes that refer to Python. They are handled only for the constructors in `callables.rs`.
    pub(crate) const GLOBAL: u8 = b'c';
    pub(crate) const STACK_GLOBAL: u8 = 0x93;
    pub(crate) const REDUCE: u8 = b'R';
    pub(crate) const NEWOBJ: u8 = 0x81;
    pub(crate) const BUILD: u8 = b'b';
}

/// Returns the name of an opcode that calls into Python, or that refers to objects which only Python has.
pub(crate) fn code_name(opcode: u8) -> Option<&'static str> {
    Some(match opcode {
        data::BUILD => "BUILD",
        b'i' => "INST",
        b'o' => "OBJ",
        0x92 => "NEWOBJ_EX",
        0x82 => "EXT1",
        0x83 => "EXT2",
        0x84 => "EXT4",
        b'P' => "PERSID",
        b'Q' => "BINPERSID",
        _ => return None,
    })
}

/// Returns the name of an opcode for data that no snapshot has: sets and out-of-band buffers.
pub(crate) fn foreign_name(opcode: u8) -> Option<&'static str> {
    Some(match opcode {
        0x8f => "EMPTY_SET",
        0x90 => "ADDITEMS",
        0x91 => "FROZENSET",
        0x96 => "BYTEARRAY8",
        0x97 => "NEXT_BUFFER",
        0x98 => "READONLY_BUFFER",
        _ => return None,
    })
}
