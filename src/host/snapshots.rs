//! What requests do with snapshots: the [store](super::store), and what the rest of the host has to say about it.

use std::sync::Arc;

use super::Host;
use super::store::{Pin, Snapshot, unknown};
use crate::error::{Error, Kind, Result};
use crate::files::{Input, Root};
use crate::limits::ledger::Ledger;
use crate::logging;
use crate::spec::sandbox::SandboxSpec;

impl Host {
    /// All snapshots, in the order of their creation.
    pub fn snapshots(&self) -> Vec<Snapshot> {
        self.roots.store.list()
    }

    /// Whether a request imports one, needs one, or builds one.
    pub(super) fn is_making_templates(&self) -> bool {
        self.roots.store.is_busy() || self.is_building()
    }

    /// The snapshot with this name or id.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn snapshot(&self, key: &str) -> Result<Snapshot> {
        let found = self.roots.store.find(key);
        found.ok_or_else(|| unknown(key))
    }

    /// Makes a snapshot of the archive of a root. It takes the name of another one that may have it.
    ///
    /// # Errors
    /// `Unavailable` if sandboxes cannot have roots of their own here; `Exists` if the name is for the operator's templates;
    /// `BadArchive`; `Invalid`; `NoSpace`. Nothing is left then.
    pub fn import_snapshot(
        &self,
        name: Option<&str>,
        input: &mut dyn Input,
        ledger: &Arc<Ledger>,
    ) -> Result<Snapshot> {
        self.roots.check()?;
        name.map_or(Ok(()), |name| self.check_name(name))?;
        let made = self.roots.store.import(input, ledger);
        let made = made.and_then(|import| import.complete(name, None));
        // However long it took, whoever has made it has time to use it.
        self.table().note_request();
        let made = made?;
        logging::info(format_args!("snapshot {} created", made.id));
        Ok(made)
    }

    /// # Errors
    /// `Exists` if a name is for the operator's templates.
    pub(super) fn check_name(&self, name: &str) -> Result<()> {
        if self.roots.is_named(name) || self.roots.is_copy(name) {
            let text =
                format!("{name} is a template of the server's settings; choose another name");
            return Err(Error::new(Kind::Exists, text));
        }
        Ok(())
    }

    /// Deletes a snapshot. Returns its id, and whether files of it are still being removed.
    ///
    /// # Errors
    /// `NotFound`; `InUse` if a sandbox is made of it.
    pub fn delete_snapshot(&self, key: &str) -> Result<(String, bool)> {
        let user_of = |id: &str| {
            let table = self.table();
            let is_made_of = |spec: &SandboxSpec| {
                let root = spec.root.as_ref();
                root.is_some_and(|root| root.snapshot.as_deref() == Some(id))
            };
            let sandboxes = table.all().map(|sandbox| (&sandbox.spec, &sandbox.id));
            // Those that cannot be taken over yet need it, too.
            let unready = table.unready.iter();
            let unready = unready.map(|own| (&own.record.spec, &own.record.id));
            let mut all = sandboxes.chain(unready);
            let found = all.find(|(spec, _)| is_made_of(spec));
            found.map(|(_, id)| id.clone())
        };
        let (id, is_removing) = self.roots.store.remove(key, &user_of)?;
        logging::info(format_args!("snapshot {id} deleted"));
        Ok((id, is_removing))
    }

    /// Opens a snapshot to read it. It is not deleted as long as the second value exists.
    ///
    /// # Errors
    /// `NotFound`; `System`.
    pub fn open_snapshot(&self, key: &str) -> Result<(Root, Pin)> {
        let pin = self.roots.store.pin(key).ok_or_else(|| unknown(key))?;
        Ok((pin.root()?, pin))
    }
}

/// Of a program that does not have them.
#[cfg(not(all(feature = "e2b", feature = "file-tools")))]
impl Host {
    #[expect(clippy::unused_self, reason = "others look at it")]
    pub(super) fn has_builds(&self) -> bool {
        false
    }

    #[expect(clippy::unused_self, reason = "others look at it")]
    pub(super) fn is_building(&self) -> bool {
        false
    }
}
