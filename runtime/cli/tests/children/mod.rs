//! The processes of a run.

/// The process ids and the first arguments of the processes that `parent` started.
pub fn children_of(parent: u32) -> Vec<(u32, String)> {
    let mut children = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let parent_of = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)?.parse::<u32>().ok());
        if parent_of == Some(parent)
            && let Ok(line) = std::fs::read(entry.path().join("cmdline"))
        {
            let role = line.split(|byte| *byte == 0).nth(1).unwrap_or_default();
            children.push((process, String::from_utf8_lossy(role).into_owned()));
        }
    }
    children
}
