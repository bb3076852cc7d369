//! What is not done, and what the answer says.
