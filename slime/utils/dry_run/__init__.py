"""What a run would be, worked out from its configuration alone: nothing is started, no device is touched.

`settings` (what differs from the defaults), `placement` (which bundle runs what), `batches` (prompts to micro-batches)
and `memory` (bytes per device) are pure functions of the resolved namespace; `report` puts them together.
"""

from slime.utils.dry_run.report import dry_run_report

__all__ = ["dry_run_report"]
