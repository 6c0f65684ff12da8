"""Rules by operator family. Importing this package fills the registry."""
