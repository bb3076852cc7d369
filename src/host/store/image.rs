//! Images of containers: what `docker save` writes, and image layouts of the Open Container Initiative.
//!
//! One comes as an archive, which is unpacked like that of a root. What it has then tells that it is an image: its parts may
//! be in any order, and each may be a link to another one. So nothing of it is trusted, and paths lead nowhere but in it.

use serde_json::value::RawValue;

use super::record::RootSettings;
use crate::codec::fields::{Elements, Fields, JsonType, decoded, missing, strings};
use crate::error::{Error, Kind, Result};
use crate::files::hash::{Digest, Hasher};
use crate::files::name::FilePath;
use crate::files::{Files, Layer, Opened};
use crate::spec::command::{EnvironmentChange, check_environment, environment_bytes};

/// Most bytes of a document of an image.
const MAX_DOCUMENT_BYTES: u64 = 2 << 20;

/// Most layers of an image. Docker makes at most 127.
const MAX_LAYERS: usize = 256;

/// Most bytes of the environment in an image: each command has it.
const MAX_ENVIRONMENT_BYTES: usize = 64 << 10;

/// Longest name of a user, and of a directory.
const MAX_USER: usize = 256;
const MAX_DIRECTORY: usize = 4095;

/// How many indexes lead one to another at most.
const MAX_INDEXES: usize = 4;

/// What only roots of machines have at their top.
const OF_ROOTS: [&str; 3] = ["bin", "etc", "usr"];

/// An image in a tree.
pub(super) struct Image {
    layers: Vec<Part>,
    pub(super) settings: RootSettings,
}

/// A file of an image.
#[derive(Clone)]
struct Part {
    path: String,
    /// Its SHA-256 and its bytes, as far as the image says them.
    stored: Option<Digest>,
    size: Option<u64>,
    /// The SHA-256 of what it is compressed from.
    plain: Option<Digest>,
}

/// What a document says of a part of an image.
struct Descriptor<'d> {
    part: Part,
    fields: Fields<'d>,
}

impl Image {
    /// The image that is unpacked in a tree; `None` if that is the root of a machine.
    ///
    /// # Errors
    /// `BadArchive` if the image is broken; `Invalid` if it is none for this machine, or there are several.
    pub(super) fn find(files: &Files<'_>) -> Result<Option<Self>> {
        if OF_ROOTS.iter().any(|name| has(files, name)) {
            return Ok(None);
        }
        let found = if has(files, "oci-layout") && has(files, "index.json") {
            Self::of_layout(files)
        } else if has(files, "manifest.json") {
            Self::of_docker(files)
        } else {
            return Ok(None);
        };
        found.map(Some).map_err(|error| match error.kind() {
            Kind::NoSpace | Kind::OverLimit | Kind::Unsupported => error,
            _ => Error::new(Kind::BadArchive, format!("cannot use the image: {error}")),
        })
    }

    /// An image layout.
    fn of_layout(files: &Files<'_>) -> Result<Self> {
        let mut part = Part::at("index.json");
        for _ in 0..MAX_INDEXES {
            let text = part.read(files)?;
            let mut fields = Fields::parse(&text)?;
            if let Some(list) = fields.take("manifests") {
                part = choose(list)?;
                continue;
            }
            let config = fields.required("config", "an object")?;
            let config = Descriptor::parse(config)?.part.read(files)?;
            let list = fields.required("layers", "an array")?;
            let layers = elements("layers", list)?.into_iter();
            let layers = layers.map(|layer| Ok(Descriptor::parse(layer)?.part));
            return Self::with_config(layers.collect::<Result<_>>()?, &config);
        }
        Err(Error::invalid("an index leads to an index too often"))
    }

