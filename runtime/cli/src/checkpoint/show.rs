//! Shows checkpoints as tables and as JSON.

use comfy_table::{CellAlignment, Table, presets};
use rectrain_checkpoint::{Checkpoint, FileContent, Listed, ListedState};
use serde_json::json;

use crate::human::{bytes, moment, thousands};
use crate::output::{self, OutputError};

pub(super) fn table(listed: &[Listed]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(["NAME", "STEP", "KIND", "ROWS", "SIZE", "CREATED", "STATE"]);
    for one in listed {
        let (rows, size, created, state) = match &one.state {
            ListedState::Complete(manifest) => {
                (thousands(manifest.rows), bytes(manifest.bytes()), moment(&manifest.created_at), "complete".to_owned())
            }
            ListedState::Unfinished => (String::new(), String::new(), String::new(), "unfinished".to_owned()),
            ListedState::Refused(error) => (String::new(), String::new(), String::new(), format!("bad: {error}")),
        };
        table.add_row([one.name.clone(), thousands(one.step), one.kind.to_string(), rows, size, created, state]);
    }
    for column in [1, 3, 4] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

pub(super) fn json(listed: &Listed) -> serde_json::Value {
    let mut line = json!({ "name": listed.name, "step": listed.step, "kind": listed.kind });
    match &listed.state {
        ListedState::Complete(manifest) => {
            line["state"] = json!("complete");
            line["rows"] = json!(manifest.rows);
            line["removed"] = json!(manifest.removed);
            line["bytes"] = json!(manifest.bytes());
            line["createdAt"] = json!(manifest.created_at);
            line["id"] = json!(manifest.id);
        }
        ListedState::Unfinished => line["state"] = json!("unfinished"),
        ListedState::Refused(error) => {
            line["state"] = json!("bad");
            line["reason"] = json!(error.to_string());
        }
    }
    line
}

/// Prints a checkpoint's properties, files and identity for a person.
pub(super) fn inspect(checkpoint: &Checkpoint, verbose: bool) -> Result<(), OutputError> {
    let manifest = checkpoint.manifest();
    let mut about = Table::new();
    about.load_preset(presets::NOTHING);
    let mut row = |name: &str, value: String| {
        about.add_row([name.to_owned(), value]);
    };
    row("checkpoint", checkpoint.name());
    row("id", manifest.id.to_string());
    row("step", thousands(manifest.step));
    row("kind", manifest.kind.to_string());
    for base in checkpoint.chain().iter().rev().skip(1) {
        row("starts from", base.directory());
    }
    row("created", format!("{} by {}", moment(&manifest.created_at), manifest.written_by));
    for (name, value) in &manifest.info {
        row(name, value.as_str().map_or_else(|| value.to_string(), str::to_owned));
    }
    row("slots", thousands(u64::from(manifest.slots)));
    row("rows", thousands(manifest.rows));
    if manifest.base.is_some() {
        row("removed rows", thousands(manifest.removed));
    }
    row("size", bytes(manifest.bytes()));
    output::line(format_args!("{about}\n"))?;
    output::line(format_args!("{}\n", files(checkpoint)))?;
    for (name, section) in manifest.identity.sections() {
        let section = if verbose { format!("{section:#}") } else { section.to_string() };
        output::line(format_args!("{name}: {section}"))?;
    }
    Ok(())
}

fn files(checkpoint: &Checkpoint) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(["FILE", "SIZE", "XXH3", "CONTENT"]);
    for file in &checkpoint.manifest().files {
        let content = match &file.content {
            FileContent::Rows { slots, rows, removed, .. } => {
                let removed = if *removed > 0 { format!(", {} removed", thousands(*removed)) } else { String::new() };
                format!("{} rows{removed} in {} slots", thousands(*rows), thousands(slots.len()))
            }
            FileContent::Dense { offset, parameters, optimizer, update_count } => format!(
                "{} dense parameters from {}, {optimizer} after {} updates",
                thousands(*parameters),
                thousands(*offset),
                thousands(*update_count)
            ),
            FileContent::State { name } => format!("state of {name}"),
        };
        table.add_row([file.name.clone(), bytes(file.size), file.xxh3.to_string(), content]);
    }
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
