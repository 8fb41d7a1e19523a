//! Reads the rows of followed files. A chunk is a number of rows of one file. The file stays open
//! while its chunks follow each other.

use rectrain_data::{Dataset, Order, Schema, Segment, SegmentRead, SourceConfig, Span, SpanReader, Start};
use rectrain_proto::v1;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::plan::JobPlan;

use crate::reader::Content;

/// See the module documentation.
pub(crate) struct FollowedReader {
    /// The followed paths.
    source: SourceConfig,
    schema: Schema,
    /// Chunks that are parsed ahead.
    ahead: usize,
    open: Option<(v1::FollowedFile, SpanReader)>,
}

impl FollowedReader {
    pub(crate) fn new(plan: &JobPlan, ahead: usize) -> Self {
        Self { source: plan.train.clone(), schema: plan.schema.clone(), ahead, open: None }
    }

    /// Reads the rows of a segment, of up to `rows` rows. Blocks.
    ///
    /// # Errors
    /// The file is gone, or is another one than the coordinator leased: the next attempt of the job
    /// looks at it again, and tells it. A file that cannot be read.
    pub(crate) fn read(&mut self, file: &v1::FollowedFile, segment: Segment, rows: u64) -> Result<Content, RoleError> {
        let mut reader = match self.open.take() {
            Some((open, reader)) if open == *file => reader,
            _ => self.open(file)?,
        };
        let span = Span { from: Start::Row(segment.from), rows, until: None, order: Order::Stored };
        let found = reader.read(span).map_err(|error| match error.is_absence() {
            true => lost(file, "is gone"),
            false => error.into(),
        })?;
        self.open = Some((file.clone(), reader));
        let Some(found) = found else { return Err(lost(file, "has fewer rows")) };
        if found.batch.samples as u64 != segment.until - segment.from {
            return Err(lost(file, "has another number of rows"));
        }
        Ok(Content {
            read: Some(SegmentRead { next: segment.until, more: true }),
            skipped: found.skipped,
            event_millis: Some(file.modified_millis),
            rows: Some(found.batch),
            baseline: None,
        })
    }

    fn open(&self, file: &v1::FollowedFile) -> Result<SpanReader, RoleError> {
        let opened = Dataset::open(self.source.of_file(&file.name), self.schema.clone());
        let dataset = opened.map_err(|error| match error.is_absence() {
            true => lost(file, "is gone"),
            false => error.into(),
        })?;
        match dataset.listed_version().is_none_or(|version| version == file.version) {
            true => Ok(dataset.span_reader(self.ahead)),
            false => Err(lost(file, "has another version")),
        }
    }
}

fn lost(file: &v1::FollowedFile, problem: &str) -> RoleError {
    let reason = format!("{} {problem} now than when its rows were counted", file.name);
    RoleError::Task { what: "reading of a followed file", reason }
}

#[cfg(test)]
mod tests {
    use rectrain_data::PartId;

    use super::*;

    /// A plan that follows the `.csv` files of `folder`, with global batches of two rows.
    fn plan(folder: &std::path::Path) -> JobPlan {
        let manifest = format!(
            "{{apiVersion: rectrain.dev/v1alpha1, kind: RecTrainingJob, metadata: {{name: t}}, spec: {{model: {{kind: lr}},
             features: {{sparse: [{{name: user}}]}}, training: {{globalBatchSize: 2}},
             data: {{badRows: {{action: skip}}, train: {{follow: {{paths: ['{}/*.csv']}}}}}}}}}}",
            folder.display()
        );
        JobPlan::new(&rectrain_crds::load(&manifest, "t.yaml", &[]).unwrap().resolved).unwrap()
    }

    fn segment(from: u64, until: u64) -> Segment {
        Segment { part: PartId(7), from, until }
    }

    #[test]
    fn segments_are_good_rows_of_the_file_that_was_leased() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        std::fs::write(&path, "label,user\n1,a\n0,b\nx,c\n1,d\n").unwrap();
        let mut reader = FollowedReader::new(&plan(folder.path()), 1);
        let follow = plan(folder.path()).follow().unwrap().clone();
        let listed = rectrain_data::list_files(&follow, &std::collections::BTreeMap::new()).unwrap().remove(0);
        let file = v1::FollowedFile {
            part: 7,
            name: listed.name,
            version: listed.version,
            modified_millis: listed.modified_millis,
        };
        let labels = |content: Content| (content.rows.unwrap().label_sum(), content.skipped);
        assert_eq!(labels(reader.read(&file, segment(0, 2), 2).unwrap()), (1.0, 1));
        assert_eq!(labels(reader.read(&file, segment(2, 3), 2).unwrap()), (1.0, 0));
        // Another loader may have read the first rows.
        let mut other = FollowedReader::new(&plan(folder.path()), 1);
        assert_eq!(labels(other.read(&file, segment(2, 3), 2).unwrap()), (1.0, 0));
        let error = other.read(&file, segment(0, 1), 2).unwrap_err();
        assert!(error.to_string().contains("another number of rows") && !error.is_user_error(), "{error}");
        let changed = v1::FollowedFile { version: "modified:5".to_owned(), ..file.clone() };
        let error = other.read(&changed, segment(0, 2), 2).unwrap_err();
        assert!(error.to_string().contains("another version") && !error.is_user_error(), "{error}");
        std::fs::remove_file(&path).unwrap();
        let mut late = FollowedReader::new(&plan(folder.path()), 1);
        let error = late.read(&file, segment(0, 2), 2).unwrap_err();
        assert!(error.to_string().contains("is gone") && !error.is_user_error(), "{error}");
    }
}
