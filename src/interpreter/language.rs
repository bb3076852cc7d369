//! What each language's contexts have: back ends, bridges, and the form of their messages.

use super::frame::Wire;
use crate::spec::language::{Language, script};

impl Language {
    /// The back ends that a context of it can have, besides `auto`.
    pub fn backends(self) -> &'static [&'static str] {
        match self {
            Self::Python => &["plain", "ipython", "jupyter:KERNEL"],
            Self::JavaScript => &["node"],
            Self::Bash => &["bash"],
        }
    }

    pub(super) fn wire(self) -> Wire {
        match self {
            Self::Python | Self::JavaScript => Wire::Frames,
            Self::Bash => Wire::Lines,
        }
    }

    /// The script that the program gets as an argument, and the bridge that the script reads.
    pub(super) fn scripts(self) -> (&'static str, &'static str) {
        match self {
            Self::Python => (script("start_python.py"), script("python.py")),
            Self::JavaScript => (script("start_node.js"), script("node.js")),
            Self::Bash => (script("start_bash.sh"), script("bash.sh")),
        }
    }

    /// Sources that a bridge executes when it needs them.
    pub(super) fn modules(self, backend: &str) -> Vec<(&'static str, &'static str)> {
        match self {
            Self::Python if backend.starts_with("jupyter:") => {
                vec![("jupyter", script("jupyter.py"))]
            }
            Self::Python => vec![
                ("ipython", script("ipython.py")),
                ("figures", script("figures.py")),
                ("display", script("display.py")),
                ("charts", script("charts.py")),
            ],
            Self::JavaScript | Self::Bash => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_script_is_there() {
        for language in Language::ALL {
            let (start, bridge) = language.scripts();
            assert!(!start.is_empty() && !bridge.is_empty());
            for backend in language.backends() {
                let modules = language.modules(backend);
                assert!(modules.iter().all(|(_, source)| !source.is_empty()));
            }
        }
    }
}
