//! Configurations that are refused.

use crate::{GroupId, MAX_DIM, MAX_GROUPS, MAX_SLOTS};
use thiserror::Error;

/// A configuration that cannot be used.
#[derive(Debug, Error, PartialEq)]
pub enum SpecError {
    #[error("slots is {found}; give a number from 1 to {max}", max = MAX_SLOTS)]
    Slots { found: u32 },
    #[error("a store was asked for with {found} row groups; give 1 to {max}", max = MAX_GROUPS)]
    Groups { found: usize },
    #[error("row group {group}: {source}")]
    InGroup {
        group: GroupId,
        #[source]
        source: Box<SpecError>,
    },
    #[error("dim is {found}; give a number from 1 to {max}", max = MAX_DIM)]
    Dim { found: usize },
    #[error("zero_columns is {found} but a row has {dim} columns; give at most that many")]
    ZeroColumns { found: usize, dim: usize },
    #[error(
        "{zero_columns} of its {dim} columns start at 0; an optimizer of first-order weights needs such columns, and others"
    )]
    FirstOrder { zero_columns: usize, dim: usize },
    #[error("first-order weights: {source}")]
    OfFirstOrder {
        #[source]
        source: Box<SpecError>,
    },
    #[error("share is {found} millionths of the budget; give a number from 1 to 1000000")]
    Share { found: u32 },
    #[error("the budget is 0; give at least one row or byte for each slot, or no budget")]
    Budget,
    #[error("the initializer's {name} is {found}; it must be {expected}")]
    Initializer { name: &'static str, found: f32, expected: &'static str },
    #[error("the optimizer's {name} is {found}; it must be {expected}")]
    Optimizer { name: &'static str, found: f64, expected: &'static str },
    #[error("the row life's {name} is {found}; it must be {expected}")]
    Life { name: &'static str, found: u64, expected: &'static str },
}