    /// What `docker save` writes.
    fn of_docker(files: &Files<'_>) -> Result<Self> {
        let text = Part::at("manifest.json").read(files)?;
        // A list, and documents are objects.
        let text = [b"{\"images\":", &*text, b"}"].concat();
        let list = Fields::parse(&text)?.required("images", "an array")?;
        let mut images = elements("manifest.json", list)?;
        let image = images.pop().ok_or_else(|| not_one("no"))?;
        if !images.is_empty() {
            return Err(not_one("several"));
        }
        let mut image = Fields::parse(image.get().as_bytes())?;
        let mut config = Part::at(&image.required_string("Config")?);
        // Most programs name it by its digest.
        let name = config.path.rsplit(['/', ':']).next().unwrap_or_default();
        config.stored = Digest::parse(name.trim_end_matches(".json"));
        let config = config.read(files)?;
        let layers = image.required("Layers", "an array")?;
        let layers = strings("Layers", "an array of names", layers)?;
        Self::with_config(layers.iter().map(|path| Part::at(path)).collect(), &config)
    }

    /// Adds what the configuration says of these layers.
    fn with_config(mut layers: Vec<Part>, config: &[u8]) -> Result<Self> {
        let mut fields = Fields::parse(config)?;
        let mut rootfs = inner(&mut fields, "rootfs")?;
        let digests = rootfs.required("diff_ids", "an array")?;
        let digests = strings("diff_ids", "an array of digests", digests)?;
        if digests.len() != layers.len() || layers.len() > MAX_LAYERS {
            let (count, described) = (layers.len(), digests.len());
            let text = format_args!(
                "it has {count} layers, and its configuration says {described}; it takes up to {MAX_LAYERS}"
            );
            return Err(Error::invalid(text));
        }
        for (layer, digest) in layers.iter_mut().zip(&digests) {
            layer.plain = Some(sha256(digest)?);
        }
        let settings = match fields.take("config") {
            Some(config) => settings(&mut Fields::parse(config.get().as_bytes())?)?,
            None => RootSettings::default(),
        };
        Ok(Self { layers, settings })
    }

    /// Opens the layers one after another, the lowest first.
    pub(super) fn layers(&self, files: &Files<'_>) -> impl Iterator<Item = Result<Layer>> {
        self.layers.iter().map(move |part| {
            let Opened { file, .. } = part.open(files)?;
            let (stored, plain) = (part.stored, part.plain);
            Ok(Layer {
                file,
                stored,
                plain,
            })
        })
    }
}

impl Part {
    fn at(path: &str) -> Self {
        Self {
            path: path.to_owned(),
            stored: None,
            size: None,
            plain: None,
        }
    }

    fn open(&self, files: &Files<'_>) -> Result<Opened> {
        let broken = |why: String| {
            let text = format!("the image is broken: {}: {why}", self.path);
            Error::new(Kind::BadArchive, text)
        };
        let path = FilePath::new(format!("/{}", self.path).as_bytes());
        let opened = path.and_then(|path| files.open(&path, false));
        let opened = opened.map_err(|error| broken(error.to_string()))?;
        match self.size {
            Some(size) if size != opened.size => {
                let found = opened.size;
                Err(broken(format!(
                    "it has {found} bytes, and should have {size}"
                )))
            }
            _ => Ok(opened),
        }
    }

    /// Reads a document.
    fn read(&self, files: &Files<'_>) -> Result<Vec<u8>> {
        let opened = self.open(files)?;
        if opened.size > MAX_DOCUMENT_BYTES {
            let text = format!("{} has more than {MAX_DOCUMENT_BYTES} bytes", self.path);
            return Err(Error::new(Kind::BadArchive, text));
        }
        let mut text = Vec::new();
        std::io::copy(&mut &opened.file, &mut text)
            .map_err(|error| Error::io("cannot read an image", &error))?;
        let mut hasher = Hasher::default();
        hasher.feed(&text);
        match (self.stored, hasher.finish()) {
            (Some(expected), found) if expected != found => {
                let text = format!("{} has the SHA-256 {found}", self.path);
                Err(Error::new(Kind::BadArchive, text))
            }
            _ => Ok(text),
        }
    }
}

impl<'d> Descriptor<'d> {
    fn parse(document: &'d RawValue) -> Result<Self> {
        let mut fields = Fields::parse(document.get().as_bytes())?;
        let digest = sha256(&fields.required_string("digest")?)?;
        let size = fields.whole("size", 0..=u64::MAX)?;
        let part = Part {
            path: format!("blobs/sha256/{digest}"),
            stored: Some(digest),
            size: Some(size.ok_or_else(|| missing("size", "a number"))?),
            plain: None,
        };
        Ok(Self { part, fields })
    }

