"""Rules of `lint`, by subject, and a script as they see it."""
