//! Errors inside the library: a code of the C ABI and a message that names the argument, what was found and what was
//! expected.

use crate::abi::*;
use std::borrow::Cow;
use std::fmt;
use std::ops::Deref;

/// The non-zero values of `vwd_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    InvalidArgument = VWD_ERROR_INVALID_ARGUMENT,
    Unavailable = VWD_ERROR_UNAVAILABLE,
    Unsupported = VWD_ERROR_UNSUPPORTED,
    OutOfMemory = VWD_ERROR_OUT_OF_MEMORY,
    OutOfScratch = VWD_ERROR_OUT_OF_SCRATCH,
    Driver = VWD_ERROR_DRIVER,
    Io = VWD_ERROR_IO,
    Internal = VWD_ERROR_INTERNAL,
}

/// An error is one pointer, so that a `Result` is small: calls that succeed return many of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Error(Box<Failure>);

#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    pub code: Code,
    pub message: Cow<'static, str>,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn new(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Error(Box::new(Failure { code, message: message.into() }))
    }

    pub fn with_code(mut self, code: Code) -> Self {
        self.0.code = code;
        self
    }

    /// `name: found; expected …`, the form of every argument error.
    pub fn argument(name: &str, found: impl fmt::Display, expected: impl fmt::Display) -> Self {
        Error::new(Code::InvalidArgument, format!("{name}: {found}; expected {expected}"))
    }

    /// The error of a call's `args`, of a member of an array of such structs: `array[index].name: …`.
    pub fn of_member(mut self, array: &str, index: usize) -> Self {
        if !matches!(self.0.code, Code::InvalidArgument | Code::Unsupported) {
            return self;
        }
        let message = &self.0.message;
        let member = message.strip_prefix("args").map_or_else(|| format!(".{message}"), str::to_string);
        self.0.message = format!("{array}[{index}]{member}").into();
        self
    }

    pub fn unsupported(message: impl Into<Cow<'static, str>>) -> Self {
        Error::new(Code::Unsupported, message)
    }

    pub fn out_of_memory(bytes: usize, purpose: &str) -> Self {
        Error::new(Code::OutOfMemory, format!("out of host memory: {bytes} bytes for {purpose}"))
    }
}

impl Deref for Error {
    type Target = Failure;
    fn deref(&self) -> &Failure {
        &self.0
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}