    /// Whether it is an image for this machine.
    fn is_for_this_machine(&mut self) -> Result<bool> {
        let Some(platform) = self.fields.take("platform") else {
            return Ok(true);
        };
        let mut platform = Fields::parse(platform.get().as_bytes())?;
        let own = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        // What vouches for an image has a platform of its own, "unknown".
        Ok(platform.string("os")?.as_deref() == Some("linux")
            && platform.string("architecture")?.as_deref() == Some(own))
    }
}

/// The image of a list that is for this machine.
fn choose(list: &RawValue) -> Result<Part> {
    let mut found: Option<Part> = None;
    for image in elements("manifests", list)? {
        let mut image = Descriptor::parse(image)?;
        // Several names may be those of one image.
        let is_known = |known: &Part| known.path == image.part.path;
        if found.as_ref().is_some_and(is_known) || !image.is_for_this_machine()? {
            continue;
        }
        if found.is_some() {
            return Err(not_one("several"));
        }
        found = Some(image.part);
    }
    found.ok_or_else(|| not_one("no"))
}

fn not_one(count: &str) -> Error {
    Error::invalid(format_args!(
        "there are {count} images for this machine in it, and one is needed"
    ))
}

/// What the commands of an image have.
fn settings(config: &mut Fields<'_>) -> Result<RootSettings> {
    let list = config.take("Env");
    let list = list.map(|list| strings("Env", "an array of NAME=VALUE", list));
    let list = list.transpose()?.unwrap_or_default();
    let all = list.iter().filter_map(|variable| {
        let (name, value) = variable.split_once('=')?;
        Some((name.to_owned(), Some(value.to_owned())))
    });
    let all: Vec<EnvironmentChange> = all.collect();
    // First: what follows takes time by the square of their number.
    if environment_bytes(&all) > MAX_ENVIRONMENT_BYTES {
        let text = format_args!("Env has more than {MAX_ENVIRONMENT_BYTES} bytes");
        return Err(Error::invalid(text));
    }
    check_environment(&all)?;
    let mut environment: Vec<EnvironmentChange> = Vec::new();
    for change in all {
        environment.retain(|(known, _)| *known != change.0);
        environment.push(change);
    }
    let mut text = |name, most| {
        let text = config.string(name)?.filter(|text| !text.is_empty());
        match text {
            Some(text) if text.len() > most || text.contains('\0') => {
                Err(Error::invalid(format_args!("{name} is too long")))
            }
            text => Ok(text),
        }
    };
    let directory = text("WorkingDir", MAX_DIRECTORY)?;
    // A group may follow: what a user is in is in the files of the image.
    let user = text("User", MAX_USER)?.map(|user| match user.split_once(':') {
        Some((user, _)) => user.to_owned(),
        None => user,
    });
    Ok(RootSettings {
        environment,
        directory,
        user: user.filter(|user| !user.is_empty()),
    })
}

fn has(files: &Files<'_>, name: &str) -> bool {
    let path = FilePath::new(format!("/{name}").as_bytes());
    path.is_ok_and(|path| files.stat(&path).is_ok())
}

fn sha256(digest: &str) -> Result<Digest> {
    let digits = digest.strip_prefix("sha256:");
    digits.and_then(Digest::parse).ok_or_else(|| {
        let text = format_args!("{digest:.80?} is no digest; it takes sha256 and 64 digits");
        Error::invalid(text)
    })
}

fn inner<'d>(fields: &mut Fields<'d>, name: &'static str) -> Result<Fields<'d>> {
    let object = fields.required(name, "an object")?;
    Fields::parse(object.get().as_bytes())
}

fn elements<'d>(name: &'static str, list: &'d RawValue) -> Result<Vec<&'d RawValue>> {
    if JsonType::of(list) != JsonType::Array {
        return Err(missing(name, "an array"));
    }
    Ok(decoded::<Elements<'_>>(name, list)?.0)
}
