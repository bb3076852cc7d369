//! Executing code: where, and in which language.

use crate::client::{Interrupt, Stopped};
use crate::error::{self, Error};
use crate::interpreter::{Asked, ContextSpec, ExecutionSpec};
use crate::spec::language::Language;
use crate::workspace::lease::Workspace;

impl Workspace {
    /// Executes code: in the context that is named, in one of its own if `is_stateless`, else in the default context
    /// of the language, which is Python if nothing is said.
    ///
    /// # Errors
    /// `Invalid` if the named context has another language; the client disconnected before there was an interpreter;
    /// those of [`crate::interpreter::Contexts::execute`].
    pub fn execute_code(
        &self,
        language: Option<Language>,
        context: ContextSpec,
        spec: ExecutionSpec,
        is_stateless: bool,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Asked, Stopped> {
        if let (Some(language), Some(id)) = (language, &context.id) {
            let named = self.contexts.find(id)?.language;
            if named != language {
                let (asked, has) = (language.name(), named.name());
                let text = format!("language is {asked}, but the context {id} has {has}");
                return Err(Error::invalid(text).into());
            }
        }
        let language = language.unwrap_or(Language::Python);
        if is_stateless {
            self.contexts
                .execute_stateless(language, context, spec, interrupt)
        } else {
            self.contexts.execute(language, context, spec, interrupt)
        }
    }

    /// Whether commands find a program by this name.
    ///
    /// # Errors
    /// The server may not act as the commands' user.
    pub fn has_program(&self, name: &str) -> error::Result<bool> {
        self.confinement.finds(name)
    }
}
