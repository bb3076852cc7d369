//! Which sandbox a request is about, and whether its credentials open it.
//!
//! The API key is the host token. Each sandbox has its own token, which is also derived from it; clients send it in one
//! of two headers, or prove with a signature that they know it. A request without an id is for the sandbox whose token
//! it has.

use subtle::ConstantTimeEq;

use super::calls::Call;
use super::errors::{Code, E2bError};
use super::signature::{Purpose, Signature};
use crate::api::context::{Context, note_refusal};
use crate::api::credentials::{TokenHeader, forms_of_key};
use crate::auth::{Access, Holder};
use crate::codec::base64;
use crate::error::Kind;
use crate::host::SandboxState;
use crate::http::Request;
use crate::machine::{MACHINE_ID, Scope};
use crate::workspace::{Lease, Needs};

/// The sandbox that a request is about.
pub(super) enum AskedSandbox {
    /// The machine, which is the only one.
    Machine,
    /// One of several.
    Sandbox(String),
}

/// The headers that carry the token of a sandbox.
const TOKENS: [TokenHeader; 2] = [TokenHeader::ACCESS_TOKEN, TokenHeader::TRAFFIC_ACCESS_TOKEN];

impl AskedSandbox {
    /// The id that its token is derived from.
    fn id(&self) -> &str {
        match self {
            Self::Machine => MACHINE_ID,
            Self::Sandbox(id) => id,
        }
    }
}

/// Begins work in a sandbox.
///
/// # Errors
/// There is no such sandbox, or it has not what is needed.
pub(super) fn enter(
    context: &Context,
    request: &mut Request<'_>,
    place: &AskedSandbox,
    needs: Needs,
) -> Result<Lease, E2bError> {
    let scope = match place {
        AskedSandbox::Machine => Scope::Machine,
        AskedSandbox::Sandbox(id) => Scope::Sandbox(id),
    };
    let entered = context.enter(request, scope, needs);
    entered.map_err(|error| match error.kind() {
        Kind::NotFound | Kind::Stopped | Kind::Paused => E2bError::gone(),
        _ => error.into(),
    })
}

/// Whether a sandbox runs.
pub(super) fn runs(context: &Context, place: &AskedSandbox) -> bool {
    match (place, context.machine.host()) {
        (AskedSandbox::Sandbox(id), Ok(host)) => {
            let state = host.find(id).map(|sandbox| sandbox.state().0);
            state.is_ok_and(|state| state == SandboxState::Running)
        }
        _ => true,
    }
}

/// Checks the API key, for what it opens of the machine, or of one sandbox.
///
/// # Errors
/// 401.
pub(super) fn of_api(
    context: &Context,
    request: &mut Request<'_>,
    access: Access<'_>,
) -> Result<(), E2bError> {
    let key = TokenHeader::API_KEY
        .value(&request.head)
        .map(<[u8]>::to_vec);
    let keys = key.as_deref().map_or([None; 2], forms_of_key);
    admit(context, request, access, &keys, "X-API-KEY")
}

/// Finds the sandbox that a request is about, and checks its token.
///
/// # Errors
/// 401; there is no such sandbox.
pub(super) fn of_sandbox(
    context: &Context,
    request: &mut Request<'_>,
    named: Option<&str>,
) -> Result<AskedSandbox, E2bError> {
    let tokens = TOKENS.map(|header| header.value(&request.head).map(<[u8]>::to_vec));
    with_tokens(context, request, named, &tokens, "X-Access-Token")
}

/// As [`of_sandbox`], for a server behind a port: its client may send the token as clients of other doors do.
///
/// # Errors
/// As [`of_sandbox`].
pub(super) fn of_port(
    context: &Context,
    request: &mut Request<'_>,
    named: Option<&str>,
) -> Result<AskedSandbox, E2bError> {
    let headers = [TOKENS[0], TOKENS[1], TokenHeader::SANDBOX_TOKEN];
    let tokens = headers.map(|header| header.value(&request.head).map(<[u8]>::to_vec));
    let header = "E2b-Traffic-Access-Token";
    with_tokens(context, request, named, &tokens, header)
}

fn with_tokens(
    context: &Context,
    request: &mut Request<'_>,
    named: Option<&str>,
    tokens: &[Option<Vec<u8>>],
    header: &str,
) -> Result<AskedSandbox, E2bError> {
    let tokens: Vec<_> = tokens.iter().map(Option::as_deref).collect();
    let owns = |own: &str| {
        let mut tokens = tokens.iter().flatten();
        tokens.any(|token| own.as_bytes().ct_eq(token).into())
    };
    let place = find(context, request, named, owns)?;
    admit(
        context,
        request,
        Access::Inside(place.id()),
        &tokens,
        header,
    )?;
    Ok(place)
}

