//! Files of the Container Device Interface: what the operator's machine gives to a sandbox that asks for a device by name
//! (SPEC.md of <https://github.com/cncf-tags/container-device-interface>).
//!
//! They are read anew for each request, because drivers write them while the machine runs. Only nodes, mounts and variables
//! are taken from them. Hooks are programs that a container engine runs as root of the machine: none is run here.

use std::fs::File;
use std::io::Read;
use std::ops::RangeInclusive;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::codec::fields::{Elements, Fields, decoded, strings};
use crate::error::{Error, Kind, Result};

/// Longer files are refused.
const MAX_BYTES: u64 = 8 << 20;

/// Most names that an error lists.
const MAX_LISTED: usize = 16;

/// What a sandbox gets for its devices. Paths are the sandbox's, then the machine's.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Edits {
    pub(super) nodes: Vec<(String, String)>,
    pub(super) mounts: Vec<(String, String)>,
    pub(super) environment: Vec<(String, String)>,
}

impl Edits {
    fn add(&mut self, other: &Self) {
        self.nodes.extend_from_slice(&other.nodes);
        self.mounts.extend_from_slice(&other.mounts);
        self.environment.extend_from_slice(&other.environment);
    }
}

/// A device that is asked for.
struct Device {
    name: String,
    /// Number of the directory, and of the file: of those that have such devices.
    directory: usize,
    file: usize,
    edits: Edits,
    /// Whether another file of the directory has it too.
    is_ambiguous: bool,
}

/// What was found in all files.
#[derive(Default)]
struct Found {
    devices: Vec<Device>,
    /// What files add for each of their devices.
    files: Vec<Edits>,
    /// Names of other devices.
    others: Vec<String>,
    /// What may be the reason that a device is missing.
    notes: Vec<String>,
}

/// What these devices add to a sandbox. Of a name in two directories the later one counts. Files that belong to one of the
/// `users` are not read.
///
/// # Errors
/// `Invalid` if there is no such device, or two files of a directory have it; the text says why it may be missing.
pub(super) fn find(
    names: &[String],
    directories: &[PathBuf],
    users: &RangeInclusive<u32>,
) -> Result<Edits> {
    let mut found = Found::default();
    for (number, directory) in directories.iter().enumerate() {
        // What is not there has no devices.
        let entries = std::fs::read_dir(directory).into_iter().flatten();
        for path in entries.flatten().map(|entry| entry.path()) {
            let read = match path.extension().and_then(|extension| extension.to_str()) {
                Some("json") => {
                    read(&path, users).and_then(|text| found.look(&text, number, names))
                }
                Some("yaml" | "yml") => Err(Error::invalid(
                    "YAML is not read; write JSON, for NVIDIA by \
                     nvidia-ctk cdi generate --format=json --output=/etc/cdi/nvidia.json",
                )),
                _ => Ok(()),
            };
            if let Err(error) = read {
                found.notes.push(format!("{}: {error}", path.display()));
            }
        }
    }
    let mut edits = Edits::default();
    let mut seen = Vec::new();
    for name in names {
        let device = found.devices.iter().find(|device| device.name == *name);
        let device = device.ok_or_else(|| found.missing(name, directories))?;
        if device.is_ambiguous {
            let directory = directories[device.directory].display();
            let text = format!("two files in {directory} have the device {name}");
            return Err(Error::invalid(text));
        }
        if !seen.contains(&device.file) {
            seen.push(device.file);
            edits.add(&found.files[device.file]);
        }
        edits.add(&device.edits);
    }
    Ok(edits)
}

fn read(path: &Path, users: &RangeInclusive<u32>) -> Result<Vec<u8>> {
    let failed = |error| Error::io("cannot read it", &error);
    // Nobody waits for whoever would write into a pipe.
    let mut options = File::options();
    let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.map_err(failed)?;
    let status = file.metadata().map_err(failed)?;
    if !status.is_file() || users.contains(&status.uid()) {
        return Err(Error::invalid("it is no file, or one of a sandbox"));
    }
    let mut text = Vec::new();
    file.take(MAX_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(failed)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(Error::invalid("it has more than 8 MiB"));
    }
    Ok(text)
}

impl Found {
    /// Takes from a file what is asked for.
    fn look(&mut self, text: &[u8], directory: usize, names: &[String]) -> Result<()> {
        let mut fields = Fields::parse(text)?;
        let version = fields.required_string("cdiVersion")?;
        if !version.starts_with("0.") && !version.starts_with("1.") {
            let text = format!("cdiVersion is {version:?}; it takes 0.x and 1.x");
            return Err(Error::invalid(text));
        }
        let kind = fields.required_string("kind")?;
        let mut of_file = None;
        for mut device in objects(&mut fields, "devices")? {
            let name = format!("{kind}={}", device.required_string("name")?);
            if !names.contains(&name) {
                if self.others.len() < MAX_LISTED {
                    self.others.push(name);
                }
                continue;
            }
            let edits = edits(&mut device)?;
            let file = if let Some(file) = of_file {
                file
            } else {
                self.files.push(self::edits(&mut fields)?);
                self.files.len() - 1
            };
            of_file = Some(file);
            let mut known = self.devices.iter_mut();
            let known = known.find(|known| known.name == name);
            if let Some(known) = known.filter(|known| known.directory == directory) {
                known.is_ambiguous = true;
                continue;
            }
            self.devices.retain(|known| known.name != name);
            self.devices.push(Device {
                name,
                directory,
                file,
                edits,
                is_ambiguous: false,
            });
        }
        Ok(())
    }

