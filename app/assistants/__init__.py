"""The built-in assistants: a data file each, and the loader."""
