//! A stream in memory, for tests: partitions of labels that may grow. It shows that the seam fits a
//! source that does not end.

use std::sync::Arc;

use parking_lot::Mutex;
use rectrain_kinds::{BadRows, LabelField, Position, Schema, Start};

use crate::batch::Batch;
use crate::blocking::Stop;
use crate::config::SourceConfig;
use crate::dataset::Dataset;
use crate::error::{DataError, Place};
use crate::identity::{Identity, PartIdentity};
use crate::schema::Encoder;
use crate::source::{Rows, Source, Tally, View};

/// The labels of each partition. Clones share them.
#[derive(Debug, Clone, Default)]
struct Stream(Arc<Mutex<Vec<Vec<f32>>>>);

impl Stream {
    fn new(partitions: usize) -> Self {
        Self(Arc::new(Mutex::new(vec![Vec::new(); partitions])))
    }

    fn append(&self, partition: usize, labels: &[f32]) {
        self.0.lock()[partition].extend(labels);
    }

    fn label(&self, at: Position) -> Option<f32> {
        let partitions = self.0.lock();
        let partition = partitions.get(at.part.0 as usize)?;
        partition.get(at.offset.0 as usize).copied()
    }

    fn rows(&self) -> Vec<u64> {
        let partitions = self.0.lock();
        partitions.iter().map(|partition| partition.len() as u64).collect()
    }

    fn dataset(&self, bad_rows: BadRows) -> Dataset {
        let label = LabelField::of_numbers("y", None);
        let schema = Schema { sparse: vec![], dense: vec![], label, group: None, time: None };
        let config = SourceConfig { bad_rows, ..SourceConfig::default() };
        Dataset::over(Box::new(self.clone()), config, Arc::new(Encoder::new(schema, &[]))).unwrap()
    }
}

impl Source for Stream {
    fn open(&self, view: View) -> Result<Box<dyn Rows>, DataError> {
        Ok(Box::new(StreamRows { stream: self.clone(), at: view.from, tally: Tally::new(view.bad_rows) }))
    }

    fn identity(&self) -> Identity {
        let part = |number| PartIdentity { name: format!("clicks/{number}"), size: None, version: None };
        Identity { parts: (0..self.rows().len()).map(part).collect() }
    }

    fn is_finite(&self) -> bool {
        false
    }

    fn known_rows(&self) -> Vec<u64> {
        self.rows()
    }

    fn count_rows(&self, _stop: &Stop) -> Result<u64, DataError> {
        Ok(self.estimated_rows())
    }

    fn estimated_rows(&self) -> u64 {
        self.rows().iter().sum()
    }
}

/// Cursor over the rows of one partition.
struct StreamRows {
    stream: Stream,
    at: Position,
    tally: Tally,
}

impl StreamRows {
    fn bad_row(&self, label: f32) -> DataError {
        DataError::BadRow {
            file: format!("clicks/{}", self.at.part.0),
            at: Place::Row(self.at.offset.0 + 1),
            column: "y".to_owned(),
            value: label.to_string(),
            expected: "0 or 1".to_owned(),
        }
    }
}

impl Rows for StreamRows {
    fn advance(&mut self, rows: u64, mut into: Option<&mut Batch>) -> Result<u64, DataError> {
        let mut passed = 0;
        while passed < rows {
            let Some(label) = self.stream.label(self.at) else { break };
            if (0.0..=1.0).contains(&label) {
                passed += 1;
                if let Some(batch) = &mut into {
                    batch.labels.push(label);
                    batch.samples += 1;
                }
            } else {
                let error = self.bad_row(label);
                self.tally.note(error)?;
            }
            self.at.offset.0 += 1;
        }
        Ok(passed)
    }

    fn pass_over_bad(&mut self) -> Result<(), DataError> {
        while self.tally.skips()
            && let Some(label) = self.stream.label(self.at)
            && !(0.0..=1.0).contains(&label)
        {
            self.tally.note(self.bad_row(label))?;
            self.at.offset.0 += 1;
        }
        Ok(())
    }

    fn skipped(&self) -> u64 {
        self.tally.skipped
    }

    fn position(&self) -> Position {
        self.at
    }
}

mod tests {
    use super::*;
    use crate::reader::SpanReader;
    use crate::span::{Order, Span};

    fn read(reader: &mut SpanReader, from: Position, rows: u64) -> (Vec<f32>, u64, Position) {
        let span = Span { from: Start::At(from), rows, until: None, order: Order::Stored };
        let found = reader.read(span).unwrap().expect("a stream has no end");
        (found.batch.labels, found.skipped, found.next)
    }

    #[test]
    fn a_partition_is_read_on_where_the_last_span_ended() {
        let stream = Stream::new(2);
        let mut reader = stream.dataset(BadRows::Fail).span_reader(2);
        let start = Position::new(1, 0);
        assert_eq!(read(&mut reader, start, 3), (vec![], 0, start));
        stream.append(0, &[0.0; 9]);
        assert_eq!(read(&mut reader, start, 3), (vec![], 0, start), "another partition grew");
        stream.append(1, &[1.0, 0.0, 0.5, 0.25]);
        let next = Position::new(1, 3);
        assert_eq!(read(&mut reader, start, 3), (vec![1.0, 0.0, 0.5], 0, next));
        assert_eq!(read(&mut reader, next, 3), (vec![0.25], 0, Position::new(1, 4)));
        stream.append(1, &[1.0; 3]);
        assert_eq!(read(&mut reader, next, 3), (vec![0.25, 1.0, 1.0], 0, Position::new(1, 6)), "read again");
        assert_eq!(read(&mut reader, Position::new(0, 8), 3), (vec![0.0], 0, Position::new(0, 9)));
    }

    #[test]
    fn bad_rows_of_a_stream_are_skipped_and_counted() {
        let stream = Stream::new(1);
        let mut reader = stream.dataset(BadRows::Skip { limit: 9 }).span_reader(0);
        stream.append(0, &[7.0, 1.0, 7.0, 7.0, 0.0, 7.0]);
        assert_eq!(read(&mut reader, Position::new(0, 0), 1), (vec![1.0], 3, Position::new(0, 4)));
        assert_eq!(read(&mut reader, Position::new(0, 4), 2), (vec![0.0], 1, Position::new(0, 6)));
        stream.append(0, &[7.0]);
        assert_eq!(read(&mut reader, Position::new(0, 6), 2), (vec![], 1, Position::new(0, 7)));
    }

    #[test]
    fn a_stream_has_partitions_and_no_end() {
        let stream = Stream::new(2);
        let dataset = stream.dataset(BadRows::Fail);
        assert!(!dataset.is_finite() && dataset.count_rows().is_err());
        let digest = dataset.identity().digest();
        stream.append(1, &[0.0; 5]);
        let names: Vec<String> = dataset.identity().parts.into_iter().map(|part| part.name).collect();
        assert_eq!((dataset.estimated_rows(), names), (5, vec!["clicks/0".to_owned(), "clicks/1".to_owned()]));
        assert_eq!(dataset.identity().digest(), digest, "growth does not change the identity");
        let span = Span { from: Start::Row(0), rows: 5, until: None, order: Order::Stored };
        let message = dataset.span_reader(0).read(span).unwrap_err().to_string();
        assert!(message.contains("positions"), "{message}");
    }
}
