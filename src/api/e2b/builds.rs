//! Builds of templates, as the SDKs ask for them: a template is named, its files are uploaded, and its steps are sent.
//!
//! The id of a template is that of the snapshot which it becomes, so that it is known before. The id of its build is made
//! of it.

use std::sync::Arc;

use serde_json::Value;

use super::access::upload_signature;
use super::calls::{Answer, Call};
use super::errors::{Code, E2bError};
use super::files::Plain;
use super::templates::{build_id, decoded, plain_name, templates, unknown};
use crate::api::json::snapshot::check_name;
use crate::codec::fields::{Elements, Fields, strings};
use crate::codec::object::object;
use crate::codec::time::rfc3339;
use crate::error::{Error, Kind};
use crate::host::{Build, BuildStep, Host, LogLine, Stage, Verb};
use crate::http::{Body, Response};
use crate::spec::sandbox::RootChoice;
use crate::workspace::UploadReader;

/// Most steps of a build, and most bytes of all of them: they are held until it ends.
const MAX_STEPS: usize = 1000;
const MAX_STEP_BYTES: usize = 1 << 20;

/// Lines of a log in one answer, as clients expect it.
const MAX_LINES: usize = 100;

/// Longest name of files: a digest.
const MAX_HASH: usize = 128;

/// `POST /v3/templates`.
pub(super) fn begin(call: &mut Call<'_, '_>, _: &str) -> Answer {
    let body = call.body()?;
    let mut fields = Fields::parse(&body)?;
    let asked = match fields.string("name")? {
        Some(name) => name,
        None => fields.required_string("alias")?,
    };
    let (_, tag) = asked.split_once(':').unwrap_or(("", "default"));
    let tags = fields.take("tags");
    let tags = tags.map(|array| strings("tags", "an array of strings", array));
    let tags = tags.transpose()?.unwrap_or_default();
    if tags.iter().any(|other| other != tag) {
        let text = "a template has one tag here, that of its name: build NAME:TAG";
        return Err(E2bError::invalid(text));
    }
    let name = plain_name(&asked);
    check_name(&name)?;
    if let Some(own) = templates(call).entry_for(&asked) {
        let text = format!("{own} is a name of SBX_E2B_TEMPLATES; choose another one");
        return Err(Error::new(Kind::Exists, text).into());
    }
    let build = call.context.machine.host()?.begin_build(&name)?;
    let mut response = Response::json(&object! {
        "templateID": &*build.id,
        "buildID": build_id(&build.id),
        "public": false,
        "names": [&*asked],
        "aliases": [&*asked],
        "tags": [tag],
    });
    response.status = 202;
    Ok(response)
}

/// The part of the path with this number.
fn part<'p>(call: &'p Call<'_, '_>, number: usize) -> &'p str {
    let path = std::str::from_utf8(&call.request.head.path).unwrap_or_default();
    path.split('/').nth(number).unwrap_or_default()
}

/// The build of a template whose id the path has.
fn find<'a>(call: &Call<'a, '_>, key: &str) -> Result<(&'a Host, Option<Arc<Build>>), E2bError> {
    let host = call.context.machine.host()?;
    let found = host.builds(key).into_iter().find(|build| build.id == key);
    Ok((host, found))
}

/// `GET /templates/{template}/files/{hash}`: where files are sent to, unless they are there.
pub(super) fn upload_link(call: &mut Call<'_, '_>, key: &str) -> Answer {
    let build = find(call, key)?.1.ok_or_else(|| unknown(key))?;
    let hash = part(call, 4);
    if hash.len() > MAX_HASH || !hash.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Err(E2bError::invalid(
            "the hash of files takes letters and digits",
        ));
    }
    let head = &call.request.head;
    let host = String::from_utf8_lossy(head.host().unwrap_or_default());
    let scheme = match head.header("x-forwarded-proto") {
        Some(b"https") => "https",
        _ => "http",
    };
    let signature = upload_signature(call.context, key, hash);
    let url = format!("{scheme}://{host}/templates/{key}/files/{hash}?signature={signature}");
    let mut response = Response::json(&object! {
        "present": build.has_files(hash),
        "url": url,
    });
    response.status = 201;
    Ok(response)
}

/// `PUT /templates/{template}/files/{hash}`.
pub(super) fn upload(call: &mut Call<'_, '_>, key: &str) -> Answer {
    let (host, build) = find(call, key)?;
    let build = build.ok_or_else(|| unknown(key))?;
    let hash = part(call, 4).to_owned();
    let ledger = Arc::clone(&call.request.ledger);
    let mut source = Plain(&mut call.request.body);
    let mut input = UploadReader::new(&mut source, &ledger.work, &ledger);
    let received = host.receive_build_files(&build, &hash, &mut input);
    match (received, input.take_error()) {
        (Err(_), Some(broken_off)) => Err(broken_off),
        (received, _) => {
            received?;
            Ok(Response::new(200, Body::Empty))
        }
    }
}

/// `POST /v2/templates/{template}/builds/{build}`.
pub(super) fn start(call: &mut Call<'_, '_>, key: &str) -> Answer {
    let body = call.body()?;
    let (_, build) = find(call, key)?;
    let build = build.filter(|own| build_id(&own.id) == part(call, 5));
    let build = build.ok_or_else(|| unknown(key))?;
    let parsed = base_and_steps(call, &body);
    let (base, steps) = parsed.inspect_err(|_| build.refuse())?;
    let host = call.context.machine.shared_host()?;
    host.start_build(&build, base, steps)?;
    Ok(Response::new(202, Body::Empty))
}

