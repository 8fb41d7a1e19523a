//! The memory that this process may still use below the limit of its control group. In a cluster
//! that is the limit of its container.

use std::path::Path;

/// The files of a control group of version 2, and of version 1: the limit and the bytes in use.
const FILES: [[&str; 3]; 2] = [
    ["memory.max", "memory.current", "memory.stat"],
    ["memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"],
];
/// A limit of at least this many bytes is none: version 1 has a number even without a limit.
const NO_LIMIT: u64 = 1 << 60;

/// Bytes below the limit, without the page cache that the kernel drops first. `None` without a
/// limit.
pub(crate) fn memory_room() -> Option<u64> {
    let read = |file: &str| std::fs::read_to_string(Path::new("/sys/fs/cgroup").join(file)).ok();
    FILES.iter().find_map(|[limit, used, stat]| room(&read(limit)?, &read(used)?, &read(stat)?))
}

fn room(limit: &str, used: &str, stat: &str) -> Option<u64> {
    let limit: u64 = limit.trim().parse().ok().filter(|limit| *limit < NO_LIMIT)?;
    let used: u64 = used.trim().parse().ok()?;
    let cache = ["total_inactive_file", "inactive_file"].iter().find_map(|name| number(stat, name)).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cache)))
}

/// The number after a name, in lines of a name and a number.
fn number(stat: &str, name: &str) -> Option<u64> {
    let mut fields = stat.lines().filter_map(|line| line.split_once(' '));
    fields.find(|(field, _)| *field == name)?.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::room;

    #[test]
    fn the_room_excludes_what_the_kernel_can_drop() {
        let stat = "anon 700\ninactive_file 50\nactive_file 7\n";
        assert_eq!(room("1000\n", "800\n", stat), Some(250));
        assert_eq!(room("1000", "800", "cache 9\ninactive_file 1\ntotal_inactive_file 100\n"), Some(300));
        assert_eq!(room("1000", "1200", ""), Some(0), "beyond the limit");
    }

    #[test]
    fn without_a_limit_there_is_no_room_to_measure() {
        assert_eq!(room("max\n", "800", ""), None);
        assert_eq!(room("9223372036854771712", "800", ""), None);
        assert_eq!(room("1000", "?", ""), None);
    }
}