    fn missing(&self, name: &str, directories: &[PathBuf]) -> Error {
        let shown = |path: &PathBuf| path.display().to_string();
        let places: Vec<_> = directories.iter().map(shown).collect();
        let mut parts = vec![format!(
            "there is no device {name} in the JSON files of {}",
            places.join(", ")
        )];
        if !self.others.is_empty() {
            parts.push(format!("there are {}", self.others.join(", ")));
        }
        parts.extend(self.notes.iter().take(MAX_LISTED).cloned());
        Error::new(Kind::Invalid, parts.join("; "))
    }
}

/// The objects of an array; none if it is absent.
fn objects<'a>(fields: &mut Fields<'a>, name: &'static str) -> Result<Vec<Fields<'a>>> {
    let Some(array) = fields.take(name) else {
        return Ok(Vec::new());
    };
    let elements = decoded::<Elements<'_>>(name, array)?.0.into_iter();
    elements
        .map(|element| Fields::parse(element.get().as_bytes()))
        .collect()
}

/// The `containerEdits` of a device, or of a file.
fn edits(fields: &mut Fields<'_>) -> Result<Edits> {
    let mut edits = Edits::default();
    let Some(object) = fields.take("containerEdits") else {
        return Ok(edits);
    };
    let mut fields = Fields::parse(object.get().as_bytes())?;
    for mut node in objects(&mut fields, "deviceNodes")? {
        let path = node.required_string("path")?;
        let source = node.string("hostPath")?.filter(|source| !source.is_empty());
        let permissions = node.string("permissions")?.unwrap_or_default();
        // Without them it is readable and writable.
        if !permissions.is_empty() && !['r', 'w'].iter().all(|one| permissions.contains(*one)) {
            let text = format!("{path} has the permissions {permissions:?}; it takes rw and rwm");
            return Err(Error::invalid(text));
        }
        let source = source.unwrap_or_else(|| path.clone());
        edits.nodes.push((path, source));
    }
    for mut mount in objects(&mut fields, "mounts")? {
        let target = mount.required_string("containerPath")?;
        let source = mount.required_string("hostPath")?;
        let kind = mount.string("type")?.unwrap_or_default();
        if !["", "none", "bind"].contains(&kind.as_str()) {
            let text = format!("{target} is a mount of type {kind:?}; it takes bind");
            return Err(Error::invalid(text));
        }
        edits.mounts.push((target, source));
    }
    if let Some(array) = fields.take("env") {
        for variable in strings("env", "an array of NAME=value", array)? {
            match variable.split_once('=') {
                Some((name, value)) if !name.is_empty() => {
                    edits.environment.push((name.to_owned(), value.to_owned()));
                }
                _ => return Err(Error::invalid("env takes NAME=value")),
            }
        }
    }
    Ok(edits)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Directories with files, which go with the value.
    struct Directories(PathBuf);

    impl Directories {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let path = std::env::temp_dir().join(format!("sbx-cdi-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            for directory in ["one", "two"] {
                std::fs::create_dir_all(path.join(directory)).unwrap();
            }
            for (name, text) in files {
                std::fs::write(path.join(name), text).unwrap();
            }
            Self(path)
        }

        fn find(&self, names: &[&str]) -> Result<Edits> {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            let directories = ["one", "two", "none"].map(|name| self.0.join(name));
            find(&names, &directories, &(70_000..=70_001))
        }

        fn refused(&self, name: &str) -> String {
            let error = self.find(&[name]).unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid, "{error}");
            error.to_string()
        }
    }

    impl Drop for Directories {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn pair(one: &str, other: &str) -> (String, String) {
        (one.to_owned(), other.to_owned())
    }

    /// What `nvidia-ctk cdi generate` writes, shortened.
    const NVIDIA: &str = r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[
        {"name":"0","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia0","major":195,"fileMode":438,"uid":0}]}},
        {"name":"all","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia0"},{"path":"/dev/nvidia1","hostPath":"/dev/x","permissions":"rwm"}]}}],
        "containerEdits":{"env":["NVIDIA_VISIBLE_DEVICES=void","EMPTY="],
        "deviceNodes":[{"path":"/dev/nvidiactl","hostPath":""}],
        "hooks":[{"hookName":"createContainer","path":"/usr/bin/nvidia-cdi-hook","args":["nvidia-cdi-hook","update-ldcache"]}],
        "mounts":[{"hostPath":"/usr/lib/libcuda.so.1","containerPath":"/usr/lib/x/libcuda.so.1","options":["ro","nosuid","nodev","bind"]}]}}"#;

    #[test]
    fn devices_add_what_their_files_say() {
        let all = Directories::new(
            "add",
            &[("one/nvidia.json", NVIDIA), ("one/other.txt", "{")],
        );
        let edits = all
            .find(&["nvidia.com/gpu=all", "nvidia.com/gpu=0"])
            .unwrap();
        let expected = Edits {
            nodes: vec![
                pair("/dev/nvidiactl", "/dev/nvidiactl"),
                pair("/dev/nvidia0", "/dev/nvidia0"),
                pair("/dev/nvidia1", "/dev/x"),
                pair("/dev/nvidia0", "/dev/nvidia0"),
            ],
            mounts: vec![pair("/usr/lib/x/libcuda.so.1", "/usr/lib/libcuda.so.1")],
            environment: vec![pair("NVIDIA_VISIBLE_DEVICES", "void"), pair("EMPTY", "")],
        };
        assert_eq!(edits, expected);
        let text = all.refused("nvidia.com/gpu=7");
        for part in ["nvidia.com/gpu=7", "one", "nvidia.com/gpu=all"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn the_later_directory_counts_and_two_files_of_one_contradict_each_other() {
        let file = |path: &str| {
            format!(
                r#"{{"cdiVersion":"1.0.0","kind":"a.b/c","devices":[{{"name":"d","containerEdits":{{"deviceNodes":[{{"path":"{path}"}}]}}}}]}}"#
            )
        };
        let (one, two) = (file("/dev/one"), file("/dev/two"));
        let nodes = |files: &[(&str, &str)]| {
            let all = Directories::new("order", files);
            all.find(&["a.b/c=d"]).map(|edits| edits.nodes)
        };
        let later = vec![pair("/dev/two", "/dev/two")];
        assert_eq!(
            nodes(&[("one/x.json", &one), ("two/a.json", &two)]).unwrap(),
            later
        );
        let doubled = [("one/x.json", &*one), ("one/y.json", &two)];
        let text = nodes(&doubled).unwrap_err().to_string();
        assert!(text.contains("two files"), "{text}");
        // What a later directory says is not in doubt.
        let settled = [doubled[0], doubled[1], ("two/a.json", &two)];
        assert_eq!(nodes(&settled).unwrap(), later);
    }

    #[test]
    fn a_file_that_cannot_be_used_is_named() {
        let device = |rest: &str| {
            format!(r#"{{"cdiVersion":"0.6.0","kind":"a.b/c","devices":[{{"name":"d",{rest}}}]}}"#)
        };
        let edits = |edits: &str| device(&format!(r#""containerEdits":{{{edits}}}"#));
        for (text, part) in [
            (String::new(), "JSON"),
            ("[]".to_owned(), "JSON object"),
            (r#"{"kind":"a.b/c"}"#.to_owned(), "cdiVersion"),
            (
                r#"{"cdiVersion":"2.0.0","kind":"a.b/c"}"#.to_owned(),
                "2.0.0",
            ),
            (edits(r#""deviceNodes":[{}]"#), "path"),
            (
                edits(r#""deviceNodes":[{"path":"/dev/x","permissions":"r"}]"#),
                "permissions",
            ),
            (edits(r#""mounts":[{"hostPath":"/x"}]"#), "containerPath"),
            (
                edits(r#""mounts":[{"hostPath":"x","containerPath":"/x","type":"tmpfs"}]"#),
                "tmpfs",
            ),
            (edits(r#""env":["=x"]"#), "NAME=value"),
            (edits(r#""env":[5]"#), "env"),
            (" ".repeat(8 << 20) + &device(r#""x":1"#), "8 MiB"),
        ] {
            let all = Directories::new("broken", &[("one/broken.json", &text)]);
            let refused = all.refused("a.b/c=d");
            assert!(
                refused.contains("broken.json") && refused.contains(part),
                "{refused}"
            );
        }
        let all = Directories::new("yaml", &[("two/nvidia.yaml", "cdiVersion: 0.5.0")]);
        let refused = all.refused("nvidia.com/gpu=all");
        assert!(
            refused.contains("nvidia-ctk cdi generate --format=json"),
            "{refused}"
        );
        std::fs::create_dir(all.0.join("one/directory.json")).unwrap();
        nix::unistd::mkfifo(&all.0.join("one/pipe.json"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let refused = all.refused("nvidia.com/gpu=all");
        assert!(
            refused.contains("pipe.json") && refused.contains("directory.json"),
            "{refused}"
        );
        // What is broken is no matter to a device of another file.
        std::fs::write(all.0.join("two/good.json"), device(r#""x":1"#)).unwrap();
        assert_eq!(all.find(&["a.b/c=d"]).unwrap(), Edits::default());
    }
}
