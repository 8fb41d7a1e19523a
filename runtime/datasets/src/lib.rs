//! Public data sets, prepared for training: a program fills a folder with CSV files, and a manifest
//! names them. Reading them is the job of `rectrain-data`, which this crate does not know.

mod archive;
mod error;
pub mod movielens;

pub use error::DatasetError;
