"""What follows from the settings, and what may not be combined: one file per concern.

A `resolve_*` function fills in values that were not given; a `check_*` function only looks. Both report to the
context, and neither changes a value that the user gave.
"""