/// As [`of_sandbox`], where a signature may stand for the token.
///
/// # Errors
/// As [`of_sandbox`]; the user is not known.
pub(super) fn of_files(
    context: &Context,
    call: &mut Call<'_, '_>,
    named: Option<&str>,
) -> Result<AskedSandbox, E2bError> {
    let purpose = if call.request.head.method == "POST" {
        Purpose::Write
    } else {
        Purpose::Read
    };
    let signature = Signature::of(&call.query, purpose)?;
    let Some(signature) = signature else {
        return of_sandbox(context, call.request, named);
    };
    let owns = |token: &str| signature.is_by(token.as_bytes());
    let place = find(context, call.request, named, owns)?;
    if context.authenticator.needs_token() {
        if !owns(&context.authenticator.sandbox_token(place.id())) {
            return Err(refuse(call.request, "the signature is wrong"));
        }
        if signature.has_expired() {
            return Err(refuse(call.request, "signature is already expired"));
        }
    }
    assign_slot(context, call.request, Holder::Sandbox(place.id()))?;
    Ok(place)
}

/// What stands for the API key where files of a template are uploaded.
#[cfg(feature = "file-tools")]
pub(super) fn upload_signature(context: &Context, template: &str, hash: &str) -> String {
    // No sandbox has an id like that.
    let id = format!("{template}/{hash}");
    context.authenticator.sandbox_token(&id)
}

/// Checks the signature of an upload for a template, or the API key.
///
/// # Errors
/// 401.
#[cfg(feature = "file-tools")]
pub(super) fn of_upload(
    context: &Context,
    call: &mut Call<'_, '_>,
    template: &str,
) -> Result<(), E2bError> {
    let signature = call.query.value("signature")?;
    let Some(signature) = signature.filter(|_| context.authenticator.needs_token()) else {
        return of_api(context, call.request, Access::Machine);
    };
    let path = String::from_utf8_lossy(&call.request.head.path);
    let hash = path.rsplit('/').next().unwrap_or_default();
    let own = upload_signature(context, template, hash);
    if !bool::from(own.as_bytes().ct_eq(signature)) {
        return Err(refuse(call.request, "the signature is wrong"));
    }
    assign_slot(context, call.request, Holder::Operator)
}

/// Finds the sandbox that is asked after. No credentials are needed.
///
/// # Errors
/// There is no such sandbox.
pub(super) fn of_health(
    context: &Context,
    request: &Request<'_>,
    named: Option<&str>,
) -> Result<AskedSandbox, E2bError> {
    named_in(request, named).map_or(Ok(AskedSandbox::Machine), |id| place_of(context, id))
}

/// Checks that a request names one sandbox, if any: `labelled` by its host, or in headers.
///
/// # Errors
/// 400.
pub(super) fn check_ids(request: &Request<'_>, labelled: Option<&str>) -> Result<(), E2bError> {
    let ids = request.head.values("e2b-sandbox-id");
    let mut ids = ids
        .chain(labelled.map(str::as_bytes))
        .filter(|id| !id.is_empty());
    let first = ids.next().unwrap_or_default();
    if std::str::from_utf8(first).is_err() || ids.any(|id| !id.eq_ignore_ascii_case(first)) {
        let text = "E2b-Sandbox-Id names another sandbox than the host or another E2b-Sandbox-Id";
        return Err(E2bError::invalid(text));
    }
    Ok(())
}

/// The id of the sandbox that a request is about: `named` by its path or its host, or in a header.
fn named_in<'r>(request: &'r Request<'_>, named: Option<&'r str>) -> Option<&'r str> {
    let header = request.head.header("e2b-sandbox-id");
    let header = header.and_then(|id| std::str::from_utf8(id).ok());
    named.or(header).filter(|id| !id.is_empty())
}

/// The sandbox that a request names, or else the one whose token `owns` knows.
fn find(
    context: &Context,
    request: &Request<'_>,
    named: Option<&str>,
    owns: impl Fn(&str) -> bool,
) -> Result<AskedSandbox, E2bError> {
    let host = context.machine.host();
    match (named_in(request, named), host) {
        (Some(id), Err(_)) => place_of(context, id),
        (None, Err(_)) => Ok(AskedSandbox::Machine),
        // Whether it exists is found out when its token was checked.
        (Some(id), Ok(_)) => Ok(AskedSandbox::Sandbox(id.to_owned())),
        (None, Ok(_)) => {
            let found = context.sandbox_whose_token(owns).map(AskedSandbox::Sandbox);
            found.ok_or_else(|| {
                let text = "send E2b-Sandbox-Id or a sandbox's token";
                refuse(request, text)
            })
        }
    }
}

