//! Long work on a text, which stops when it is interrupted.

use memchr::memmem::Finder;

use crate::client::{Interrupt, Stopped};

/// Bytes that are worked on before it is asked whether to go on.
const STEP_BYTES: usize = 1 << 20;

/// What a search takes besides the bytes that it looks at: so many bytes take as long.
const SEARCH_WORK: usize = 64;

/// Asks from time to time whether to go on.
pub struct Pace<'a> {
    interrupt: &'a mut dyn Interrupt,
    /// Bytes before it asks again.
    left: usize,
}

impl<'a> Pace<'a> {
    /// Asks this interrupt.
    pub fn new(interrupt: &'a mut dyn Interrupt) -> Self {
        let left = STEP_BYTES;
        Self { interrupt, left }
    }

    /// Counts bytes that were worked on.
    ///
    /// # Errors
    /// It was interrupted.
    pub fn spend(&mut self, bytes: usize) -> Result<(), Stopped> {
        if let Some(left) = self.left.checked_sub(bytes) {
            self.left = left;
            return Ok(());
        }
        self.left = STEP_BYTES;
        self.interrupt.check()
    }

    /// Gives all of some bytes to `work`, a step at a time.
    ///
    /// # Errors
    /// It was interrupted, or the work failed.
    pub fn each_step(
        &mut self,
        bytes: &[u8],
        work: &mut dyn FnMut(&[u8]) -> Result<(), Stopped>,
    ) -> Result<(), Stopped> {
        for step in bytes.chunks(STEP_BYTES) {
            work(step)?;
            self.spend(step.len())?;
        }
        Ok(())
    }

    /// The first place of what `finder` looks for, which is not empty, from a place on.
    pub(super) fn find(
        &mut self,
        text: &[u8],
        finder: &Finder<'_>,
        mut from: usize,
    ) -> Result<Option<usize>, Stopped> {
        let length = finder.needle().len();
        // Parts overlap by what they could cut in two.
        let step = STEP_BYTES.max(length);
        while let Some(rest) = text.get(from..) {
            let part = &rest[..rest.len().min(step + length)];
            let found = finder.find(part);
            self.spend(SEARCH_WORK + found.map_or(part.len(), |at| at + length))?;
            if found.is_some() || part.len() == rest.len() {
                return Ok(found.map(|at| from + at));
            }
            from += step + 1;
        }
        Ok(None)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::files::condition::Patient;

    /// Lets so many steps pass.
    pub(in super::super) struct Steps(pub u32);

    impl Interrupt for Steps {
        fn check(&mut self) -> Result<(), Stopped> {
            self.0 = self.0.checked_sub(1).ok_or(Stopped::Disconnected)?;
            Ok(())
        }
    }

    #[test]
    fn a_search_finds_what_lies_across_its_parts() {
        for length in [2, 3, STEP_BYTES - 1, STEP_BYTES, STEP_BYTES + 5] {
            let wanted = ["a".repeat(length - 1), "b".to_owned()].concat();
            let finder = Finder::new(&wanted);
            for start in [
                0,
                1,
                STEP_BYTES - 1,
                STEP_BYTES,
                STEP_BYTES + 1,
                3 * STEP_BYTES,
            ] {
                let text = ["c".repeat(start), wanted.clone(), "c".to_owned()].concat();
                let mut patient = Patient;
                let mut pace = Pace::new(&mut patient);
                for from in [0, start / 2, start] {
                    let found = pace.find(text.as_bytes(), &finder, from).unwrap();
                    assert_eq!(found, Some(start), "{length} from {from}");
                }
                let beyond = pace.find(text.as_bytes(), &finder, start + 1).unwrap();
                assert_eq!(beyond, None);
            }
        }
    }

    #[test]
    fn a_search_stops_when_it_is_interrupted() {
        let text = vec![b'a'; 64 * STEP_BYTES];
        let mut steps = Steps(3);
        let found = Pace::new(&mut steps).find(&text, &Finder::new("b"), 0);
        assert!(matches!(found, Err(Stopped::Disconnected)));
    }
}
