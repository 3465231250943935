//! The public structs as Rust lays them out.

use std::mem::{offset_of, size_of};
use vanward::abi::*;

pub struct Struct {
    pub name: &'static str,
    pub size: usize,
    pub fields: Vec<Field>,
}

pub struct Field {
    pub name: &'static str,
    pub size: usize,
    pub offset: usize,
}

fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! structs {
    ($($name:ident { $($field:ident),* $(,)? })*) => {
        vec![$(Struct {
            name: stringify!($name),
            size: size_of::<$name>(),
            fields: vec![$(Field {
                name: stringify!($field),
                size: size_of_field(|s: &$name| &s.$field),
                offset: offset_of!($name, $field),
            }),*],
        }),*]
    };
}

pub fn all() -> Vec<Struct> {
    include!("layout.rs")
}