/// The sandbox with an id.
fn place_of(context: &Context, id: &str) -> Result<AskedSandbox, E2bError> {
    match context.machine.host() {
        Ok(host) if host.find(id).is_ok() => Ok(AskedSandbox::Sandbox(id.to_owned())),
        Err(_) if names_machine(context, id) => Ok(AskedSandbox::Machine),
        _ => Err(E2bError::gone()),
    }
}

/// Whether an id is that of a machine that is the only sandbox. Without a token, any is.
pub(super) fn names_machine(context: &Context, id: &str) -> bool {
    id == MACHINE_ID || !context.authenticator.needs_token()
}

/// Admits a request that has one of these tokens.
fn admit(
    context: &Context,
    request: &mut Request<'_>,
    access: Access<'_>,
    tokens: &[Option<&[u8]>],
    header: &str,
) -> Result<(), E2bError> {
    let given: Vec<_> = tokens.iter().flatten().collect();
    let mut checks = given
        .iter()
        .map(|token| context.authenticator.check(Some(token), access));
    let holder = match checks.find_map(Result::ok) {
        Some(holder) => holder,
        None if given.is_empty() => match context.authenticator.check(None, access) {
            Ok(holder) => holder,
            Err(_) => return Err(refuse(request, &format!("{header} is missing"))),
        },
        None => {
            let text = format!("{header} does not grant access to this sandbox");
            return Err(refuse(request, &text));
        }
    };
    assign_slot(context, request, holder)
}

fn refuse(request: &Request<'_>, text: &str) -> E2bError {
    note_refusal(request, text);
    E2bError::new(Code::Unauthenticated, text)
}

/// Gives the connection to the holder of the token.
fn assign_slot(
    context: &Context,
    request: &mut Request<'_>,
    holder: Holder<'_>,
) -> Result<(), E2bError> {
    // The clients of a machine that is the only sandbox are its operator's.
    let holder = match holder {
        Holder::Sandbox(id) if id == MACHINE_ID => Holder::Operator,
        holder => holder,
    };
    Ok(context.assign_slot(request, holder)?)
}

/// The name of the user in E2B's images. It stands for that of a sandbox, whatever its name is.
pub(super) const USUAL_USER: &str = "user";

/// The lease of the account that a request is to act as, in a sandbox where there are several.
///
/// # Errors
/// 401 if there is no such account; the sandbox is ending.
pub(super) fn act_as(lease: Lease, name: Option<String>) -> Result<Lease, E2bError> {
    let Some(name) = name.filter(|name| !name.is_empty()) else {
        return Ok(lease);
    };
    lease.share_as(&name).map_err(|error| match error.kind() {
        Kind::Invalid => {
            let text = format_args!("invalid username {name:?}: {error}");
            E2bError::new(Code::Unauthenticated, text)
        }
        _ => error.into(),
    })
}

/// Checks the name of the account that a request is to act as where there is one: that of the sandbox itself, or the usual name of E2B,
/// which stands for it.
///
/// # Errors
/// 401 for any other account.
pub(super) fn check_user(
    workspace: &crate::workspace::Workspace,
    name: Option<&str>,
) -> Result<(), E2bError> {
    let Some(name) = name.filter(|name| !name.is_empty()) else {
        return Ok(());
    };
    if workspace.has_own_root() {
        return Ok(());
    }
    let own = workspace.account();
    if name == own || (name == USUAL_USER && !workspace.has_account(USUAL_USER)) {
        return Ok(());
    }
    let text = format_args!("invalid username {name:?}: everything here runs as {own}");
    Err(E2bError::new(Code::Unauthenticated, text))
}

/// The account in `Authorization: Basic`, which has no password here.
///
/// # Errors
/// 400 if it is malformed.
pub(super) fn user_of(request: &Request<'_>) -> Result<Option<String>, E2bError> {
    let Some(credentials) = TokenHeader::AUTHORIZATION.value(&request.head) else {
        return Ok(None);
    };
    let Some((scheme, encoded)) = credentials.split_at_checked(6) else {
        return Ok(None);
    };
    if !scheme.eq_ignore_ascii_case(b"basic ") {
        return Ok(None);
    }
    let decoded =
        base64::decode(encoded.trim_ascii()).and_then(|user| String::from_utf8(user).ok());
    let decoded = decoded.ok_or_else(|| E2bError::invalid("Authorization is not Basic USER:"))?;
    let user = decoded.split(':').next().unwrap_or_default();
    Ok(Some(user.to_owned()))
}
