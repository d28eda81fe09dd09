"""Where metrics go: one implementation of `Tracker` per file."""
