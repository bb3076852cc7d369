//! Names that nobody knows, and what they were meant to be.

/// The number of typing errors between two names: bytes inserted, deleted, replaced, or swapped
/// with their neighbour (optimal string alignment).
pub fn distance(from: &str, to: &str) -> usize {
    let (from, to) = (from.as_bytes(), to.as_bytes());
    let mut rows: Vec<Vec<usize>> = vec![(0..=to.len()).collect()];
    for i in 1..=from.len() {
        let mut row = vec![i];
        for j in 1..=to.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(from[i - 1] != to[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && from[i - 2..i] == [to[j - 1], to[j - 2]] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[from.len()][to.len()]
}

/// Names that people and programs use elsewhere for what has another name here.
const ALIASES: [(&str, &[&str]); 12] = [
    ("args", &["argv", "arguments"]),
    ("cmd", &["argv", "command", "cmdline"]),
    ("code", &["script"]),
    (
        "cwd",
        &[
            "directory",
            "work_dir",
            "workdir",
            "working_dir",
            "working_directory",
        ],
    ),
    ("env", &["env_vars", "environment", "envs"]),
    ("idle_timeout_secs", &["idle_timeout", "idle_timeout_ms"]),
    ("language", &["lang"]),
    ("max_cpu", &["cpu", "cpus", "max_cpus", "vcpus"]),
    ("max_procs", &["max_processes", "pids", "pids_limit"]),
    (
        "max_total_mem_mb",
        &[
            "max_memory",
            "max_memory_mb",
            "mem",
            "mem_mb",
            "max_total_memory",
            "max_total_memory_mb",
            "memory",
            "memory_mb",
        ],
    ),
    ("network", &["network_policy", "networking"]),
    (
        "timeout",
        &[
            "time_limit",
            "timeout_ms",
            "timeout_sec",
            "timeout_seconds",
            "timeout_secs",
        ],
    ),
];

/// The one of the known names that has this one elsewhere.
pub fn by_alias<'k>(name: &str, mut known: impl Iterator<Item = &'k str>) -> Option<&'k str> {
    known.find(|known| {
        let mut of = ALIASES.iter().filter(|(own, _)| own == known);
        of.any(|(_, aliases)| aliases.contains(&name))
    })
}

/// The one of the known names that this one is nearly.
pub fn by_spelling<'k>(name: &str, mut known: impl Iterator<Item = &'k str>) -> Option<&'k str> {
    let most = match name.len() {
        5..8 => 1,
        8..=64 => 2,
        // Too short to be sure, or longer than any field.
        _ => return None,
    };
    // Names of other lengths are further away; a body may have many.
    known.find(|known| name.len().abs_diff(known.len()) <= most && distance(name, known) <= most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_meant_is_an_alias_or_nearly_the_name() {
        const KNOWN: [&str; 7] = [
            "cmd",
            "env",
            "timeout",
            "max_total_mem_mb",
            "max_procs",
            "network",
            "cwd",
        ];
        for (name, expected) in [
            ("command", Some("cmd")),
            ("environment", Some("env")),
            ("timeout_ms", Some("timeout")),
            ("max_memory_mb", Some("max_total_mem_mb")),
            ("network_policy", Some("network")),
            ("tiemout", Some("timeout")),
            ("timeouts", Some("timeout")),
            ("max_proc", Some("max_procs")),
            ("maxprocs", Some("max_procs")),
            ("max_total_memory_mb", Some("max_total_mem_mb")),
            ("networks", Some("network")),
            // Too short to be sure.
            ("cmds", None),
            ("envs", Some("env")),
            ("user", None),
            ("label", None),
            ("code_interpreter_template", None),
            ("", None),
        ] {
            let found = by_alias(name, KNOWN.into_iter()).or(by_spelling(name, KNOWN.into_iter()));
            assert_eq!(found, expected, "{name}");
        }
        assert_eq!(by_alias("command", ["code"].into_iter()), None);
        let long = "n".repeat(1 << 20);
        assert_eq!(by_spelling(&long, KNOWN.into_iter()), None);
    }

    #[test]
    fn distances_count_typing_errors() {
        for (from, to, edits) in [
            ("", "abc", 3),
            ("abc", "", 3),
            ("kitten", "sitting", 3),
            ("ab", "ba", 1),
        ] {
            assert_eq!(distance(from, to), edits, "{from} {to}");
        }
    }
}
