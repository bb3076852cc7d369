//! Images of containers: `docker save` and image layouts become the tree that their layers make, with what commands of the
//! image have; and one that lies is refused, whatever it lies about.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;

use serde_json::{Value, json};

use super::{
    Member, SNAPSHOTS, archive, check_tidy, file, id_of, listed, made, needs_store, put, send,
    store, with,
};
use crate::archives::{Tar, hostile::gzip};
use crate::faults::panics::{faulty_program, start};
use crate::fixture::{PATIENCE, Server, TempDir, assert_error, names_in, sha256, wait_until};
use crate::host::in_place_of;

/// What an image is made of.
#[derive(Clone)]
struct Image {
    layers: Vec<Vec<u8>>,
    /// What its layers are in the archive: compressed, or as they are.
    is_compressed: bool,
    /// The configuration of its commands.
    config: Value,
}

impl Image {
    fn new(layers: &[&[Member<'_>]]) -> Self {
        Self {
            layers: layers.iter().map(|members| archive(members)).collect(),
            is_compressed: false,
            config: json!({
                "Env": ["PATH=/bin:/own", "SECRET=a=b", "A=1", "A=2"],
                "WorkingDir": "/srv",
                "User": "www:www",
            }),
        }
    }

    fn stored(&self) -> Vec<Vec<u8>> {
        let layers = self.layers.iter();
        let store = |layer: &Vec<u8>| {
            if self.is_compressed {
                gzip(layer)
            } else {
                layer.clone()
            }
        };
        layers.map(store).collect()
    }

    fn configuration(&self) -> Vec<u8> {
        let digests: Vec<_> = self.layers.iter().map(|layer| digest(layer)).collect();
        let rootfs = json!({ "type": "layers", "diff_ids": digests });
        let own = json!({ "architecture": "any", "os": "linux", "config": self.config, "rootfs": rootfs });
        own.to_string().into_bytes()
    }

    /// The files of what `docker save` writes. The documents are the last ones, and a layer that comes twice is a link.
    fn docker(&self) -> Files {
        let mut files = Files::default();
        let mut names = Vec::new();
        for (number, layer) in self.stored().into_iter().enumerate() {
            let name = format!("{number:064x}/layer.tar");
            let known = files.0.iter().find(|(_, known)| **known == layer);
            let content = match known {
                Some((known, _)) => format!("-> ../{known}").into_bytes(),
                None => layer,
            };
            files.0.insert(name.clone(), content);
            names.push(name);
        }
        let config = self.configuration();
        let name = format!("{}.json", sha256(&config));
        let manifest = json!([{ "Config": name, "RepoTags": ["a:b"], "Layers": names }]);
        files.0.insert(name, config);
        files
            .0
            .insert("manifest.json".to_owned(), manifest.to_string().into());
        files
    }

    /// The files of an image layout.
    fn layout(&self) -> Files {
        let mut files = Files::default();
        let layers = self.stored();
        let layers: Vec<_> = layers.into_iter().map(|layer| files.blob(layer)).collect();
        let config = files.blob(self.configuration());
        let manifest = json!({ "schemaVersion": 2, "config": config, "layers": layers });
        let manifest = files.blob(manifest.to_string().into());
        files.index(&json!([manifest]));
        files.0.insert(
            "oci-layout".to_owned(),
            br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec(),
        );
        files
    }
}

/// What `docker save` writes of an image of one layer, with a configuration of its commands.
pub(crate) fn of_layer(layer: &[u8], config: &Value) -> Vec<u8> {
    let image = Image {
        layers: vec![layer.to_vec()],
        is_compressed: false,
        config: config.clone(),
    };
    image.docker().archive()
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", sha256(bytes))
}

/// The files of an image, by their paths. A content that begins with an arrow is a link.
#[derive(Clone, Default)]
struct Files(BTreeMap<String, Vec<u8>>);

impl Files {
    /// Adds a blob, and describes it.
    fn blob(&mut self, content: Vec<u8>) -> Value {
        let (digest, size) = (digest(&content), content.len());
        let path = format!("blobs/{}", digest.replace(':', "/"));
        self.0.insert(path, content);
        json!({ "mediaType": "any", "digest": digest, "size": size })
    }

    fn index(&mut self, manifests: &Value) {
        let index = json!({ "schemaVersion": 2, "manifests": manifests });
        self.0
            .insert("index.json".to_owned(), index.to_string().into());
    }

    fn read(&self, name: &str) -> Value {
        serde_json::from_slice(&self.0[name]).unwrap()
    }

    fn archive(&self) -> Vec<u8> {
        let members = self.0.iter().map(|(name, content)| {
            let target = content.strip_prefix(b"-> ");
            let target = target.map(|target| std::str::from_utf8(target).unwrap());
            Member {
                typeflag: if target.is_some() { b'2' } else { b'0' },
                link: target.unwrap_or_default(),
                ..file(name, if target.is_some() { b"" } else { content })
            }
        });
        archive(&members.collect::<Vec<_>>())
    }
}

fn directory(name: &str) -> Member<'_> {
    Member {
        typeflag: b'5',
        mode: 0o755,
        ..file(name, b"")
    }
}

fn link<'a>(name: &'a str, link: &'a str) -> Member<'a> {
    Member {
        typeflag: b'2',
        link,
        ..file(name, b"")
    }
}

/// What a snapshot has: the names, with the content of files.
fn tree_of(server: &Server, document: &Value) -> BTreeMap<String, String> {
    let root = store(server).join(id_of(document));
    let mut found = BTreeMap::new();
    let mut pending = vec![String::new()];
    while let Some(path) = pending.pop() {
        for name in names_in(root.join(&path)) {
            let path = format!("{path}{name}");
            let status = fs::symlink_metadata(root.join(&path)).unwrap();
            let content = if status.is_dir() {
                pending.push(format!("{path}/"));
                "/".to_owned()
            } else if status.is_symlink() {
                fs::read_link(root.join(&path))
                    .unwrap()
                    .display()
                    .to_string()
            } else {
                fs::read_to_string(root.join(&path)).unwrap()
            };
            found.insert(path, content);
        }
    }
    found
}

#[track_caller]
fn check_tree(server: &Server, document: &Value, expected: &[(&str, &str)]) {
    let expected = expected.iter();
    let expected = expected.map(|(name, content)| ((*name).to_owned(), (*content).to_owned()));
    assert_eq!(tree_of(server, document), expected.collect());
}

/// Layers that replace and hide what is below them in all ways.
fn changing() -> Image {
    Image::new(&[
        &[
            directory("kept/"),
            file("kept/a", b"1"),
            file("kept/b", b"1"),
            directory("cleared/"),
            file("cleared/old", b"1"),
            directory("cleared/below/"),
            file("cleared/below/old", b"1"),
            directory("gone/"),
            file("gone/a", b"1"),
            file("becomes-directory", b"1"),
            link("link", "kept"),
            directory("becomes-file/"),
            file("becomes-file/a", b"1"),
            // It hides nothing: nothing is below it.
            file("kept/.wh.b", b""),
        ],
        &[
            file("cleared/new", b"2"),
            // Whiteouts mean what is below, wherever they are.
            file("cleared/.wh..wh..opq", b""),
            file("kept/.wh.a", b""),
            file("kept/c", b"2"),
            file(".wh.gone", b""),
            file(".wh.never", b""),
            file("never/.wh.a", b""),
            file("link/.wh.b", b""),
            file("becomes-directory/a", b"2"),
            file("link/d", b"2"),
            file("becomes-file", b"2"),
            Member {
                mode: 0o4755,
                owner: (7, 8),
                ..file("setuid", b"2")
            },
            // What AUFS has noted.
            directory(".wh..wh.plnk/"),
            file(".wh..wh.plnk/1.2", b""),
            file(".wh..wh.aufs", b""),
        ],
        &[
            file("kept/a", b"3"),
            file("kept/.wh.c", b""),
            file("kept/c", b"3"),
        ],
    ])
}

#[test]
fn layers_become_the_tree_that_they_make() {
    needs_store!(server);
    let expected = [
        ("becomes-directory", "/"),
        ("becomes-directory/a", "2"),
        ("becomes-file", "2"),
        ("cleared", "/"),
        ("cleared/new", "2"),
        ("kept", "/"),
        ("kept/a", "3"),
        ("kept/b", "1"),
        ("kept/c", "3"),
        ("link", "/"),
        ("link/d", "2"),
        ("setuid", "2"),
    ];
    for is_compressed in [false, true] {
        let image = Image {
            is_compressed,
            ..changing()
        };
        for (name, files) in [("docker", image.docker()), ("layout", image.layout())] {
            let whole = files.archive();
            let document = made(&server, name, &whole);
            check_tree(&server, &document, &expected);
            let status = store(&server).join(id_of(&document)).join("setuid");
            let status = status.metadata().unwrap();
            assert_eq!(
                (status.mode() & 0o7777, status.uid(), status.gid()),
                (0o4755, 7, 8)
            );
            let settings = json!({ "env": ["PATH", "SECRET", "A"], "cwd": "/srv", "user": "www" });
            assert_eq!(document["settings"], settings);
            // The archive of an image may be compressed itself.
            check_tree(&server, &made(&server, name, &gzip(&whole)), &expected);
        }
    }
    check_tidy(&server);
}

#[test]
fn images_are_told_from_roots_and_one_is_chosen() {
    needs_store!(server);
    let image = Image::new(&[&[file("a", b"1")]]);
    // A root that has the files of an image is a root.
    let mut root = image.layout().0;
    root.insert("etc/passwd".to_owned(), b"x".to_vec());
    let document = made(&server, "a", &Files(root).archive());
    assert!(tree_of(&server, &document).contains_key("oci-layout"));
    assert_eq!(
        document["settings"],
        json!({ "env": [], "cwd": null, "user": null })
    );
    // A layer that comes twice, and an empty image.
    let mut twice = image.clone();
    twice.layers.push(twice.layers[0].clone());
    for files in [twice.docker(), twice.layout()] {
        check_tree(
            &server,
            &made(&server, "a", &files.archive()),
            &[("a", "1")],
        );
    }
    check_tree(
        &server,
        &made(&server, "a", &Image::new(&[]).layout().archive()),
        &[],
    );
    // An index of indexes, with what is for other machines.
    let mut files = image.layout();
    let own = files.read("index.json")["manifests"][0].clone();
    let (architecture, other) = match std::env::consts::ARCH {
        "aarch64" => ("arm64", "amd64"),
        _ => ("amd64", "arm64"),
    };
    let for_machine = |os: &str, architecture: &str| {
        let mut own = own.clone();
        own["platform"] = json!({ "os": os, "architecture": architecture });
        own
    };
    let all = [
        for_machine("linux", other),
        for_machine("unknown", "unknown"),
        for_machine("linux", architecture),
    ];
    let inner = json!({ "manifests": all }).to_string();
    let inner = files.blob(inner.into());
    files.index(&json!([inner]));
    check_tree(
        &server,
        &made(&server, "a", &files.archive()),
        &[("a", "1")],
    );
    // Two names of one image.
    files.index(&json!([own, own]));
    check_tree(
        &server,
        &made(&server, "a", &files.archive()),
        &[("a", "1")],
    );
    let another = files.0["index.json"].clone();
    let another = files.blob(another);
    let refused = |files: &Files, count: &str| {
        let reply = put(&server, "a", &files.archive());
        assert_error(&reply, 400, "bad_archive");
        let text = format!("there are {count} images for this machine");
        assert!(reply.text().contains(&text), "{}", reply.text());
    };
    for (wrong, count) in [
        (json!([own, another]), "several"),
        (json!([another, own, another, own]), "several"),
        (json!([for_machine("linux", other)]), "no"),
        (json!([]), "no"),
    ] {
        files.index(&wrong);
        refused(&files, count);
    }
    let mut files = image.docker();
    let mut manifest = files.read("manifest.json");
    let first = manifest[0].clone();
    manifest.as_array_mut().unwrap().push(first);
    for (manifest, count) in [(manifest, "several"), (json!([]), "no")] {
        let name = "manifest.json".to_owned();
        files.0.insert(name, manifest.to_string().into());
        refused(&files, count);
    }
    check_tidy(&server);
}

/// An image is refused, and nothing of it is left.
#[track_caller]
fn refused(server: &Server, what: &str, files: &Files) {
    let reply = put(server, "a", &files.archive());
    let is_refusal = [400, 409].contains(&reply.status);
    assert!(is_refusal, "{what}: {}", reply.text());
    wait_until("nothing is left", PATIENCE, || {
        names_in(store(server)).is_empty()
    });
    assert_eq!(listed(server), Vec::<Value>::new(), "{what}");
}

#[test]
fn an_image_that_lies_is_refused_and_leaves_nothing() {
    let outside = TempDir::new();
    fs::write(outside.path().join("victim"), "kept").unwrap();
    needs_store!(server);
    let image = changing();
    let compressed = Image {
        is_compressed: true,
        ..image.clone()
    };
    // Each part is another one, is shorter, is missing, or is what leads out, or to no end.
    for (what, files) in [
        ("docker", image.docker()),
        ("layout", image.layout()),
        ("compressed", compressed.layout()),
        ("compressed docker", compressed.docker()),
    ] {
        for name in files.0.keys().filter(|name| *name != "oci-layout") {
            let mut changed = files.clone();
            let content = changed.0.get_mut(name).unwrap();
            let middle = content.len() / 2;
            content[middle] ^= 1;
            refused(&server, &format!("{what} with another {name}"), &changed);
            let mut cut = files.clone();
            cut.0.get_mut(name).unwrap().truncate(middle);
            refused(&server, &format!("{what} with a cut {name}"), &cut);
            for other in [
                "-> /etc/passwd".to_owned(),
                format!("-> {}", outside.path().join("victim").display()),
                format!("-> ../{name}"),
                "-> .".to_owned(),
                "-> /".to_owned(),
            ] {
                let mut led = files.clone();
                led.0.insert(name.clone(), other.clone().into_bytes());
                refused(&server, &format!("{what} with {name} {other}"), &led);
            }
            let decides = ["index.json", "manifest.json"].contains(&&**name);
            if !decides {
                let mut without = files.clone();
                without.0.remove(name);
                refused(&server, &format!("{what} without {name}"), &without);
            }
        }
    }
    let kept = fs::read_to_string(outside.path().join("victim"));
    assert_eq!(kept.unwrap(), "kept");
}

/// Where the members of an archive begin and where their contents end, by their headers alone.
fn boundaries(archive: &[u8]) -> Vec<usize> {
    let (mut found, mut at) = (Vec::new(), 0);
    while archive[at] != 0 {
        let digits = std::str::from_utf8(&archive[at + 124..at + 135]).unwrap();
        let size = usize::from_str_radix(digits.trim(), 8).unwrap();
        let content = at + 512;
        found.extend([at, content, content + size]);
        at = content + size.next_multiple_of(512);
    }
    found.push(at);
    found
}

#[test]
fn a_stream_that_ends_at_a_boundary_of_a_layer_leaves_nothing() {
    needs_store!(server);
    let image = changing();
    let compressed = Image {
        is_compressed: true,
        ..image.clone()
    };
    for whole in [image.docker(), image.layout(), compressed.layout()].map(|files| files.archive())
    {
        let boundaries = boundaries(&whole);
        assert!(boundaries.len() > 15, "{boundaries:?}");
        for end in boundaries {
            let reply = put(&server, "a", &whole[..end]);
            assert_error(&reply, 400, "bad_archive");
            // The client is gone, with all of the rest announced.
            drop(send(&server, "a", &whole, end));
        }
        wait_until("nothing is left", PATIENCE, || {
            names_in(store(&server)).is_empty()
        });
        assert_eq!(listed(&server), Vec::<Value>::new());
        made(&server, "a", &whole);
        assert_eq!(server.delete(&format!("{SNAPSHOTS}/a")).status, 200);
    }
}

#[test]
fn an_image_whose_documents_make_no_sense_is_refused() {
    needs_store!(server);
    let image = changing();
    // The layers in another order, or fewer of them.
    let mut turned = image.docker();
    let mut manifest = turned.read("manifest.json");
    manifest[0]["Layers"].as_array_mut().unwrap().reverse();
    turned
        .0
        .insert("manifest.json".to_owned(), manifest.to_string().into());
    refused(&server, "other order", &turned);
    manifest[0]["Layers"].as_array_mut().unwrap().pop();
    turned
        .0
        .insert("manifest.json".to_owned(), manifest.to_string().into());
    refused(&server, "fewer", &turned);
    for path in ["../../../victim", "/etc/passwd", "", ".", "a\0b"] {
        manifest[0]["Config"] = json!(path);
        turned
            .0
            .insert("manifest.json".to_owned(), manifest.to_string().into());
        refused(&server, path, &turned);
    }
    // Documents that are none, or nested deeply.
    for text in [
        "",
        "[]",
        "[1]",
        "[{}]",
        "{}",
        "null",
        "[{\"Config\":1,\"Layers\":[]}]",
        &"[".repeat(1 << 20),
        &format!("[{}]", vec!["{}"; 100_000].join(",")),
    ] {
        let mut files = image.docker();
        files.0.insert("manifest.json".to_owned(), text.into());
        refused(&server, &text[..text.len().min(20)], &files);
    }
    // An index that leads to itself has no digest that fits, but a chain of them has an end.
    let mut chain = image.layout();
    for _ in 0..10 {
        let inner = chain.read("index.json").to_string();
        let inner = chain.blob(inner.into());
        chain.index(&json!([inner]));
    }
    refused(&server, "a chain", &chain);
    for config in [
        json!({ "Env": ["=x"] }),
        json!({ "Env": "A=1" }),
        json!({ "Env": ["A=\0"] }),
        json!({ "Env": [format!("A={}", "x".repeat(70_000))] }),
        json!({ "Env": vec!["A="; 2000] }),
        json!({ "User": 1 }),
        json!({ "User": "x".repeat(300) }),
        json!({ "WorkingDir": "x".repeat(5000) }),
        json!([]),
    ] {
        let image = Image {
            config: config.clone(),
            ..image.clone()
        };
        refused(
            &server,
            &config.to_string().chars().take(20).collect::<String>(),
            &image.layout(),
        );
    }
}

#[test]
fn hostile_layers_reach_nothing_but_their_tree() {
    let outside = TempDir::new();
    let victim = outside.path().join("victim");
    fs::write(&victim, "kept").unwrap();
    let out = outside.join("");
    needs_store!(server);
    let base: &[Member<'_>] = &[
        link("out", &out),
        file("a", b"1"),
        directory("d/"),
        file("d/a", b"1"),
    ];
    for name in [
        ".wh.",
        ".wh..",
        ".wh...",
        "d/.wh.",
        "d/.wh..",
        "d/.wh...",
        "../.wh.a",
        "d/../.wh.a",
    ] {
        let image = Image::new(&[base, &[file(name, b"")]]);
        let reply = put(&server, "a", &image.docker().archive());
        assert_error(&reply, 400, "bad_archive");
        wait_until("nothing is left", PATIENCE, || {
            names_in(store(&server)).is_empty()
        });
    }
    // Whiteouts and files through a link of a layer below change nothing that it leads to.
    let through: &[Member<'_>] = &[
        file("out/.wh.victim", b""),
        file("out/victim", b"2"),
        file("out/.wh..wh..opq", b""),
    ];
    let document = made(
        &server,
        "a",
        &Image::new(&[base, through]).docker().archive(),
    );
    assert_eq!(tree_of(&server, &document)["out/victim"], "2");
    let all: &[Member<'_>] = &[file(".wh..wh..opq", b"")];
    check_tree(
        &server,
        &made(&server, "a", &Image::new(&[base, all]).layout().archive()),
        &[],
    );
    assert_eq!(fs::read_to_string(&victim).unwrap(), "kept");
    assert_eq!(names_in(outside.path()), ["victim"]);
    // Ids, and formats that are not read.
    let owned = Member {
        owner: (65_536, 0),
        ..file("b", b"")
    };
    let reply = put(
        &server,
        "b",
        &Image::new(&[base, &[owned]]).layout().archive(),
    );
    assert_error(&reply, 400, "bad_request");
    let mut other = Image::new(&[base]);
    other
        .layers
        .push([&b"\x28\xb5\x2f\xfd"[..], &[0; 1024]].concat());
    assert_error(
        &put(&server, "b", &other.layout().archive()),
        415,
        "unsupported",
    );
    // A device is left out and counted.
    let device = Member {
        typeflag: b'3',
        ..file("null", b"")
    };
    let document = made(&server, "b", &Image::new(&[&[device]]).layout().archive());
    assert_eq!(document["skipped"], 1);
    check_tidy(&server);
}

#[test]
fn what_layers_unpack_to_is_bounded() {
    needs_store!(server, "SBX_SNAPSHOTS_BYTES" = 4 << 20);
    let zeros = vec![0; 3 << 20];
    let many: Vec<String> = (0..1000).map(|number| number.to_string()).collect();
    let many: Vec<_> = many.iter().map(|name| file(name, b"")).collect();
    let hiding: Vec<String> = (0..1100).map(|number| format!(".wh.{number}")).collect();
    let hiding: Vec<_> = hiding.iter().map(|name| file(name, b"")).collect();
    let sparse: &[(&str, &[u8])] = &[
        ("GNU.sparse.size", b"1099511627776"),
        ("GNU.sparse.map", b"0,1"),
    ];
    let hole = with(Tar::default().pax(sparse), &[file("a", b"x")]).end();
    let compressed = |layers: Vec<Vec<u8>>| Image {
        layers,
        is_compressed: true,
        ..Image::new(&[])
    };
    let large = archive(&[file("a", &zeros)]);
    for (what, image) in [
        (
            "one and one",
            compressed(vec![large.clone(), archive(&[file("b", &zeros)])]),
        ),
        // Although the tree would have it once.
        ("the same again", compressed(vec![large.clone(); 100])),
        ("a hole", compressed(vec![hole])),
        ("whiteouts", compressed(vec![archive(&hiding)])),
        ("files", compressed(vec![archive(&many), archive(&many)])),
    ] {
        for files in [image.docker(), image.layout()] {
            assert_error(&put(&server, "a", &files.archive()), 507, "no_space");
            assert_eq!(names_in(store(&server)), Vec::<String>::new(), "{what}");
        }
    }
    let mut endless = Image::new(&[]);
    endless.layers = vec![archive(&[]); 300];
    assert_error(
        &put(&server, "a", &endless.docker().archive()),
        400,
        "bad_archive",
    );
    made(&server, "a", &compressed(vec![large]).layout().archive());
    check_tidy(&server);
}

#[test]
fn a_server_that_is_killed_between_layers_and_tree_leaves_nothing_to_the_next() {
    needs_store!(_able);
    let whole = changing().docker().archive();
    for fault in ["layers", "unpack", "snapshot"] {
        let mut server = start(
            Server::host().env("SBX_FAULT", format!("{fault}:kill")),
            faulty_program(),
        );
        let mut connection = server.connect();
        connection.send_request("PUT", &format!("{}?name=a", super::SNAPSHOTS), &[], &whole);
        server.wait_for_exit(PATIENCE);
        let place = server.place.take().unwrap();
        server = in_place_of(&place).start();
        server.place = Some(place);
        assert_eq!(listed(&server), Vec::<Value>::new(), "{fault}");
        check_tidy(&server);
        made(&server, "a", &whole);
    }
}
