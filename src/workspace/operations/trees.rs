//! Copying files and trees, and changing their modes.

use crate::client::{Interrupt, Stopped};
use crate::error::{Error, Result};
use crate::files::name::FilePath;
use crate::files::{Changed, CopyReport, Copying};
use crate::workspace::lease::{Lease, Workspace};

/// A copy in progress.
pub struct CopyFiles {
    lease: Lease,
    copying: Option<Copying>,
}

impl Workspace {
    /// Begins to copy a file, a link, or with `recursive` a directory.
    ///
    /// # Errors
    /// As [`Files::copy`](crate::files::Files::copy).
    pub fn copy_file(
        &self,
        from: &FilePath,
        to: &FilePath,
        recursive: bool,
        overwrite: bool,
    ) -> Result<CopyFiles> {
        let lease = self.share()?;
        let copying = Some(self.files()?.copy(from, to, recursive, overwrite)?);
        Ok(CopyFiles { lease, copying })
    }

    /// Sets the permission bits of a file, or with `recursive` of all that is in a directory too.
    ///
    /// # Errors
    /// As [`Files::chmod`](crate::files::Files::chmod); or the workspace ended meanwhile.
    pub fn change_mode(
        &self,
        path: &FilePath,
        mode: Option<u32>,
        recursive: bool,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<Changed, Stopped> {
        let missing = || Error::invalid("the parameter mode is missing");
        let mode = mode.ok_or_else(missing)?;
        let changed = self.files()?.chmod(
            path,
            mode,
            recursive,
            &self.ledger,
            &mut self.paced(interrupt),
        )?;
        self.check_open()?;
        Ok(changed)
    }
}

impl CopyFiles {
    /// Copies until all is done, and returns what was.
    ///
    /// # Errors
    /// It was interrupted; a file cannot be read or written; or the workspace ended meanwhile.
    pub fn run(
        &mut self,
        interrupt: &mut dyn Interrupt,
    ) -> std::result::Result<CopyReport, Stopped> {
        let files = self.lease.files()?;
        let interrupt = &mut self.lease.paced(interrupt);
        let report = match &mut self.copying {
            Some(copying) => copying.run(&files, &self.lease.ledger, interrupt)?,
            None => CopyReport::default(),
        };
        self.lease.check_open()?;
        Ok(report)
    }
}

impl Drop for CopyFiles {
    fn drop(&mut self) {
        // What is staged is removed as its owner.
        let _files = self.lease.files();
        self.copying = None;
    }
}