/// What a build begins with, and what is done then.
fn base_and_steps(
    call: &Call<'_, '_>,
    body: &[u8],
) -> Result<(RootChoice, Vec<BuildStep>), E2bError> {
    let mut fields = Fields::parse(body)?;
    for name in ["startCmd", "readyCmd"] {
        if fields.string(name)?.is_some_and(|text| !text.is_empty()) {
            let text = format!(
                "{name} is unavailable: a template here has files and no processes; run the command in each sandbox, by commands.run(background=True)"
            );
            return Err(E2bError::invalid(text));
        }
    }
    let templates = templates(call);
    let (image, template) = (fields.string("fromImage")?, fields.string("fromTemplate")?);
    let base = match (&image, &template) {
        (_, Some(template)) => templates.root(template),
        (Some(image), None) => templates.root_of_image(image),
        (None, None) => templates.root("base"),
    };
    let base = base.filter(|base| *base != RootChoice::Shared);
    let base = base.ok_or_else(|| {
        let Some(asked) = image.or(template) else {
            let text = "fromImage or fromTemplate is missing, and the server has no SBX_TEMPLATE";
            return E2bError::invalid(text);
        };
        let name = plain_name(&asked);
        let text = format_args!(
            "there is no template {name:?} for {asked:?}, and images are not fetched here: docker export $(docker create {asked}) | curl -H \"X-Sandbox-Token: $TOKEN\" -T - \"$URL/v1/snapshots?name={name}\" makes it"
        );
        E2bError::invalid(text)
    })?;
    Ok((base, steps(&mut fields)?))
}

fn steps(fields: &mut Fields<'_>) -> Result<Vec<BuildStep>, E2bError> {
    let Some(array) = fields.take("steps") else {
        return Ok(Vec::new());
    };
    let Elements(all) = crate::codec::fields::decoded("steps", array)?;
    if all.len() > MAX_STEPS || array.get().len() > MAX_STEP_BYTES {
        let text = format!("steps takes at most {MAX_STEPS} of them, and {MAX_STEP_BYTES} bytes");
        return Err(E2bError::invalid(text));
    }
    let steps = all.into_iter().map(|step| {
        let mut step = Fields::parse(step.get().as_bytes())?;
        let verb = step.choice("type", &Verb::NAMES)?;
        let args = step.take("args");
        let args = args.map(|array| strings("args", "an array of strings", array));
        Ok(BuildStep {
            verb: verb.ok_or_else(|| Error::invalid("type of a step is missing"))?,
            args: args.transpose()?.unwrap_or_default(),
            files: step.string("filesHash")?.unwrap_or_default(),
        })
    });
    steps.collect()
}

/// `GET /templates/{template}/builds/{build}/status`.
pub(super) fn status(call: &mut Call<'_, '_>, key: &str) -> Answer {
    let (host, build) = find(call, key)?;
    if part(call, 4) != build_id(key) {
        return Err(unknown(key));
    }
    // What has become a snapshot outlasts its build.
    let stage = match &build {
        Some(build) => build.stage(),
        None => host.snapshot(key).map(|_| Stage::Ready)?,
    };
    let from = call.query.number("logsOffset")?.unwrap_or(0);
    let most = call.query.number("limit")?.unwrap_or(MAX_LINES as u64);
    let count = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    let lines = build.map_or_else(Vec::new, |build| {
        build.lines(count(from), count(most).min(MAX_LINES))
    });
    let lines: Vec<Value> = lines.iter().map(line).collect();
    let mut document = object! {
        "templateID": key,
        "buildID": build_id(key),
        "logs": Vec::<Value>::new(),
        "logEntries": lines,
        "status": match &stage {
            Stage::Waiting => "waiting",
            Stage::Running => "building",
            Stage::Ready => "ready",
            Stage::Failed(..) => "error",
        },
    };
    if let Stage::Failed(step, text) = stage {
        document["reason"] = object! { "message": text, "step": step_name(step) };
    }
    Ok(Response::json(&document))
}

fn line(line: &LogLine) -> Value {
    object! {
        "timestamp": rfc3339(line.at_ms.cast_signed()),
        "level": if line.is_error { "error" } else { "info" },
        "message": &*line.text,
        "step": step_name(line.step),
    }
}

/// What clients call a step.
fn step_name(step: usize) -> String {
    match step {
        0 => "base".to_owned(),
        step => step.to_string(),
    }
}

/// `DELETE /templates/{template}`. One that is being built is built no more.
pub(super) fn delete(call: &mut Call<'_, '_>, key: &str) -> Answer {
    let host = call.context.machine.host()?;
    let key = decoded(key)?;
    let mut found = false;
    for name in [&key, &plain_name(&key)] {
        found |= host.cancel_builds(name)?;
        match host.delete_snapshot(name) {
            Ok((id, _)) => {
                host.forget_build(&id);
                return Ok(Response::new(204, Body::Empty));
            }
            Err(error) if error.kind() == Kind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    if !found {
        return Err(E2bError::new(
            Code::NotFound,
            format!("there is no template {key:?}"),
        ));
    }
    Ok(Response::new(204, Body::Empty))
}
