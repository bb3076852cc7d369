//! The wall of a sandbox, proved from inside.

use crate::fixture::{Server, is_root};
use crate::skip;

#[test]
fn smoke() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    assert_eq!(
        sandbox.sh("id -u; pwd"),
        format!("{}\n{}\n", sandbox.uid, sandbox.home.display())
    );
    let pid = server.inner_pid();
    assert!(pid > 1);
    sandbox.spawn(&serde_json::json!({"cmd": "sleep 1000"}));
    sandbox.delete();
}
