//! The servers inside a workspace, as clients ask for them.

use crate::client::{Interrupt, Stopped};
use crate::error::Result;
use crate::ports::{Listed, Port, Wait};
use crate::workspace::lease::Workspace;

impl Workspace {
    /// All ports with a server, in order.
    ///
    /// # Errors
    /// Those of [`crate::ports::Ports::list`]; `NoThreads`.
    pub fn list_ports(
        &self,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Listed, Stopped> {
        let mut listed = None;
        self.work_if_long(interrupt, &mut |interrupt| {
            listed = Some(self.ports.list(&self.ledger, interrupt)?);
            Ok(())
        })?;
        // The work is done.
        listed.ok_or(Stopped::Due)
    }

    /// Prepares to wait until a server listens on a port.
    ///
    /// # Errors
    /// `OverLimit` if as many clients wait for ports of this workspace as may.
    pub fn wait_for_port(&self, port: Port) -> Result<Wait> {
        self.ports.wait(port, &self.background)
    }
}
